"""Where arrays live and what is kept between forward and backward."""

from typing import Any, Literal

from pydantic import Field

from maxtext.configs.types.enums import CustomRule, RematLocation, ReorderStrategy, ShardMode
from maxtext.configs.types.section import Section


class HardwareAndMesh(Section):
  """The devices and the mesh they form."""

  hardware: Literal["tpu", "gpu", "gpu_multiprocess", "cpu"] = Field(
    "tpu", description="Hardware to run on; when not set, whatever JAX finds."
  )
  num_slices: int = Field(-1, description="Slices that the devices form; -1 takes what the hardware says.")
  mesh_axes: list[str] = Field(
    [
      "data",
      "stage",
      "fsdp",
      "fsdp_transpose",
      "sequence",
      "context",
      "context_autoregressive",
      "tensor",
      "tensor_transpose",
      "tensor_sequence",
      "expert",
      "autoregressive",
    ],
    description="Names of the mesh axes, outermost first.",
  )
  shard_mode: ShardMode = Field(
    ShardMode.AUTO, description="Who places arrays: auto is the compiler, explicit is the program's types."
  )
  inhomogeneous_layer_cycle_interval: int = Field(
    1, description="Layers in one repeat of a pattern of unlike layers; 1 is all alike."
  )
  scan_layers: bool = Field(True, description="Compile one layer and loop over it, instead of every layer.")
  param_scan_axis: int = Field(1, description="Axis of stacked weights that runs over scanned layers.")
  context_parallel_load_balance: bool = Field(
    True, description="True reorders tokens so context shards do equal causal work."
  )
  context_parallel_strategy: str = Field(
    "all_gather", description="How context shards share keys and values: all_gather or ring."
  )
  context_parallel_reorder_strategy: ReorderStrategy = Field(
    ReorderStrategy.AUTO,
    description="Token order for context_parallel_load_balance; auto is striped for a ring, else dual_chunk_swap.",
  )
  custom_mesh: str = Field("", description="Named physical device layout, e.g. hybrid_ring_64x4; '' is the usual one.")
  custom_mesh_and_rule: CustomRule = Field(
    CustomRule.DEFAULT, description="Mesh axes and rules in place of the base ones: fsdp, or a YAML file."
  )
  allow_split_physical_axes: bool = Field(False, description="Let one physical torus axis serve two mesh axes.")
  enable_nnx: bool = Field(False, description="True uses the Flax NNX code path for the model.")
  optimize_mesh_for_tpu_v6e: bool = Field(
    False, description="True orders devices in rings that suit the TPU v6e topology."
  )
  shardy: bool = Field(True, description="True partitions with Shardy, false with GSPMD.")
  pure_nnx_decoder: bool = Field(False, description="True builds the decoder in NNX with no Linen wrapper.")
  pure_nnx: bool = Field(False, description="True builds the model and train state in NNX throughout, without Linen.")
  remove_size_one_mesh_axis_from_type: bool = Field(
    True, description="True leaves mesh axes of size one out of JAX array types."
  )


class LayoutAndSharding(Section):
  """Which mesh axes each logical axis is split over."""

  logical_axis_rules: Any = Field([], description="Pairs [logical axis, mesh axes]; activation_* for activations.")
  data_sharding: Any = Field([], description="Mesh axes that the input batch is split over.")
  context_sharding: str = Field("context", description="Mesh axis that splits the sequence: context or expert.")
  input_data_sharding_logical_axes: list[str] = Field(
    ["activation_embed_and_logits_batch", "activation_norm_length"], description="Named dimensions of a batch."
  )
  sharding_tolerance: float = Field(
    0.02, ge=0.0, le=1.0, description="Largest share of parameters that may stay whole on every device."
  )
  reduce_scatter_gradients: bool = Field(
    False,
    description="True sums gradients of layers over one part of a TPU's torus after the other, so that its compiler "
    "reduce-scatters them instead of summing them whole on every device.",
  )
  shard_optimizer_over_data: bool = Field(False, description="True splits optimizer state over the data axis (ZeRO-1).")
  internal_compile: bool = Field(
    False, description="True compiles ahead of time without a named topology (internal use)."
  )
  internal_compile_num_devices: int = Field(
    -1, description="Devices to compile for with internal_compile; -1 is unset."
  )
  compile_xla_flags: str = Field(
    "", description="XLA flags for ahead-of-time compilation, space-separated; '' is none."
  )


