"""Attention: softmax(q k^T) v, causal or not, with windows or chunks, segments, spans, a soft cap on logits and sinks.

`reference` is the plain form and the oracle of the others; `AttentionKernel` dispatches to one of them.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D head dim.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention_mask import ScoreSpec, Tokens, gathered, keys_like_queries, scores
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.kernels.online_softmax import OnlineSoftmax
from maxtext.kernels.ring_attention import ring
from maxtext.kernels.splash_attention import SplashBlocks, splash
from maxtext.mesh.explicit import auto_axes
from maxtext.mesh.rules import mesh_axes_of, num_shards_of

Kernel = Literal["dot_product", "chunked", "splash", "cudnn"]

# The name under which the result may be kept for the backward pass.
RESULT = "context"


@dataclass(frozen=True)
class AttentionKernel:
  """Self-attention of whole sequences, by one of the kernels.

  Attributes:
    ring: where rows are split over devices, keys travel round them; otherwise they are gathered.
    order: in which the tokens of a row stand; None is that of the text.
    interpret: run Pallas kernels as plain operations, to test them without a TPU.
  """

  kernel: Kernel = "dot_product"
  precision: str = "default"
  blocks: SplashBlocks = field(default_factory=SplashBlocks)
  ring: bool = False
  order: LoadBalancedOrder | None = None
  interpret: bool = False

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    scoring: ScoreSpec,
    sinks: jax.Array | None = None,
    *,
    selected: jax.Array | None = None,
    mesh: Mesh,
    q_spec: PartitionSpec,
    kv_spec: PartitionSpec,
    matmuls: AttentionMatmuls = PLAIN,
  ) -> jax.Array:
    """q [B,S,H,D], k and v [B,S,K,D], sinks [H] to [B,S,H,D]; mesh and specs are where they live.

    Keys stand in the order of their positions within a segment, so that the order alone is causal, unless `order` says
    otherwise. Where keys are chosen one by one, [B,1 or H,S,T], no kernel that skips blocks of them helps. The splash
    and cuDNN kernels do not support spans, and do not call `matmuls`.
    """
    assert matmuls == PLAIN or not self.fused, "refused when the layer is built"
    if tokens.spans is not None and self.kernel in ("splash", "cudnn"):
      raise ValueError(f"spans are not supported by the {self.kernel} kernel: write attention=chunked or dot_product.")
    if selected is not None:
      assert tokens.spans is None, "checked by the decoder"
      assert self.order is None, "refused when the model is built"
      out = chunked(q, k, v, tokens, tokens, scoring, sinks, self.precision, selected=selected, matmuls=matmuls)
      return checkpoint_name(out, RESULT)
    if self.kernel == "splash":
      return splash(
        q, k, v, tokens, scoring, sinks, mesh=mesh, q_spec=q_spec, kv_spec=kv_spec, blocks=self.blocks,
        order=self.order, result=RESULT, interpret=self.interpret,
      )  # fmt: skip

    def placed(run: Callable[..., jax.Array]) -> jax.Array:
      return auto_axes(run, NamedSharding(mesh, q_spec), q, k, v, tokens, sinks)

    if self.kernel == "cudnn":
      assert sinks is None, "refused when the model is built"
      out = placed(lambda q, k, v, tokens, _: _cudnn(q, k, v, tokens.segments, scoring))
    elif q_spec[1]:
      out = self._split(q, k, v, tokens, scoring, sinks, mesh, q_spec, kv_spec, matmuls)
    else:
      plain = self._plain(matmuls)
      out = placed(lambda q, k, v, tokens, sinks: plain(q, k, v, tokens, tokens, scoring, sinks))
    return checkpoint_name(out, RESULT)

  @property
  def fused(self) -> bool:
    """Whether the kernel is one program that does its own matmuls."""
    return self.kernel in ("splash", "cudnn")

  def _plain(self, matmuls: AttentionMatmuls) -> Callable[..., jax.Array]:
    return partial(chunked if self.kernel == "chunked" else reference, precision=self.precision, matmuls=matmuls)

  def _split(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    scoring: ScoreSpec,
    sinks: jax.Array | None,
    mesh: Mesh,
    q_spec: PartitionSpec,
    kv_spec: PartitionSpec,
    matmuls: AttentionMatmuls,
  ) -> jax.Array:
    """Rows are split over devices: each has its queries, and all keys or those that come by."""
    axes = mesh_axes_of(q_spec[1])
    k, v, kv_spec = keys_like_queries(q, k, v, q_spec, kv_spec)
    plain = self._plain(matmuls)
    if self.kernel == "chunked":
      plain = partial(plain, ordered=False)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, sinks: jax.Array | None) -> jax.Array:
      if self.ring:
        parts = num_shards_of(mesh, axes)
        return ring(q, k, v, tokens, scoring, sinks, self.precision, axes=axes, parts=parts, matmuls=matmuls)
      keys, values, key_tokens = gathered((k, v, tokens), axes, None)
      return plain(q, keys, values, tokens, key_tokens, scoring, sinks)

    tokens_spec = jax.tree.map(lambda _: PartitionSpec(*q_spec[:2]), tokens)
    sinks_spec = None if sinks is None else PartitionSpec(q_spec[2])
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(q_spec, kv_spec, kv_spec, tokens_spec, sinks_spec),
      out_specs=q_spec,
      check_vma=False,
    )(q, k, v, tokens, sinks)


def reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  selected: jax.Array | None = None,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """The plain form: a key is visible if `ScoreSpec.sees` it, it is of the same segment, and chosen [B,1 or H,S,T].

  A sink is a logit of its own per head, which takes its share of the softmax and gives nothing.
  """
  B, S, H, _ = q.shape
  logits = scores(q, k, queries, keys, scoring, precision, selected, matmuls)
  if sinks is not None:
    column = sinks.astype(jnp.float32).reshape(1, *logits.shape[1:3], 1, 1)
    logits = jnp.concatenate([logits, jnp.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
  weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
  return matmuls.values("bkgst,btkd->bskgd", weights, v, precision=precision).reshape(B, S, H, v.shape[-1])


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  chunks: int = 8,
  selected: jax.Array | None = None,
  ordered: bool = True,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """The reference, a chunk of queries at a time, so that only one chunk's logits exist at once, in the backward pass
  too. Where queries and keys are the same tokens in order, keys after the chunk are never touched, unless spans or
  attention both ways may need them."""
  S = q.shape[1]
  later = not ordered or not scoring.causal or queries.spans is not None
  size = max(128, -(-S // chunks))
  attend = partial(reference, scoring=scoring, precision=precision, matmuls=matmuls)
  one: Callable[..., jax.Array] = jax.checkpoint(attend) if size < S else attend
  out = []
  for start in range(0, S, size):
    end = min(start + size, S)
    first, last = 0, k.shape[1] if later else end
    if ordered and scoring.causal and scoring.window is not None:
      first = max(0, start - scoring.window + 1)
    own = None if selected is None else selected[:, :, start:end, first:last]
    here, there = queries.part(start, end), keys.part(first, last)
    out.append(one(q[:, start:end], k[:, first:last], v[:, first:last], here, there, sinks=sinks, selected=own))
  return jnp.concatenate(out, axis=1)


def blockwise(
  q: jax.Array,
  read: Callable[[jax.Array], tuple[jax.Array, jax.Array, Tokens]],
  blocks: jax.Array,
  queries: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """The reference over the first `blocks` of keys and values, each read when its turn comes.

  Blocks of which a query sees nothing change nothing, to the bit.
  """
  B, S, H, _ = q.shape
  _, values, _ = jax.eval_shape(read, jnp.zeros((), jnp.int32))
  K, D = values.shape[2:]

  def join(block: jax.Array, sums: OnlineSoftmax) -> OnlineSoftmax:
    k, v, keys = read(block)
    return sums.join(q, k, v, queries, keys, scoring, precision, matmuls)

  return jax.lax.fori_loop(0, blocks, join, OnlineSoftmax.empty((B, K, H // K, S), D, sinks)).mean.astype(values.dtype)


def largest_logits(
  q: jax.Array, k: jax.Array, tokens: Tokens, scoring: ScoreSpec, precision: str = "default", chunks: int = 8
) -> jax.Array:
  """The largest logit of each head [H], before any cap, over all queries and the keys they see; no gradient flows
  through it."""
  q, k = jax.lax.stop_gradient((q, k))
  uncapped = dataclasses.replace(scoring, cap=None)
  found = []
  S = q.shape[1]
  later = not scoring.causal or tokens.spans is not None
  size = -(-S // chunks)
  for start in range(0, S, size):
    end = min(start + size, S)
    last = S if later else end
    here, there = tokens.part(start, end), tokens.part(0, last)
    found.append(scores(q[:, start:end], k[:, :last], here, there, uncapped, precision).max((0, 3, 4)))
  return jnp.stack(found).max(0).reshape(q.shape[2])


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scoring: ScoreSpec) -> jax.Array:
  assert scoring.cap is None, "refused when the model is built"
  assert not scoring.chunked, "refused when the model is built"
  mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
  local = None if scoring.window is None else (scoring.window - 1, 0 if scoring.causal else scoring.window - 1)
  return jax.nn.dot_product_attention(
    q, k, v, mask=mask, scale=scoring.scale, is_causal=scoring.causal, local_window_size=local, implementation="cudnn"
  )
