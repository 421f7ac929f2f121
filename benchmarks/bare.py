"""A Llama train step written by hand in plain JAX, as short as it gets: what our loop is measured against.

Run as a module it trains one step from a cold start and prints a line when the step is done.
"""

import argparse
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Size:
  """The model and batch of the benchmark: 58 million parameters, 2,048 tokens a step."""

  layers: int = 8
  width: int = 512
  heads: int = 8
  head_dim: int = 64
  mlp: int = 1408
  vocab: int = 32000
  length: int = 512
  rows: int = 4

  @property
  def keys(self) -> dict:
    """The same as keys of MaxText."""
    return {
      "base_num_decoder_layers": self.layers,
      "base_emb_dim": self.width,
      "base_num_query_heads": self.heads,
      "base_num_kv_heads": self.heads,
      "head_dim": self.head_dim,
      "base_mlp_dim": self.mlp,
      "vocab_size": self.vocab,
      "max_target_length": self.length,
      "per_device_batch_size": self.rows,
    }


SMALL = Size(layers=2, width=64, heads=2, head_dim=32, mlp=128, vocab=512, length=128, rows=2)


def init(size: Size):
  """Parameters, two moments and a step count."""
  E, H, D, F, V, L = size.width, size.heads, size.head_dim, size.mlp, size.vocab, size.layers
  shapes = {"q": (E, H, D), "k": (E, H, D), "v": (E, H, D), "o": (H, D, E), "g": (E, F), "u": (E, F), "d": (F, E)}
  fan_in = {"o": H * D, "d": F}

  def make(key):
    keys = iter(jax.random.split(key, 9))

    def normal(shape, fan):
      return jax.random.normal(next(keys), shape) * fan**-0.5

    layers = {n: normal((L, *s), fan_in.get(n, E)) for n, s in shapes.items()}
    layers |= {"n1": jnp.ones((L, E)), "n2": jnp.ones((L, E))}
    params = {"embed": normal((V, E), 1.0), "head": normal((E, V), E), "norm": jnp.ones(E), "layers": layers}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)

  return jax.jit(make)(jax.random.key(0))


def make_step(size: Size, dtype, lr: float = 3e-5):
  """AdamW with clipping; layers scanned and rematerialised; float32 weights, softmax and norms."""
  half = size.head_dim // 2
  angle = np.arange(size.length)[:, None] * 10000.0 ** (-np.arange(half) / half)
  cos, sin = (f(angle)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
  causal = np.tril(np.ones((size.length, size.length), bool))
  chunk = max(size.length // 4, 1)

  def norm(x, w):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * w).astype(dtype)

  def rope(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

  def layer(x, p):
    p = {n: w.astype(dtype) for n, w in p.items()}
    h = norm(x, p["n1"])
    q, k, v = (jnp.einsum("bse,ehd->bshd", h, p[n]) for n in "qkv")
    q, k, mixed = rope(q), rope(k), []
    for a in range(0, size.length, chunk):  # a query sees no later key, so do not compute them
      b = a + chunk
      scores = jnp.einsum("bshd,bthd->bhst", q[:, a:b], k[:, :b]).astype(jnp.float32) * size.head_dim**-0.5
      weights = jax.nn.softmax(jnp.where(causal[a:b, :b], scores, -1e30)).astype(dtype)
      mixed.append(jnp.einsum("bhst,bthd->bshd", weights, v[:, :b]))
    x = x + jnp.einsum("bshd,hde->bse", jnp.concatenate(mixed, 1), p["o"])
    h = norm(x, p["n2"])
    return x + (jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["d"], None

  def loss_of(p, tokens, targets):
    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), p["embed"].astype(dtype)[tokens], p["layers"])
    logits = (norm(x, p["norm"]) @ p["head"].astype(dtype)).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()

  def step(state, tokens, targets):
    p, m, v, i = state
    loss, g = jax.value_and_grad(loss_of)(p, tokens, targets)
    gnorm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(g)))
    g = jax.tree.map(lambda x: x * jnp.minimum(1.0, 1.0 / gnorm), g)
    i = i + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, g)
    scale = jnp.sqrt(1 - 0.95**i) / (1 - 0.9**i)
    p = jax.tree.map(lambda p, m, v: p - lr * (scale * m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), p, m, v)
    return (p, m, v, i), loss

  return jax.jit(step, donate_argnums=0)


def batch(size: Size, seed: int = 0):
  """Inputs and targets."""
  tokens = np.random.default_rng(seed).integers(0, size.vocab, (size.rows, size.length + 1), dtype=np.int32)
  return tokens[:, :-1], tokens[:, 1:]


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--small", action="store_true")
  arguments = parser.parse_args()
  size = SMALL if arguments.small else Size()
  _, loss = make_step(size, jnp.dtype(arguments.dtype))(init(size), *batch(size))
  print(f"step 1 loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
  main()
