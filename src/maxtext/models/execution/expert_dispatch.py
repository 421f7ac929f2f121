"""From keys to expert dispatch: the method, the grouped-matmul kernel and its tiles."""

from typing import Any

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.kernels.grouped_matmul import GroupedMatmul, Kernel, Tiles
from maxtext.kernels.ragged_all_to_all import RaggedAllToAll
from maxtext.layers.dense_and_experts import DenseAndExperts
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.expert_dispatch import ExpertDispatch
from maxtext.layers.experts import MoE
from maxtext.layers.weight_format import PlainFormat
from maxtext.models.spec import DecoderSpec

_KERNELS: dict[str, Kernel] = {"tpu": "megablox", "cpu": "tiled"}


def dispatch(config: MaxTextConfig, mesh: Mesh) -> ExpertDispatch:
  """The expert dispatch of a run on a mesh."""
  c = config
  platform = mesh.devices.flat[0].platform
  kernel = _KERNELS.get(platform, "ragged_dot") if c.megablox else "ragged_dot"
  taken = c.matmul_precision.value == "default" and c.dtype.value != "float16"  # by megablox
  gradient = "megablox" if platform == "tpu" and kernel == "ragged_dot" and taken else None
  settings: dict[str, Any] = {"kernel": kernel, "gradient": gradient, "precision": c.matmul_precision.value}
  wi = GroupedMatmul(
    forward=Tiles(c.wi_tile_fwd_batch_seq, c.wi_tile_fwd_embed_dim, c.wi_tile_fwd_mlp_dim),
    by_rows=Tiles(c.wi_tile_dlhs_batch_seq, c.wi_tile_dlhs_mlp_dim, c.wi_tile_dlhs_embed_dim),
    by_weights=Tiles(c.wi_tile_drhs_batch_seq, c.wi_tile_drhs_embed_dim, c.wi_tile_drhs_mlp_dim),
    **settings,
  )
  wo = GroupedMatmul(
    forward=Tiles(c.wo_tile_fwd_batch_seq, c.wo_tile_fwd_mlp_dim, c.wo_tile_fwd_embed_dim),
    by_rows=Tiles(c.wo_tile_dlhs_batch_seq, c.wo_tile_dlhs_embed_dim, c.wo_tile_dlhs_mlp_dim),
    by_weights=Tiles(c.wo_tile_drhs_batch_seq, c.wo_tile_drhs_mlp_dim, c.wo_tile_drhs_embed_dim),
    **settings,
  )
  return ExpertDispatch(
    method="dropless" if c.sparse_matmul else "capacity" if c.capacity_factor > 0 else "dense",
    capacity=c.capacity_factor,
    buffer=c.ragged_buffer_factor if c.sparse_matmul and c.ragged_buffer_factor > 0 else None,
    wi=wi,
    wo=wo,
    merge_gate_up=c.merge_gating_gmm,
    carrier=None
    if c.use_ring_of_experts
    else RaggedAllToAll("reference" if platform == "cpu" else "ragged_all_to_all"),
    float32_sum=c.float32_weight_sum,
    float32_logits=c.float32_gate_logits,
    random=c.use_random_routing,
    gather_gradients=c.use_custom_sort_vjp,
    hidden_gradient=c.use_hidden_router_gradient,
  )


def check_experts(config: MaxTextConfig, spec: DecoderSpec, execution: ExecutionConfig) -> None:
  """Raises `ConfigError` if num_experts is set for a family without experts, or their weights cannot be merged."""
  has = any(isinstance(block.feed_forward, MoE | DenseAndExperts) for group in spec.groups for block in group.cycle)
  if config.num_experts > 1 and not has:
    raise ConfigError(
      f"num_experts={config.num_experts} has no effect on decoder_block={config.decoder_block.value}, a family without "
      f"experts: leave it out."
    )
  if has and config.merge_gating_gmm and (execution.matmul or not isinstance(execution.weight_format, PlainFormat)):
    raise ConfigError(
      "merge_gating_gmm=true multiplies plain weights: leave it out with quantization, LoRA, sparsity and weights "
      "that are stored in few bits."
    )
