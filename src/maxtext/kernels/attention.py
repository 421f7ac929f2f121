"""Attention: softmax(q k^T) v, causal, with an optional sliding window and segments.

`reference` is the plain form and the oracle of the others; `Attention` dispatches to one of them.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

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


@dataclass(frozen=True)
class Attention:
  """One call of attention, whichever kernel computes it."""

  kernel: Kernel = "dot_product"
  blocks: SplashBlocks = SplashBlocks()
  interpret: bool = False  # run Pallas kernels as plain operations, to test them without a TPU

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    positions: jax.Array,
    segments: jax.Array | None,
    scale: float,
    window: int | None,
    mesh: Mesh,
    q_spec: PartitionSpec,
    kv_spec: PartitionSpec,
  ) -> jax.Array:
    """Self-attention of a whole sequence: q [B,S,H,D], k and v [B,S,K,D] to [B,S,H,D].

    Keys stand in the order of their positions within a segment, so that the order alone is causal.
    """
    if self.kernel == "splash":
      return _splash(q, k, v, segments, scale, window, self.blocks, self.interpret, mesh, q_spec, kv_spec)
    if self.kernel == "cudnn":
      out = _cudnn(q, k, v, segments, scale, window)
    elif self.kernel == "chunked":
      out = chunked(q, k, v, positions, segments, scale, window)
    else:
      out = reference(q, k, v, positions, positions, segments, segments, scale, window)
    return checkpoint_name(out, RESULT)


def choose_kernel(name: str, platform: str) -> Kernel:
  """The kernel that an `attention` setting means on a platform; raises ValueError where there is none."""
  fast: dict[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
  if name == "cudnn_flash_jax" and fast.get(platform) != "cudnn":
    raise ValueError(f"attention={name} needs a GPU, and the mesh is of {platform} devices: write autoselected")
  if name in ("dot_product", "chunked"):
    return name  # type: ignore[return-value]
  return fast.get(platform, "chunked")


def reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_positions: jax.Array,
  k_positions: jax.Array,
  q_segments: jax.Array | None,
  k_segments: jax.Array | None,
  scale: float,
  window: int | None,
) -> jax.Array:
  """The plain form. Positions are [B,S] and [B,T]; a key is visible if not later, near enough, and of the segment."""
  B, S, H, D = q.shape
  K = k.shape[2]
  grouped = q.reshape(B, S, K, H // K, D)
  logits = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32) * scale
  gap = q_positions[:, :, None] - k_positions[:, None, :]
  visible = gap >= 0
  if window is not None:
    visible &= gap < window
  if q_segments is not None and k_segments is not None:
    visible &= q_segments[:, :, None] == k_segments[:, None, :]
  weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, _MASKED), axis=-1).astype(v.dtype)
  return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(B, S, H, v.shape[-1])


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  segments: jax.Array | None,
  scale: float,
  window: int | None,
  chunks: int = 8,
) -> jax.Array:
  """The reference, a chunk of queries at a time: keys after the chunk are never touched, and only one chunk's logits
  exist at once, in the backward pass too."""
  S = q.shape[1]
  size = max(128, -(-S // chunks))
  out = []
  for start in range(0, S, size):
    end = min(start + size, S)
    first = 0 if window is None else max(0, (start - window + 1) // 128 * 128)
    one: Callable[..., jax.Array] = partial(reference, scale=scale, window=window)
    if size < S:
      one = jax.checkpoint(one)
    seg_q, seg_k = (None, None) if segments is None else (segments[:, start:end], segments[:, first:end])
    out.append(
      one(
        q[:, start:end],
        k[:, first:end],
        v[:, first:end],
        positions[:, start:end],
        positions[:, first:end],
        seg_q,
        seg_k,
      )
    )
  return jnp.concatenate(out, axis=1)


def _cudnn(
  q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float, window: int | None
) -> jax.Array:
  mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
  local = None if window is None else (window - 1, 0)
  return jax.nn.dot_product_attention(
    q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
  )


def _splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  scale: float,
  window: int | None,
  blocks: SplashBlocks,
  interpret: bool,
  mesh: Mesh,
  q_spec: PartitionSpec,
  kv_spec: PartitionSpec,
) -> jax.Array:
  """JAX's splash kernel, per device. Its residuals carry the name RESULT, so the result must not carry it again."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  S, H = q.shape[1], q.shape[2]
  if q_spec[2] != kv_spec[2]:  # key heads too few to be split like the query heads: give each query head its own
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    kv_spec = q_spec
  split = q_spec[2] or ()
  shards = math.prod(mesh.shape[a] for a in ((split,) if isinstance(split, str) else split))
  shape = (S, S)
  mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
  b = blocks
  sizes = kernel.BlockSizes(
    block_q=min(b.q, S),
    block_kv=min(b.kv, S),
    block_kv_compute=min(b.kv_compute, S),
    block_q_dkv=min(b.q_dkv, S),
    block_kv_dkv=min(b.kv_dkv, S),
    block_kv_dkv_compute=min(b.kv_dkv_compute, S),
    block_q_dq=None if b.fused_backward else min(b.q_dq, S),
    block_kv_dq=None if b.fused_backward else min(b.kv_dq, S),
    use_fused_bwd_kernel=b.fused_backward,
  )
  attend = kernel.make_splash_mha(
    masks.MultiHeadMask([mask] * (H // shards)),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=RESULT,
    interpret=interpret,
  )

  def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    heads_first = (x.swapaxes(1, 2) for x in (q * scale, k, v))
    ids = None if segments is None else kernel.SegmentIds(segments, segments)
    return jax.vmap(attend)(*heads_first, ids).swapaxes(1, 2)

  ids_spec = None if segments is None else PartitionSpec(q_spec[0], None)
  return jax.shard_map(
    local, mesh=mesh, in_specs=(q_spec, kv_spec, kv_spec, ids_spec), out_specs=q_spec, check_vma=False
  )(q, k, v, segments)
