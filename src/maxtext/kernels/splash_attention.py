"""Splash attention: JAX's kernel for TPUs, which skips blocks of keys that are masked for a whole block of queries.

Shapes: B batch, S queries, H query heads, K key heads, D head dim.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding, match_kv_heads
from maxtext.kernels.attention_mask import ScoreSpec, gathered
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.mesh.rules import mesh_axes_of, num_shards_of


@dataclass(frozen=True)
class SplashBlocks:
  """Block sizes of the splash kernel (the `sa_block_*` keys), and the layouts in memory of queries, keys and values."""

  q: int = 512
  kv: int = 512
  kv_compute: int = 512
  q_dkv: int = 512
  kv_dkv: int = 512
  kv_dkv_compute: int = 512
  q_dq: int = 512
  kv_dq: int = 512
  fused_backward: bool = False
  layouts: tuple[str, str, str] = ("HEAD_DIM_MINOR",) * 3

  def fit(self, queries: int, keys: int) -> bool:
    """Whether so many queries and keys can be divided into these blocks, or into one block where they are fewer."""
    by_query = (self.q, self.q_dkv, self.q_dq)
    by_key = (self.kv, self.kv_compute, self.kv_dkv, self.kv_dkv_compute, self.kv_dq)
    pairs = [(queries, by_query), (keys, by_key)]
    return all(length % 128 == 0 and length % min(size, length) == 0 for length, sizes in pairs for size in sizes)

  def within(self, queries: int, keys: int) -> Any:
    """Block sizes as the kernel takes them: none longer than its dimension, and None for a kernel that is not used."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    q_dq, kv_dq = (None, None) if self.fused_backward else (min(self.q_dq, queries), min(self.kv_dq, keys))
    q_layout, k_layout, v_layout = (kernel.QKVLayout[name] for name in self.layouts)
    return kernel.BlockSizes(
      block_q=min(self.q, queries),
      block_kv=min(self.kv, keys),
      block_kv_compute=min(self.kv_compute, keys),
      block_q_dkv=min(self.q_dkv, queries),
      block_kv_dkv=min(self.kv_dkv, keys),
      block_kv_dkv_compute=min(self.kv_dkv_compute, keys),
      block_q_dq=q_dq,
      block_kv_dq=kv_dq,
      use_fused_bwd_kernel=self.fused_backward,
      q_layout=q_layout,
      k_layout=k_layout,
      v_layout=v_layout,
    )


def splash(
  inputs: AttentionInputs,
  scoring: ScoreSpec,
  sharding: AttentionSharding,
  blocks: SplashBlocks,
  order: LoadBalancedOrder | None,
  *,
  result: str,
  interpret: bool,
) -> jax.Array:
  """The kernel on every device, with the keys of whole rows.

  Its residuals have the checkpoint name `result`, so the caller must not name the output so again.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

  inputs, sharding = match_kv_heads(inputs, sharding)
  q, k, v, tokens, sinks, _ = inputs
  mesh, q_spec, kv_spec = sharding.mesh, sharding.q_spec, sharding.kv_spec
  S, H = q.shape[1], q.shape[2]
  length_axes, parts = mesh_axes_of(q_spec[1]), num_shards_of(mesh, q_spec[1])
  segments = tokens.segments
  if scoring.chunked and (segments is not None or not scoring.causal):
    # Chunks are relative to documents: make each chunk a segment.
    assert scoring.window is not None
    chunk = tokens.positions // scoring.window
    segments = chunk if segments is None else segments * (S // scoring.window + 1) + chunk
    scoring = replace(scoring, window=None, chunked=False)
  attend = kernel.make_splash_mha(
    _mask(scoring, S, H // num_shards_of(mesh, q_spec[2]), order),
    block_sizes=blocks.within(S // parts, S),
    attn_logits_soft_cap=scoring.cap,
    head_shards=1,
    q_seq_shards=parts,
    residual_checkpoint_name=result,
    interpret=interpret,
  )

  def local(
    attend: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
  ) -> jax.Array:
    keys, values, key_segments = gathered((k, v, segments), length_axes, order)
    heads_first = (x.swapaxes(1, 2) for x in (q * scoring.scale, keys, values))
    ids = None if segments is None else kernel.SegmentIds(segments, key_segments)
    return jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(*heads_first, ids, sinks).swapaxes(1, 2)

  mask_spec = attend.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, q_spec[1])))
  ids_spec = None if segments is None else PartitionSpec(*q_spec[:2])
  sinks_spec = None if sinks is None else PartitionSpec(q_spec[2])
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(mask_spec, q_spec, kv_spec, kv_spec, ids_spec, sinks_spec),
    out_specs=q_spec,
    check_vma=False,
  )(attend, q, k, v, segments, sinks)


def seen_blocks(scoring: ScoreSpec, length: int, q: int, kv: int) -> np.ndarray:
  """Whether a block of queries sees any key of a block of keys, [length/q, length/kv]; for causal attention only."""
  assert scoring.causal
  queries, first_keys = np.arange(length).reshape(-1, q), np.arange(0, length, kv)
  back = queries if scoring.window is None else np.minimum(queries, scoring.window - 1)
  if scoring.window is not None and scoring.chunked:
    back = queries % scoring.window
  first, last = (queries - back).min(1, keepdims=True), queries.max(1, keepdims=True)
  return (first_keys <= last) & (first_keys + kv > first)


def _mask(scoring: ScoreSpec, length: int, heads: int, order: LoadBalancedOrder | None) -> Any:
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  shape, window = (length, length), scoring.window
  if not scoring.causal:  # does not depend on the order of tokens
    assert window is None or order is None, "a bidirectional window needs tokens in order"
    full = masks.FullMask(shape) if window is None else masks.LocalMask(shape, (window - 1, window - 1), 0)
    return masks.MultiHeadMask([full] * heads)
  if window is None:
    mask: Any = masks.CausalMask(shape)
  elif scoring.chunked:
    mask = masks.ChunkedCausalMask(shape, window)
  else:
    mask = masks.LocalMask(shape, (window - 1, 0), 0)
  if order is not None:
    mask.q_sequence = order.sequence(length)
  return masks.MultiHeadMask([mask] * heads)
