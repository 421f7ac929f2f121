"""Greedy decoding of a Llama written by hand in plain JAX: one jitted step over a batch, the cache written in place.

It reads the weights of a Hugging Face folder. All rows are at the same position, which an engine cannot assume.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.bare import Size


def load(folder: Path, size: Size) -> dict:
  """Weights as products want them, layers stacked."""
  tensors = load_file(folder / "model.safetensors")
  names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
           "g": "mlp.gate_proj", "u": "mlp.up_proj", "d": "mlp.down_proj", "n1": "input_layernorm",
           "n2": "post_attention_layernorm"}  # fmt: skip

  def stacked(name: str) -> np.ndarray:
    return np.stack([tensors[f"model.layers.{i}.{name}.weight"].T for i in range(size.layers)])

  layers = {short: stacked(name) for short, name in names.items()}
  head = tensors["lm_head.weight"].T
  embedding, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
  params = {"embed": embedding, "head": head, "norm": norm, "layers": layers}
  return jax.jit(lambda params: jax.tree.map(jnp.copy, params))(params)  # NumPy's memory has larger pages than JAX's


def init_cache(size: Size) -> jax.Array:
  """Keys and values of every layer, heads before positions."""
  return jnp.zeros((size.layers, 2, size.rows, size.heads, size.length, size.head_dim))


def make_step(size: Size) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """(weights, cache, tokens [B], position) to (cache, next tokens)."""
  half, H, D = size.head_dim // 2, size.heads, size.head_dim

  def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w

  def step(params: dict, cache: jax.Array, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    angle = position * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    hidden = jnp.where(jnp.arange(size.length) > position, -jnp.inf, 0.0)

    def rope(x: jax.Array) -> jax.Array:
      a, b = jnp.split(x, 2, -1)
      return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(carry: tuple[jax.Array, jax.Array], xs: tuple[dict, jax.Array]) -> tuple[tuple, None]:
      (x, cache), (p, i) = carry, xs
      h = norm(x, p["n1"])
      q, k, v = ((h @ p[n]).reshape(-1, H, D) for n in "qkv")
      new = jnp.stack([rope(k), v])[None, :, :, :, None]
      cache = jax.lax.dynamic_update_slice(cache, new, (i, 0, 0, 0, position, 0))
      keys, values = cache[i]
      weights = jax.nn.softmax(jnp.einsum("bhd,bhtd->bht", rope(q), keys) * D**-0.5 + hidden)
      x = x + jnp.einsum("bht,bhtd->bhd", weights, values).reshape(-1, H * D) @ p["o"]
      h = norm(x, p["n2"])
      return (x + (jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["d"], cache), None

    layers = (params["layers"], jnp.arange(size.layers))
    (x, cache), _ = jax.lax.scan(layer, (params["embed"][tokens], cache), layers)
    return cache, jnp.argmax(norm(x, params["norm"]) @ params["head"], -1)

  return jax.jit(step, donate_argnums=1)