class DcnParallelism(Section):
  """Parallelism between slices, over the data-centre network; -1 takes what is left."""

  dcn_diloco_parallelism: int = Field(
    1, description="Slice groups that train independently and synchronise periodically (DiLoCo); -1 is the rest."
  )
  dcn_data_parallelism: int = Field(-1, description="Slices that split the batch.")
  dcn_fsdp_parallelism: int = Field(1, description="Slices that split weights and batch.")
  dcn_fsdp_transpose_parallelism: int = Field(1, description="Slices that split weights along their other side.")
  dcn_sequence_parallelism: int = Field(
    1, description="Slices that split the sequence outside attention; -1 is the rest."
  )
  dcn_context_parallelism: int = Field(
    1, description="Slices that split the sequence, attention included; -1 is the rest."
  )
  dcn_context_autoregressive_parallelism: int = Field(
    1, description="Slices that split context and cache in decoding; -1 is the rest."
  )
  dcn_tensor_parallelism: int = Field(1, description="Slices that split heads and feed-forward width.")
  dcn_tensor_transpose_parallelism: int = Field(1, description="Slices that split the residual width.")
  dcn_tensor_sequence_parallelism: int = Field(1, description="Slices that split heads, and length between layers.")
  dcn_pipeline_parallelism: int = Field(
    1, description="Slices that split the layers into pipeline stages; -1 is the rest."
  )
  dcn_expert_parallelism: int = Field(1, description="Slices that split the experts; -1 is the rest.")
  dcn_autoregressive_parallelism: int = Field(
    1, description="Slices that split the weights in decoding; -1 is the rest."
  )


class IciParallelism(Section):
  """Parallelism inside a slice, over its fast links; -1 takes what is left."""

  ici_diloco_parallelism: int = Field(
    1, description="Device groups in a slice that train independently and synchronise periodically (DiLoCo)."
  )
  ici_data_parallelism: int = Field(1, description="Devices that split the batch.")
  ici_fsdp_parallelism: int = Field(-1, description="Devices that split weights and batch.")
  ici_fsdp_transpose_parallelism: int = Field(1, description="Devices that split weights along their other side.")
  ici_sequence_parallelism: int = Field(1, description="Devices that split the sequence outside attention.")
  ici_context_parallelism: int = Field(1, description="Devices that split the sequence, attention included.")
  ici_context_autoregressive_parallelism: int = Field(
    1, description="Devices that split context and cache in decoding."
  )
  ici_tensor_parallelism: int = Field(1, description="Devices that split heads and feed-forward width.")
  ici_tensor_transpose_parallelism: int = Field(1, description="Devices that split the residual width.")
  ici_tensor_sequence_parallelism: int = Field(1, description="Devices that split heads, and length between layers.")
  ici_autoregressive_parallelism: int = Field(1, description="Devices that split the weights in decoding.")
  ici_pipeline_parallelism: int = Field(1, description="Devices that split the layers into pipeline stages.")
  ici_expert_parallelism: int = Field(1, description="Devices that split the experts.")


class PipelineParallelism(Section):
  """Layers dealt to stages."""

  pipeline_fsdp_ag_per_repeat: bool = Field(
    False, description="True gathers sharded weights once per pipeline repeat, ahead of use."
  )
  num_layers_per_pipeline_stage: int = Field(
    1, description="Consecutive layers each stage runs before passing activations on."
  )
  num_pipeline_repeats: int = Field(
    -1, description="Passes of a microbatch around the stages; -1 derives it from layers and stages."
  )
  pipeline_parallel_layers: int = Field(
    -1, description="Layers that go in the pipeline, the rest run outside; -1 is all."
  )
  num_pipeline_microbatches: int = Field(
    -1, description="Parts the batch is split into; -1 takes the smallest that fills the stages."
  )
  pipeline_delay_activation_forwarding: bool = Field(
    False, description="True sends activations one iteration late, to overlap transfer with compute."
  )
  pipeline_fsdp_ag_once: bool = Field(
    False, description="True gathers sharded weights once per step: less traffic, more memory."
  )
  scan_pipeline_iterations: bool = Field(
    True, description="True runs pipeline iterations as a scan, which shortens compilation."
  )
  scan_pipeline_repeats: bool = Field(True, description="True runs pipeline repeats as a scan over the repeats.")
  scan_layers_per_stage: bool = Field(False, description="True runs the layers inside one stage as a scan.")
  set_remat_policy_on_pipeline_iterations: bool = Field(
    True, description="True applies the remat policy around each pipeline iteration."
  )
  set_remat_policy_on_layers_per_stage: bool = Field(
    False, description="True applies the remat policy around each layer inside a stage."
  )


