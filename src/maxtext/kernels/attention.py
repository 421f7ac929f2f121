"""Attention: softmax(q k^T) v, causal, with windows or chunks, segments, a soft cap on logits and sinks.

`reference` is the plain form and the oracle of the others; `Attention` dispatches to one of them.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

Kernel = Literal["dot_product", "chunked", "splash", "cudnn"]

# The name under which the result may be kept for the backward pass.
RESULT = "context"

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class SplashBlocks:
  """Block sizes of the splash kernel; see the `sa_block_*` keys."""

  q: int = 512
  kv: int = 512
  kv_compute: int = 512
  q_dkv: int = 512
  kv_dkv: int = 512
  kv_dkv_compute: int = 512
  q_dq: int = 512
  kv_dq: int = 512
  fused_backward: bool = False

  def within(self, length: int, kind: Callable[..., Any]) -> Any:
    """As the kernel wants them: no block longer than the sequence, and none for a kernel that is not used."""
    q_dq, kv_dq = (None, None) if self.fused_backward else (min(self.q_dq, length), min(self.kv_dq, length))
    return kind(
      block_q=min(self.q, length),
      block_kv=min(self.kv, length),
      block_kv_compute=min(self.kv_compute, length),
      block_q_dkv=min(self.q_dkv, length),
      block_kv_dkv=min(self.kv_dkv, length),
      block_kv_dkv_compute=min(self.kv_dkv_compute, length),
      block_q_dq=q_dq,
      block_kv_dq=kv_dq,
      use_fused_bwd_kernel=self.fused_backward,
    )


class Tokens(NamedTuple):
  """Where tokens stand: position within the document, and document within the row (None: each row is one)."""

  positions: jax.Array
  segments: jax.Array | None = None

  def part(self, start: int, end: int) -> "Tokens":
    """The tokens of a range."""
    return Tokens(self.positions[:, start:end], None if self.segments is None else self.segments[:, start:end])


@dataclass(frozen=True)
class Scoring:
  """How a query weighs keys, and which it sees.

  Attributes:
    scale: times the product of query and key.
    window: how far back a query sees, itself counted; None is all the way.
    chunked: the window does not slide: positions are cut into chunks of that length, and a query sees its own.
    cap: bounds scaled logits by cap * tanh(logit / cap).
  """

  scale: float
  window: int | None = None
  chunked: bool = False
  cap: float | None = None

  def sees(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether positions `keys` are visible from positions `queries`."""
    gap = queries - keys
    if self.window is None:
      return gap >= 0
    if self.chunked:
      return (gap >= 0) & (queries // self.window == keys // self.window)
    return (gap >= 0) & (gap < self.window)


@dataclass(frozen=True)
class Attention:
  """Self-attention of whole sequences, by one of the kernels."""

  kernel: Kernel = "dot_product"
  precision: str = "default"
  blocks: SplashBlocks = SplashBlocks()
  interpret: bool = False  # run Pallas kernels as plain operations, to test them without a TPU

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    scoring: Scoring,
    sinks: jax.Array | None = None,
    *,
    chosen: jax.Array | None = None,
    mesh: Mesh,
    q_spec: PartitionSpec,
    kv_spec: PartitionSpec,
  ) -> jax.Array:
    """q [B,S,H,D], k and v [B,S,K,D], sinks [H] to [B,S,H,D]; mesh and specs are where they live.

    Keys stand in the order of their positions within a segment, so that the order alone is causal. Where keys are
    chosen one by one, [B,1 or H,S,T], no kernel that skips blocks of them helps.
    """
    if chosen is not None:
      return checkpoint_name(chunked(q, k, v, tokens, scoring, sinks, self.precision, chosen=chosen), RESULT)
    if self.kernel == "splash":
      return self._splash(q, k, v, tokens, scoring, sinks, mesh, q_spec, kv_spec)
    if self.kernel == "cudnn":
      assert sinks is None, "refused when the model is built"
      out = _cudnn(q, k, v, tokens.segments, scoring)
    elif self.kernel == "chunked":
      out = chunked(q, k, v, tokens, scoring, sinks, self.precision)
    else:
      out = reference(q, k, v, tokens, tokens, scoring, sinks, self.precision)
    return checkpoint_name(out, RESULT)

  def _splash(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    scoring: Scoring,
    sinks: jax.Array | None,
    mesh: Mesh,
    q_spec: PartitionSpec,
    kv_spec: PartitionSpec,
  ) -> jax.Array:
    """JAX's splash kernel, per device. Its residuals carry the name RESULT, so the result must not carry it again."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, H = q.shape[1], q.shape[2]
    if q_spec[2] != kv_spec[2]:  # key heads too few to be split like the query heads: give each query head its own
      k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
      kv_spec = q_spec
    split = q_spec[2] or ()
    heads = H // math.prod(mesh.shape[a] for a in ((split,) if isinstance(split, str) else split))
    window, segments = scoring.window, tokens.segments
    if window is None:
      mask: Any = masks.CausalMask((S, S))
    elif not scoring.chunked:
      mask = masks.LocalMask((S, S), (window - 1, 0), 0)
    elif segments is None:
      mask = masks.ChunkedCausalMask((S, S), window)
    else:  # chunks are those of the documents, not of the row: let them be segments of their own
      mask, segments = masks.CausalMask((S, S)), segments * (S // window + 1) + tokens.positions // window
    attend = splash.make_splash_mha(
      masks.MultiHeadMask([mask] * heads),
      block_sizes=self.blocks.within(S, splash.BlockSizes),
      attn_logits_soft_cap=scoring.cap,
      head_shards=1,
      q_seq_shards=1,
      residual_checkpoint_name=RESULT,
      interpret=self.interpret,
    )

    def local(
      q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
    ) -> jax.Array:
      heads_first = (x.swapaxes(1, 2) for x in (q * scoring.scale, k, v))
      ids = None if segments is None else splash.SegmentIds(segments, segments)
      return jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(*heads_first, ids, sinks).swapaxes(1, 2)

    ids_spec = None if segments is None else PartitionSpec(q_spec[0], None)
    sinks_spec = None if sinks is None else PartitionSpec(q_spec[2])
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(q_spec, kv_spec, kv_spec, ids_spec, sinks_spec),
      out_specs=q_spec,
      check_vma=False,
    )(q, k, v, segments, sinks)


def reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: Scoring,
  sinks: jax.Array | None = None,
  precision: str = "default",
  chosen: jax.Array | None = None,
) -> jax.Array:
  """The plain form: a key is visible if it is not later, near enough, of the same segment, and chosen [B,1 or H,S,T].

  A sink is a logit of its own per head, which takes its share of the softmax and gives nothing.
  """
  B, S, H, D = q.shape
  K = k.shape[2]
  grouped = q.reshape(B, S, K, H // K, D)
  logits = jnp.einsum("bskgd,btkd->bkgst", grouped, k, precision=precision, preferred_element_type=jnp.float32)
  logits = logits * scoring.scale
  if scoring.cap is not None:
    logits = scoring.cap * jnp.tanh(logits / scoring.cap)
  visible = scoring.sees(queries.positions[:, :, None], keys.positions[:, None, :])
  if queries.segments is not None and keys.segments is not None:
    visible &= queries.segments[:, :, None] == keys.segments[:, None, :]
  visible = visible[:, None, None]
  if chosen is not None:
    visible = visible & chosen.reshape(B, *((K, H // K) if chosen.shape[1] == H else (1, 1)), *chosen.shape[2:])
  logits = jnp.where(visible, logits, _MASKED)
  if sinks is not None:
    column = sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
    logits = jnp.concatenate([logits, jnp.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
  weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
  return jnp.einsum("bkgst,btkd->bskgd", weights, v, precision=precision).reshape(B, S, H, v.shape[-1])


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  tokens: Tokens,
  scoring: Scoring,
  sinks: jax.Array | None = None,
  precision: str = "default",
  chunks: int = 8,
  chosen: jax.Array | None = None,
) -> jax.Array:
  """The reference, a chunk of queries at a time: keys after the chunk are never touched, and only one chunk's logits
  exist at once, in the backward pass too."""
  S = q.shape[1]
  size = max(128, -(-S // chunks))
  attend = partial(reference, scoring=scoring, precision=precision)
  one: Callable[..., jax.Array] = jax.checkpoint(attend) if size < S else attend
  out = []
  for start in range(0, S, size):
    end = min(start + size, S)
    first = 0 if scoring.window is None else max(0, start - scoring.window + 1)
    keys, values = k[:, first:end], v[:, first:end]
    own = None if chosen is None else chosen[:, :, start:end, first:end]
    here, there = tokens.part(start, end), tokens.part(first, end)
    out.append(one(q[:, start:end], keys, values, here, there, sinks=sinks, chosen=own))
  return jnp.concatenate(out, axis=1)


def largest_logits(
  q: jax.Array, k: jax.Array, tokens: Tokens, scoring: Scoring, precision: str = "default", chunks: int = 8
) -> jax.Array:
  """The largest logit of each head [H] over all queries and the keys they see; no gradient flows through it."""
  q, k = jax.lax.stop_gradient((q, k))
  B, S, H, D = q.shape
  K = k.shape[2]
  found = []
  size = -(-S // chunks)
  for start in range(0, S, size):
    end = min(start + size, S)
    here, there = tokens.part(start, end), tokens.part(0, end)
    grouped = q[:, start:end].reshape(B, end - start, K, H // K, D)
    logits = jnp.einsum(
      "bskgd,btkd->bkgst", grouped, k[:, :end], precision=precision, preferred_element_type=jnp.float32
    )
    visible = scoring.sees(here.positions[:, :, None], there.positions[:, None, :])
    if here.segments is not None and there.segments is not None:
      visible &= here.segments[:, :, None] == there.segments[:, None, :]
    found.append(jnp.where(visible[:, None, None], logits, _MASKED).max((0, 3, 4)))
  return jnp.stack(found).max(0).reshape(H) * scoring.scale


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scoring: Scoring) -> jax.Array:
  assert scoring.cap is None, "refused when the model is built"
  assert not scoring.chunked, "refused when the model is built"
  mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
  local = None if scoring.window is None else (scoring.window - 1, 0)
  return jax.nn.dot_product_attention(
    q, k, v, mask=mask, scale=scoring.scale, is_causal=True, local_window_size=local, implementation="cudnn"
  )
