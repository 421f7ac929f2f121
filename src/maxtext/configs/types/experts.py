"""Mixtures of experts."""

from pydantic import Field

from maxtext.configs.types.section import Section


class MoEGeneral(Section):
  """Routing and shape of experts."""

  num_experts: int = Field(1, gt=0, description="Routed experts per layer; 1 is a dense model.")
  num_experts_per_tok: int = Field(1, gt=0, description="Routed experts that each token goes to.")
  capacity_factor: float = Field(
    -1.0, description="Expert room over an even share, extra tokens dropped; -1 drops none."
  )
  ragged_buffer_factor: float = Field(
    -1.0, description="Token buffer over an even share per device, extra tokens dropped; -1 drops none."
  )
  moe_expert_input_dim: int = Field(-1, description="Width of what enters the experts; -1 takes the embedding width.")
  base_moe_mlp_dim: int = Field(-1, description="Hidden width of each expert before scaling; -1 takes the dense width.")
  padded_base_moe_mlp_dim: int | None = Field(
    None, description="Expert hidden width after padding for the kernels; None is no padding."
  )
  load_balance_loss_weight: float = Field(
    0.0, ge=0, description="Weight of the loss for even use of experts; 0 is none."
  )
  use_custom_sort_vjp: bool = Field(True, description="True uses a hand-written gradient for sorting tokens by expert.")
  use_hidden_router_gradient: bool = Field(
    True, description="True takes the router's gradient from the experts' hidden values, not from their outputs."
  )
  use_ring_of_experts: bool = Field(
    False,
    description="True gathers tokens on every expert shard and reduce-scatters the results; false sends each token "
    "only to its experts.",
  )
  use_gather_mosaic_kernel: bool = Field(False, description="True gathers tokens for the experts with a Mosaic kernel.")
  use_random_routing: bool = Field(
    False, description="True sends tokens to random experts, for benchmarks and debugging."
  )
  interleave_moe_layer_step: int = Field(1, description="Every how many layers one has experts; 1 is all of them.")
  moe_fsdp_use_two_stage_all_gather: bool = Field(
    False, description="True gathers expert weights over the two FSDP axes in two steps."
  )
  shard_exp_on_fsdp: bool = Field(False, description="True splits expert weights over FSDP by expert, not by width.")
  use_2d_fsdp_sharding: bool = Field(
    False, description="True splits expert weights on both widths, over fsdp and fsdp_transpose."
  )
  norm_topk_prob: bool = Field(False, description="True rescales the chosen experts' weights to sum to one.")
  float32_weight_sum: bool = Field(True, description="True sums the experts' weighted outputs in float32.")
  float32_gate_logits: bool = Field(False, description="True computes router logits in float32.")
  prefuse_moe_weights: bool = Field(
    False, description="True stores the experts' gate and up weights joined in advance."
  )


class MoEKernels(Section):
  """Kernels and tile sizes of grouped matmuls."""

  megablox: bool = Field(True, description="True runs grouped matmuls with Megablox, false with JAX's ragged_dot.")
  sparse_matmul: bool = Field(True, description="True multiplies only the routed tokens; false uses dense matmuls.")
  wi_tile_fwd_batch_seq: int = Field(512, description="Expert input matmul, forward: tile in tokens.")
  wi_tile_fwd_embed_dim: int = Field(1024, description="Expert input matmul, forward: tile in embedding width.")
  wi_tile_fwd_mlp_dim: int = Field(1024, description="Expert input matmul, forward: tile in hidden width.")
  wi_tile_dlhs_batch_seq: int = Field(512, description="Expert input matmul, activation gradient: tile in tokens.")
  wi_tile_dlhs_embed_dim: int = Field(
    1024, description="Expert input matmul, activation gradient: tile in embedding width."
  )
  wi_tile_dlhs_mlp_dim: int = Field(1024, description="Expert input matmul, activation gradient: tile in hidden width.")
  wi_tile_drhs_batch_seq: int = Field(512, description="Expert input matmul, weight gradient: tile in tokens.")
  wi_tile_drhs_embed_dim: int = Field(
    1024, description="Expert input matmul, weight gradient: tile in embedding width."
  )
  wi_tile_drhs_mlp_dim: int = Field(1024, description="Expert input matmul, weight gradient: tile in hidden width.")
  wo_tile_fwd_batch_seq: int = Field(512, description="Expert output matmul, forward: tile in tokens.")
  wo_tile_fwd_embed_dim: int = Field(1024, description="Expert output matmul, forward: tile in embedding width.")
  wo_tile_fwd_mlp_dim: int = Field(1024, description="Expert output matmul, forward: tile in hidden width.")
  wo_tile_dlhs_batch_seq: int = Field(512, description="Expert output matmul, activation gradient: tile in tokens.")
  wo_tile_dlhs_embed_dim: int = Field(
    1024, description="Expert output matmul, activation gradient: tile in embedding width."
  )
  wo_tile_dlhs_mlp_dim: int = Field(
    1024, description="Expert output matmul, activation gradient: tile in hidden width."
  )
  wo_tile_drhs_batch_seq: int = Field(512, description="Expert output matmul, weight gradient: tile in tokens.")
  wo_tile_drhs_embed_dim: int = Field(
    1024, description="Expert output matmul, weight gradient: tile in embedding width."
  )
  wo_tile_drhs_mlp_dim: int = Field(1024, description="Expert output matmul, weight gradient: tile in hidden width.")
  merge_gating_gmm: bool = Field(
    False, description="True computes the experts' gate and up matmuls in one grouped call."
  )


class DeepSeekMoE(Section):
  """Shared experts, routing groups and routing bias."""

  first_num_dense_layers: int = Field(0, ge=0, description="Layers at the start without experts.")
  shared_experts: int = Field(0, ge=0, description="Experts that every token passes through; 0 is none.")
  routed_scaling_factor: float = Field(1.0, description="Multiplier on the routed experts' weights.")
  routed_score_func: str = Field("", description="Router score function, e.g. sigmoid; '' is softmax.")
  routed_bias: bool = Field(False, description="True adds a per-expert bias to router scores when choosing experts.")
  routed_bias_update_rate: float = Field(
    0.0, description="Step size of routed_bias toward even load; 0 leaves it fixed."
  )
  mlp_bias: bool = Field(False, description="True adds biases to the feed-forward and expert matmuls.")
  n_routing_groups: int = Field(-1, description="Groups the experts are divided into for routing; -1 is no groups.")
  topk_routing_group: int = Field(-1, description="Groups a token may choose experts from; -1 is no limit.")
  use_batch_split_schedule: bool = Field(
    False, description="True runs layers on parts of the batch, so that communication of one can overlap with another."
  )
  batch_split_factor: int = Field(1, gt=0, description="Parts of the batch in the split schedule, 2 or more.")