class RematAndOffload(Section):
  """What of a layer's forward pass waits for its backward pass, and where."""

  remat_policy: str = Field(
    "full", description="A policy's name; several, separated by commas, take turns over the layers."
  )
  remat_policy_for_vit: str = Field("minimal", description="Remat policy of the vision encoder's layers.")
  decoder_layer_input: RematLocation = Field(RematLocation.DEVICE, description="Input of a layer (policy custom).")
  context: RematLocation = Field(RematLocation.REMAT, description="Attention output before its projection (custom).")
  mlpwi: RematLocation = Field(RematLocation.REMAT, description="Feed-forward input matmul, ungated (custom).")
  mlpwi_0: RematLocation = Field(RematLocation.REMAT, description="Feed-forward gate matmul (custom).")
  mlpwi_1: RematLocation = Field(RematLocation.REMAT, description="Feed-forward up matmul (custom).")
  mlpwo: RematLocation = Field(RematLocation.REMAT, description="Feed-forward output matmul (custom).")
  moe_mlpwi_0: RematLocation = Field(RematLocation.REMAT, description="Experts' first input matmul, the gate (custom).")
  moe_mlpwi_1: RematLocation = Field(RematLocation.REMAT, description="Experts' second input matmul (custom).")
  moe_mlpwo: RematLocation = Field(RematLocation.REMAT, description="Experts' output matmul (custom).")
  query_proj: RematLocation = Field(RematLocation.REMAT, description="Query projection (custom).")
  key_proj: RematLocation = Field(RematLocation.REMAT, description="Key projection (custom).")
  value_proj: RematLocation = Field(RematLocation.REMAT, description="Value projection (custom).")
  query_wa_proj: RematLocation = Field(
    RematLocation.REMAT, description="Query down-projection of latent attention (custom)."
  )
  kv_wa_proj: RematLocation = Field(
    RematLocation.REMAT, description="Key-value down-projection of latent attention (custom)."
  )
  qkv_proj: RematLocation = Field(
    RematLocation.REMAT, description="Query, key and value projections, all three at once (custom)."
  )
  out_proj: RematLocation = Field(RematLocation.REMAT, description="Attention output projection (custom).")
  mla_q: RematLocation = Field(RematLocation.REMAT, description="Low-rank query of latent attention (custom).")
  mla_kv: RematLocation = Field(RematLocation.REMAT, description="Low-rank key-value of latent attention (custom).")
  attention_out: RematLocation = Field(
    RematLocation.REMAT, description="Attention result before the output projection (custom)."
  )
  engram: RematLocation = Field(RematLocation.REMAT, description="Output of the n-gram memory module (custom).")
  optimizer_memory_host_offload: bool = Field(
    False, description="True keeps the optimizer state in host memory between updates."
  )
  parameter_memory_host_offload: bool = Field(
    False, description="True keeps the weights in host memory and copies them in when needed."
  )


class DilocoParams(Section):
  """Replicas that meet now and then."""

  enable_diloco: bool = Field(
    False, description="True trains replicas independently and merges them with an outer optimizer (DiLoCo)."
  )
  diloco_sync_period: int = Field(36, description="Inner steps between merges of the replicas.")
  diloco_outer_lr: float = Field(0.3, description="Learning rate of the outer optimizer at each merge.")
  diloco_outer_momentum: float = Field(0.9, description="Nesterov momentum of the outer optimizer.")
