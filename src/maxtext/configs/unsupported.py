"""The table of unsupported options: keys that nothing reads, keys that contradict others, keys that others switch off.

Setting a key of the first two kinds away from its default raises an error with the reason. A key that only has no
effect (`NoEffectOption`) is named in one warning, or is an error too with `--strict`. A test fails if a key is neither
read by the package nor listed here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from maxtext.configs import types as t
from maxtext.configs.conditions import (
  Condition,
  all_of,
  any_of,
  includes,
  is_above,
  is_in_bucket,
  is_none_of,
  is_one_of,
  is_parallel_over,
  is_set,
  is_unset,
  names_remat_policy,
  negate,
)
from maxtext.configs.secrets import redact_value
from maxtext.configs.types.section import Section
from maxtext.configs.values import MESH_AXES, default_of, plain_value


@dataclass(frozen=True)
class UnsupportedOption:
  """Keys that are unsupported for one reason.

  Attributes:
    keys: their names.
    reason: what is missing, and what to do instead.
    allowed_values: values besides the default that are accepted.
    unless: if this holds, the key is supported.
  """

  keys: tuple[str, ...]
  reason: str
  allowed_values: tuple[Any, ...] = ()
  unless: Condition | None = None

  def problem(self, config: t.MaxTextConfig) -> str | None:
    """The message for the first key that was set, if any."""
    for key in self.affected_keys(config, self.keys):
      return f"{key}={redact_value(key, plain_value(getattr(config, key)))} is not supported: {self.reason}."
    return None

  def affected_keys(self, config: t.MaxTextConfig, keys: Collection[str]) -> list[str]:
    """Those of `keys` that are set to an unsupported value."""
    if self.unless is not None and self.unless(config):
      return []
    values = {key: getattr(config, key) for key in self.keys if key in keys}
    return [key for key, value in values.items() if value != default_of(key) and not self.allows(value)]

  def allows(self, value: Any) -> bool:
    """Whether a value besides the default is accepted; 0 is not False here."""
    return any(type(value) is type(other) and value == other for other in self.allowed_values)


class NoEffectOption(UnsupportedOption):
  """Keys without effect unless a condition holds, or always; the reason begins with 'it has no effect'."""


class FixedOption(UnsupportedOption):
  """Keys for behaviour that is always on; `allowed_values` are the values that ask for it."""


def no_effect_warning(config: t.MaxTextConfig, keys: Collection[str]) -> str | None:
  """A warning that names those of `keys` that have no effect, and why; None if there are none."""
  keys_of: dict[str, list[str]] = {}
  for key, reason in keys_with_no_effect(config, keys).items():
    keys_of.setdefault(reason, []).append(f"{key}={redact_value(key, plain_value(getattr(config, key)))}")
  parts = [
    f"{', '.join(words)} {'has' if len(words) == 1 else 'have'} {reason.removeprefix('it has ')}"
    for reason, words in keys_of.items()
  ]
  return f"{'; '.join(parts)}." if parts else None


def keys_with_no_effect(config: t.MaxTextConfig, keys: Collection[str]) -> dict[str, str]:
  """Those of `keys` that have no effect, each with its first reason."""
  rows = [row for row in UNSUPPORTED if isinstance(row, NoEffectOption)]
  found: dict[str, str] = {}
  for row in rows:
    for key in row.affected_keys(config, keys):
      found.setdefault(key, row.reason)
  return found


def unsupported_keys() -> dict[str, str]:
  """Every key that is unsupported whatever else is set, with the reason, in the order of the table."""
  rows = [row for row in UNSUPPORTED if row.unless is None and not isinstance(row, FixedOption)]
  return {key: row.reason for row in rows for key in row.keys}


def unsupported_options_of(key: str) -> list[UnsupportedOption]:
  """The entries of the table that name a key."""
  return [option for option in UNSUPPORTED if key in option.keys]


def _section(*sections: type[Section], but: Iterable[str] = ()) -> tuple[str, ...]:
  return tuple(key for section in sections for key in section.model_fields if key not in tuple(but))


_NOT_OF_RL = (
  "z_loss_multiplier", "num_epoch", "packing", "grain_worker_count", "grain_worker_count_eval", "use_truncation",
  "enable_rampup_batch_size", "reuse_example_batch", "grain_train_mixture_config_path", "sample_prompts", "eval_steps",
  "target_eval_loss", "eval_per_device_batch_size", "mtp_loss_scaling_factor",
  *_section(t.TrainingTasks),
)  # fmt: skip
_ANSWER_LISTS = ("eval_corr_lst", "eval_make_lst")
_RL = (
  *_section(t.RL, t.RLMethod, t.RLEnvironment, t.RLDataset, t.RLEvaluation, t.Reward, t.SpecialTokens,
            but=_ANSWER_LISTS),
  *_section(t.RLHardware, but=("chips_per_vm", "use_pathways")),
  "stop_strings", "max_num_seqs",
)  # fmt: skip


_REMAT_NAMES = (
  "decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "query_proj", "key_proj", "value_proj",
  "out_proj", "qkv_proj", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "engram",
  "query_wa_proj", "kv_wa_proj",
)  # fmt: skip
_PIPELINED = is_parallel_over("pipeline")
_OFFLOADED = ("optimizer_memory_host_offload", "parameter_memory_host_offload")

_UNSUPPORTED_EXPERTS = (
  "moe_expert_input_dim", "padded_base_moe_mlp_dim", "use_gather_mosaic_kernel", "interleave_moe_layer_step",
  "moe_fsdp_use_two_stage_all_gather", "use_2d_fsdp_sharding", "prefuse_moe_weights",
  "use_batch_split_schedule", "batch_split_factor",
)  # fmt: skip
_QUANTIZED_CACHE = ("quantize_kvcache", "kv_quant_axis", "kv_quant_dtype")
_SPARSE = ("ragged_buffer_factor", "use_custom_sort_vjp", "megablox", "use_ring_of_experts", "merge_gating_gmm")
_TILES = tuple(key for key in t.MoEKernels.model_fields if "_tile_" in key)

_DPO = (
  "dpo_label_smoothing", "dpo_beta", "dpo_loss_type", "dpo_loss_weights", "simpo_gamma", "precompute_ref_log_probs",
  "kto_desirable_weight", "kto_undesirable_weight",
)  # fmt: skip
_WITH_REFERENCE = includes("dpo_loss_type", "sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "kto")
_OF_LEARN_TO_INIT = ("lti_use_general_linear_map", "distill_student_weights_share_map")
_FORMATTING = ("formatting_func_path", "formatting_func_kwargs")
_SIZES = ("emb_dim", "mlp_dim", "moe_mlp_dim", "num_decoder_layers", "num_kv_heads", "num_query_heads")
_PATHWAYS = (
  "enable_single_controller", "subslice_shape", "colocated_python_checkpointing", "colocated_python_data_input",
  "enable_pathways_goodput",
)  # fmt: skip
_HLO = (
  "dump_hlo", "dump_step", "dump_hlo_local_dir", "dump_hlo_delete_local_after", "dump_hlo_module_name",
  "dump_hlo_local_module_name", "dump_hlo_xla_flags", "dump_hlo_gcs_dir", "dump_hlo_upload_all",
)  # fmt: skip
_JAXPR = ("dump_jaxpr", "dump_jaxpr_local_dir", "dump_jaxpr_delete_local_after", "dump_jaxpr_gcs_dir")
_VISION = (
  "dtype_mm", "remat_policy_for_vit", "freeze_vision_encoder_params", "image_path", "image_placeholder",
  "video_path", "video_placeholder", "position_id_per_seconds", "image_size_for_vit",
  "hidden_size_for_vit", "intermediate_size_for_vit", "num_attention_heads_for_vit", "num_channels_for_vit",
  "num_hidden_layers_for_vit", "patch_size_for_vit", "vision_output_length", "tile_size_for_vit",
  "rope_theta_for_vit", "vision_output_dim_for_vit", "spatial_merge_size_for_vit", "temporal_patch_size_for_vit",
  "num_position_embeddings_for_vit", "out_hidden_size_for_vit", "deepstack_visual_indexes_for_vit", "use_mrope",
  "mrope_section", *_section(t.VisionProjector),
)  # fmt: skip
_AUDIO = (
  "audio_path", "audio_placeholder", "use_audio_in_video", "freeze_audio_encoder_params", "d_model_for_audio",
  "encoder_attention_heads_for_audio", "encoder_ffn_dim_for_audio",
  "encoder_layers_for_audio", "num_mel_bins_for_audio", "n_window_for_audio", "n_window_infer_for_audio",
  "downsample_hidden_size_for_audio", "output_dim_for_audio", "max_sample_len_for_audio",
  "activation_function_for_audio", "num_conv_layers_for_audio", "max_source_positions_for_audio",
  "max_timescale_for_audio", "conv_chunksize_for_audio",
)  # fmt: skip
_TPU_TRACE = (
  "tpu_num_chips_to_profile_per_task", "tpu_num_sparse_cores_to_trace", "tpu_num_sparse_core_tiles_to_trace",
)  # fmt: skip
_POWER_TRACE = (
  "xprof_tpu_power_trace_level", "xprof_e2e_enable_fw_throttle_event", "xprof_e2e_enable_fw_power_level_event",
  "xprof_e2e_enable_fw_thermal_event",
)  # fmt: skip
_TRACED = (
  "hide_profiler_step_metric", "enable_tpu_profiling_options", "profile_power_events", *_TPU_TRACE, *_POWER_TRACE,
)  # fmt: skip
_SHOWN = (
  "metrics_file", "prometheus_port", "profiler", "skip_first_n_steps_for_profiler", "profiler_steps",
  "collect_stack_trace", "stack_trace_interval_seconds", "profile_cleanly", "profile_periodically_period",
  "enable_jax_profiler", "jax_profiler_port", "enable_tensorboard", "upload_all_profiler_results", *_TRACED, *_HLO,
  *_JAXPR, "record_internal_nn_metrics",
)  # fmt: skip

_STORED = ("gcs_metrics", "save_config_to_gcs")
_GOODPUT = (
  "enable_goodput_recording", "monitor_goodput", "goodput_upload_interval_seconds", "monitor_step_time_deviation",
  "step_deviation_interval_seconds",
)  # fmt: skip
_LOCAL = ("enable_emergency_checkpoint", "local_checkpoint_directory", "local_checkpoint_period")
_DOCUMENTS = (
  "train_data_columns", "eval_data_columns", "packing", "grain_packing_type", "max_segments_per_seq", "num_epoch",
  "generate_padding_batch_train", "generate_padding_batch_eval", "enable_rampup_batch_size",
)  # fmt: skip
_READERS = tuple(
  key + split
  for key in ("grain_worker_count", "grain_per_worker_buffer_size", "grain_num_threads", "grain_prefetch_buffer_size")
  for split in ("", "_eval")
)

UNSUPPORTED: tuple[UnsupportedOption, ...] = (
  *(
    UnsupportedOption((key,), f"it is computed from base_{key} and global_parameter_scale; write base_{key}")
    for key in _SIZES
  ),
  *(
    UnsupportedOption((f"{network}_parallelism",), f"it is computed from other keys; write {network}_data_parallelism, "
            f"{network}_fsdp_parallelism and so on")
    for network in ("ici", "dcn")
  ),
  UnsupportedOption(
    _section(t.DerivedValues, but=(*_SIZES, "ici_parallelism", "dcn_parallelism")),
    "it is computed from other keys; leave it out",
  ),
  UnsupportedOption(
    ("sharding_strategy", "context_sharding"), "logical_axis_rules defines all shardings; write that",
  ),
  UnsupportedOption(
    ("data_sharding",),
    "a batch is sharded by logical_axis_rules, over the logical axes that input_data_sharding_logical_axes names",
  ),
  UnsupportedOption(
    ("optimize_mesh_for_tpu_v6e",),
    "devices have the order that JAX chooses for their torus; allow_split_physical_axes=true gives it more freedom",
  ),
  UnsupportedOption(
    ("reduce_scatter_gradients",),
    "with shard_mode=explicit types say how gradients are summed, and pipeline stages sum their own: leave it out",
    unless=all_of(is_none_of("shard_mode", t.ShardMode.EXPLICIT), negate(_PIPELINED)),
  ),
  UnsupportedOption(
    ("internal_compile", "internal_compile_num_devices"), "maxtext plan compiles for compile_topology",
  ),
  NoEffectOption(
    ("compile_xla_flags",), "it has no effect without compile_topology: flags of a run go into the environment",
    unless=is_set("compile_topology"),
  ),
  UnsupportedOption(
    ("compiled_trainstep_file",), "the file holds a step for one batch size: write enable_rampup_batch_size=false",
    unless=is_unset("enable_rampup_batch_size"),
  ),
  UnsupportedOption(
    _PATHWAYS, "it needs Pathways, one process that controls all hosts; here every host runs its own process",
    allowed_values=(False,),
  ),
  FixedOption(
    ("enable_autocheckpoint",),
    "a run always saves a checkpoint when it receives a termination signal; leave it out",
    allowed_values=(True,),
  ),
  UnsupportedOption(
    ("enable_orbax_v1", "checkpoint_conversion_fn"),
    "checkpoints are read and written through Orbax's CheckpointManager, in its own layout, by the process itself",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("source_checkpoint_layout",),
    "it has no effect without load_parameters_path",
    unless=is_set("load_parameters_path"),
  ),
  UnsupportedOption(
    ("load_checkpoint_only_once",),
    "the policy and its reference model read the weights each for itself",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("checkpoint_is_quantized",), "it has no effect without load_parameters_path", unless=is_set("load_parameters_path")
  ),
  NoEffectOption(
    ("weight_block_size", "weight_format_targets"), "it has no effect without weight_format",
    unless=is_set("weight_format"),
  ),
  UnsupportedOption(
    ("weight_format",), "a base at rest below adapters is a trained one: set load_parameters_path",
    unless=any_of(
      is_unset("lora_rank"), is_set("load_parameters_path"), is_set("load_full_state_path"), is_set("compile_topology")
    ),
  ),
  UnsupportedOption(
    ("weight_format",), "weights at rest have no masks of N:M sparsity: leave weight_sparsity_n out",
    unless=is_unset("weight_sparsity_n"),
  ),
  UnsupportedOption(
    ("lora_merge_aware",), "it rounds the merged weight to weight_format: set that too",
    unless=all_of(is_set("weight_format"), is_set("lora_rank")),
  ),
  UnsupportedOption(
    ("lora_merge_aware",), "the magnitudes of use_dora are not merged in training: leave one of them out",
    unless=is_unset("use_dora"),
  ),
  NoEffectOption(
    ("lora_alpha", "lora_targets", "use_dora", "use_rslora"),
    "it has no effect without lora_rank",
    unless=is_set("lora_rank"),
  ),
  UnsupportedOption(
    ("lora_input_adapters_path",), "adapters change a trained model: set load_parameters_path to their base",
    unless=is_set("load_parameters_path"),
  ),
  UnsupportedOption(
    ("trainable_parameters_mask", "student_params_to_update", "use_qk_clip"),
    "lora_rank trains the adapters alone, and lora_targets says which: leave one of them out",
    allowed_values=(False,), unless=is_unset("lora_rank"),
  ),
  UnsupportedOption(
    ("weight_sparsity_n",), "the norms of use_dora=true are those of all weights: leave one of them out",
    unless=is_unset("use_dora"),
  ),
  NoEffectOption(
    ("checkpoint_storage_target_data_file_size_bytes",),
    "it has no effect without checkpoint_storage_use_ocdbt=true",
    unless=is_set("checkpoint_storage_use_ocdbt"),
  ),
  NoEffectOption(
    ("checkpoint_period",),
    "it has no effect beside enable_continuous_checkpointing=true",
    unless=is_unset("enable_continuous_checkpointing"),
  ),
  NoEffectOption(
    ("checkpoint_period", "async_checkpointing", "max_num_checkpoints_to_keep", "checkpoint_todelete_subdir",
     "save_checkpoint_on_completion", "checkpoint_storage_use_ocdbt", "checkpoint_storage_use_zarr3",
     "checkpoint_storage_target_data_file_size_bytes"),
    "it has no effect without enable_checkpointing=true",
    unless=is_set("enable_checkpointing"),
  ),
  UnsupportedOption(
    ("enable_continuous_checkpointing", "enable_emergency_checkpoint"),
    "it asks for checkpoints, and enable_checkpointing=false for none",
    unless=is_set("enable_checkpointing"),
  ),
  UnsupportedOption(
    ("checkpoint_todelete_subdir",), "Orbax removes old steps in a bucket for good; leave it out",
    unless=negate(is_in_bucket("base_output_directory")),
  ),
  UnsupportedOption(
    ("checkpoint_todelete_full_path",),
    "it needs a bucket whose folders can be renamed, which is untested",
  ),
  UnsupportedOption(
    _section(t.EmergencyCheckpointing, but=_LOCAL),
    "there is no replicator service here: enable_emergency_checkpoint=true keeps replicas on local disks by itself",
    allowed_values=(False,),
  ),
  NoEffectOption(
    _LOCAL[1:],
    "it has no effect without enable_emergency_checkpoint=true",
    unless=is_set("enable_emergency_checkpoint"),
  ),
  UnsupportedOption(
    ("elastic_enabled",),
    "hosts that are lost change the mesh, and use_grpo, enable_diloco, enable_rampup_batch_size and "
    "shard_mode=explicit need the one that the run began with; leave one of them out",
    unless=all_of(
      is_unset("use_grpo"), is_unset("enable_diloco"), is_unset("enable_rampup_batch_size"),
      is_one_of("shard_mode", t.ShardMode.AUTO),
    ),
  ),
  UnsupportedOption(
    ("elastic_enabled",), "hosts that are left go on from a checkpoint: write enable_checkpointing=true",
    unless=is_set("enable_checkpointing"),
  ),
  NoEffectOption(
    _section(t.ElasticTraining, but=("elastic_enabled",)), "it has no effect without elastic_enabled=true",
    unless=is_set("elastic_enabled"),
  ),
  UnsupportedOption(
    ("quantization",),
    "it is of TransformerEngine or of one kind of GPU; int8, int4, intmp, fp8 and fp8_full run on every platform",
    allowed_values=(
      None, t.QuantizationType.INT8, t.QuantizationType.INT4, t.QuantizationType.INTMP, t.QuantizationType.FP8,
      t.QuantizationType.FP8_FULL,
    ),
  ),
  FixedOption(
    ("use_qwix_quantization",), "one implementation serves both values; leave it out", allowed_values=(True,)
  ),
  UnsupportedOption(
    ("use_manual_quantization",), "quantization is the same with and without use_batch_split_schedule: leave it out",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("replicate_quant_scale", "quantization_local_shard_count", "weight_quantization_calibration_method",
     "act_quantization_calibration_method", "bwd_quantization_calibration_method"),
    "it has no effect without quantization",
    unless=is_set("quantization"),
  ),
  NoEffectOption(
    ("quant_cfg_path",), "it has no effect without quantization=intmp",
    unless=is_one_of("quantization", t.QuantizationType.INTMP),
  ),
  NoEffectOption(
    ("weight_sparsity_update_step", "weight_sparsity_start_step"), "it has no effect without weight_sparsity_n",
    unless=is_set("weight_sparsity_n"),
  ),
  NoEffectOption(
    _QUANTIZED_CACHE[1:], "it has no effect without quantize_kvcache=true", unless=is_set("quantize_kvcache")
  ),
  UnsupportedOption(
    ("fused_mlp",),
    "gate and up are two matmuls; leave it out",
  ),
  NoEffectOption(
    _section(t.Engram, but=("engram_layers",)), "it has no effect without engram_layers",
    unless=is_set("engram_layers"),
  ),
  NoEffectOption(
    ("mtp_loss_scaling_factor",), "it has no effect without mtp_num_layers", unless=is_above("mtp_num_layers", 0)
  ),
  NoEffectOption(
    ("sinkhorn_iterations",), "it has no effect without mhc_expansion_rate", unless=is_above("mhc_expansion_rate", 1)
  ),
  NoEffectOption(("moba_chunk_size", "moba_topk"), "it has no effect without moba=true", unless=is_set("moba")),
  NoEffectOption(("qk_clip_threshold",), "it has no effect without use_qk_clip=true", unless=is_set("use_qk_clip")),
  NoEffectOption(
    ("rope_use_scale",),
    "it has no effect without rope_type=llama3.1",
    unless=is_one_of("rope_type", t.RopeType.LLAMA3_1),
  ),
  NoEffectOption(
    ("beta_fast", "beta_slow", "mscale", "rope_interleave", "rope_truncate", "rope_attention_scaling"),
    "it has no effect without rope_type=yarn",
    unless=is_one_of("rope_type", t.RopeType.YARN),
  ),
  NoEffectOption(
    ("rope_linear_scaling_factor",),
    "it has no effect beside a rope_type that scales positions in another way",
    unless=is_one_of("rope_type", t.RopeType.DEFAULT),
  ),
  NoEffectOption(
    ("rope_factor", "original_max_position_embeddings"),
    "it has no effect without a rope_type that scales positions, such as rope_type=llama3.1",
    unless=is_none_of("rope_type", t.RopeType.DEFAULT),
  ),
  UnsupportedOption(
    ("attention_type",),
    "this kind of attention is not implemented yet: write attention_type=global, local_sliding, chunk or mla",
    allowed_values=("local_sliding", "chunk", "mla"),
  ),
  FixedOption(
    ("float32_qk_product", "float32_logits"), "logits and softmax are always float32; leave it out",
    allowed_values=(False, True),
  ),
  FixedOption(
    ("use_jax_splash",), "splash attention is always JAX's own; leave it out", allowed_values=(False, True),
  ),
  NoEffectOption(
    ("indexer_loss_scaling_factor",), "it has no effect without use_indexer=true", unless=is_set("use_indexer")
  ),
  NoEffectOption(
    ("indexer_sparse_training",),
    "it has no effect without indexer_loss_scaling_factor, which trains the indexer",
    unless=is_above("indexer_loss_scaling_factor", 0),
  ),
  NoEffectOption(
    ("use_tokamax_gmm", "use_tokamax_splash", "use_splash_scheduler", "use_max_logit_estimate",
     "cost_estimate_flops_fwd", "cost_estimate_flops_bwd", "dq_reduction_steps"),
    "it has no effect on JAX's own splash attention and grouped matmuls, which take the place of Tokamax's at the same "
    "blocks",
  ),
  UnsupportedOption(
    ("enable_padding_causal_mask", "force_q_layout"),
    "the kernels are JAX's own splash and paged attention, and cuDNN; choose with attention and sa_block_*",
  ),
  UnsupportedOption(
    ("use_ragged_attention",),
    "MLA, paged attention and MoBA read the KV cache in other ways: leave it out",
    allowed_values=(False,),
    unless=all_of(is_none_of("attention_type", "mla"), is_none_of("attention", "paged"), is_unset("moba")),
  ),
  NoEffectOption(
    ("ragged_block_size",),
    "it has no effect without use_ragged_attention=true",
    unless=is_set("use_ragged_attention"),
  ),
  NoEffectOption(
    _section(t.PagedAttention), "it has no effect without attention=paged", unless=is_one_of("attention", "paged")
  ),
  NoEffectOption(
    _section(t.MoEGeneral, t.MoEKernels, t.DeepSeekMoE, but=("num_experts", "mlp_bias", *_UNSUPPORTED_EXPERTS)),
    "it has no effect without experts: set num_experts, for a family that has them",
    unless=is_above("num_experts", 1),
  ),
  UnsupportedOption(
    ("use_2d_fsdp_sharding",),
    "base.yml shards both widths of experts, which shard_exp_on_fsdp=true and custom rules change",
    allowed_values=(False,),
    unless=all_of(is_unset("shard_exp_on_fsdp"), is_unset("custom_mesh_and_rule")),
  ),
  UnsupportedOption(
    ("prefuse_moe_weights",),
    "the experts' gate and up projections are stored as separate weights, which merge_gating_gmm=true joins at use",
    allowed_values=(False,),
  ),
  UnsupportedOption(
    ("padded_base_moe_mlp_dim",), "the kernels fit their tiles to the experts' width without padding",
  ),
  UnsupportedOption(
    ("use_gather_mosaic_kernel",), "tokens are gathered by XLA's own operations", allowed_values=(False,),
  ),
  FixedOption(
    ("moe_fsdp_use_two_stage_all_gather",),
    "expert weights that two mesh axes split are always gathered along one after the other; leave it out",
    allowed_values=(True,),
  ),
  UnsupportedOption(
    ("use_batch_split_schedule",),
    "the micro-batches of a pipeline split the batch already, and with shard_mode=explicit types do not say where the "
    "parts live: leave it out",
    allowed_values=(False,),
    unless=all_of(is_none_of("shard_mode", t.ShardMode.EXPLICIT), negate(_PIPELINED)),
  ),
  NoEffectOption(
    ("batch_split_factor",), "it has no effect without use_batch_split_schedule=true",
    unless=is_set("use_batch_split_schedule"),
  ),
  NoEffectOption(
    ("capacity_factor",),
    "it has no effect on grouped matmuls, which drop no token: write sparse_matmul=false",
    unless=is_unset("sparse_matmul"),
  ),
  NoEffectOption(
    (*_SPARSE, *_TILES), "it has no effect without grouped matmuls: write sparse_matmul=true",
    unless=is_set("sparse_matmul"),
  ),
  NoEffectOption(
    ("use_ring_of_experts",), "it has no effect without expert parallelism: set ici_expert_parallelism",
    unless=is_parallel_over("expert"),
  ),
  NoEffectOption(
    tuple(key for key in _TILES if "_drhs_" not in key),
    "it has no effect without megablox=true",
    unless=is_set("megablox"),
  ),
  NoEffectOption(
    ("topk_routing_group",), "it has no effect without n_routing_groups", unless=is_above("n_routing_groups", 0)
  ),
  NoEffectOption(
    ("routed_bias_update_rate",), "it has no effect without routed_bias=true", unless=is_set("routed_bias")
  ),
  UnsupportedOption(
    ("shard_mode",), "stages leave the placement of what is in them to the compiler; write shard_mode=auto",
    unless=negate(_PIPELINED),
  ),
  FixedOption(
    ("remove_size_one_mesh_axis_from_type",), "the mesh always has every axis of mesh_axes, also those of size 1",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("context_parallel_load_balance", "context_parallel_strategy", "context_parallel_reorder_strategy"),
    "it has no effect without context parallelism: set ici_context_parallelism",
    unless=is_parallel_over("context"),
  ),
  NoEffectOption(
    ("context_parallel_reorder_strategy",), "it has no effect without context_parallel_load_balance=true",
    unless=is_set("context_parallel_load_balance"),
  ),
  FixedOption(
    ("enable_nnx", "pure_nnx", "pure_nnx_decoder", "shardy"),
    "there is one decoder, of NNX modules, partitioned by Shardy; leave it out",
    allowed_values=(True,),
  ),
  UnsupportedOption(
    tuple(key for key in _section(t.IciParallelism, t.DcnParallelism)
          if key.split("_", 1)[1].removesuffix("_parallelism") not in MESH_AXES),
    "this axis is not implemented yet; there are " + ", ".join(MESH_AXES),
  ),
  UnsupportedOption(
    ("pipeline_fsdp_ag_per_repeat",),
    "stages are at different repeats in the same iteration; weights are gathered in each, or once with "
    "pipeline_fsdp_ag_once=true",
    allowed_values=(False,),
  ),
  UnsupportedOption(
    ("scan_pipeline_iterations", "scan_pipeline_repeats", "set_remat_policy_on_pipeline_iterations",
     "scan_layers_per_stage", "set_remat_policy_on_layers_per_stage"),
    "a pipeline is one scan over its iterations, and its layers follow scan_layers and remat_policy; leave it out",
  ),
  NoEffectOption(
    ("num_layers_per_pipeline_stage", "num_pipeline_repeats", "pipeline_parallel_layers", "num_pipeline_microbatches",
     "pipeline_delay_activation_forwarding", "pipeline_fsdp_ag_once"),
    "it has no effect without stages: set ici_pipeline_parallelism or dcn_pipeline_parallelism",
    unless=_PIPELINED,
  ),
  UnsupportedOption(
    ("use_qk_clip", "routed_bias_update_rate"), "a pipeline does not update buffers of its layers",
    unless=negate(_PIPELINED),
  ),
  UnsupportedOption(
    _section(t.RematAndOffload, but=("remat_policy", "remat_policy_for_vit", *_OFFLOADED, *_REMAT_NAMES)),
    "no layer has this tensor yet",
    allowed_values=(False, t.RematLocation.REMAT),
  ),
  NoEffectOption(
    _REMAT_NAMES,
    "it has no effect without remat_policy=custom",
    unless=names_remat_policy(t.RematPolicy.CUSTOM),
  ),
  NoEffectOption(
    ("diloco_sync_period", "diloco_outer_lr", "diloco_outer_momentum"),
    "it has no effect without enable_diloco=true",
    unless=is_set("enable_diloco"),
  ),
  UnsupportedOption(
    ("ici_diloco_parallelism", "dcn_diloco_parallelism"),
    "the diloco mesh axis needs enable_diloco=true",
    unless=is_set("enable_diloco"),
  ),
  UnsupportedOption(
    ("shard_optimizer_over_data", "parameter_memory_host_offload", "optimizer_memory_host_offload"),
    "the state of DiLoCo replicas stays on their own devices: leave it out with enable_diloco=true",
    unless=is_unset("enable_diloco"),
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("sample_prompts",),
    "it has no effect on dataset_type=synthetic, whose random tokens are no text",
    unless=is_none_of("dataset_type", t.DatasetType.SYNTHETIC),
  ),
  NoEffectOption(
    (*_DOCUMENTS, *_READERS, "tokenize_train_data", "tokenize_eval_data", "use_truncation", "enable_data_shuffling"),
    "it has no effect on dataset_type=synthetic, which has no documents",
    unless=is_none_of("dataset_type", t.DatasetType.SYNTHETIC),
  ),
  UnsupportedOption(
    ("expansion_factor_real_data",),
    "every process reads the rows of its devices",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("grain_packing_type", "max_segments_per_seq"),
    "it has no effect on rows of one document (packing=false, dataset_type=olmo_grain), and c4_mlperf always splits",
    unless=all_of(
      is_set("packing"), is_none_of("dataset_type", t.DatasetType.OLMO_GRAIN, t.DatasetType.C4MLPERF)
    ),
  ),
  NoEffectOption(
    ("per_device_batch_size_start", "per_device_batch_size_increment", "global_rampup_samples"),
    "it has no effect without enable_rampup_batch_size=true",
    unless=is_set("enable_rampup_batch_size"),
  ),
  NoEffectOption(
    _section(t.TfdsDataset, but=("train_split",)),
    "it has no effect without dataset_type=tfds or dataset_type=c4_mlperf",
    unless=is_one_of("dataset_type", t.DatasetType.TFDS, t.DatasetType.C4MLPERF),
  ),
  NoEffectOption(
    ("train_split",),
    "it has no effect without dataset_type=tfds, c4_mlperf or hf",
    unless=is_one_of("dataset_type", t.DatasetType.TFDS, t.DatasetType.C4MLPERF, t.DatasetType.HF),
  ),
  NoEffectOption(
    _section(t.HfDataset, but=("hf_access_token",)),
    "it has no effect without dataset_type=hf",
    unless=is_one_of("dataset_type", t.DatasetType.HF),
  ),
  NoEffectOption(
    _section(t.GrainDataset, but=(*_READERS, "grain_shuffle_buffer_size")),
    "it has no effect without dataset_type=grain",
    unless=is_one_of("dataset_type", t.DatasetType.GRAIN),
  ),
  FixedOption(
    ("grain_use_elastic_iterator",),
    "the data-iterator state never depends on the number of hosts; leave it out",
    allowed_values=(True,),
  ),
  NoEffectOption(
    ("grain_ram_budget_mb",),
    "it has no effect without grain_worker_count=-1 or grain_worker_count_eval=-1",
    unless=any_of(is_one_of("grain_worker_count", -1), is_one_of("grain_worker_count_eval", -1)),
  ),
  NoEffectOption(
    ("grain_shuffle_buffer_size",),
    "it has no effect without grain_file_type=parquet or tfrecord, or streamed data: others are shuffled more widely",
    unless=any_of(
      is_none_of("grain_file_type", "arrayrecord"), is_one_of("dataset_type", t.DatasetType.HF)
    ),
  ),
  NoEffectOption(
    _section(t.OlmoGrainDataset),
    "it has no effect without dataset_type=olmo_grain",
    unless=is_one_of("dataset_type", t.DatasetType.OLMO_GRAIN),
  ),
  NoEffectOption(
    _section(t.Muon),
    "it has no effect without opt_type=muon",
    unless=is_one_of("opt_type", t.OptimizerType.MUON),
  ),
  NoEffectOption(
    ("wsd_decay_steps_fraction", "wsd_decay_style"),
    "it has no effect without lr_schedule_type=wsd",
    unless=is_one_of("lr_schedule_type", t.LearningRateScheduleType.WSD),
  ),
  NoEffectOption(
    _section(t.AdamW),
    "it has no effect on opt_type=sgd",
    unless=is_none_of("opt_type", t.OptimizerType.SGD),
  ),
  NoEffectOption(
    ("skip_step_interval", "skip_step_scaling_factor"),
    "it has no effect without skip_step_on_spikes=true",
    unless=is_set("skip_step_on_spikes"),
  ),
  UnsupportedOption(
    ("use_tunix_gradient_accumulation",), "accumulation is part of the train step; set gradient_accumulation_steps"
  ),
  NoEffectOption(
    ("eval_steps", "target_eval_loss", "eval_per_device_batch_size", "sample_prompts", "mtp_eval_target_module"),
    "it has no effect without eval_interval",
    unless=is_above("eval_interval", 0),
  ),
  NoEffectOption(
    ("eval_tasks_interval", "eval_tasks_limit"), "it has no effect without eval_tasks", unless=is_set("eval_tasks")
  ),
  NoEffectOption(
    ("sft_train_on_completion_only",), "it has no effect without use_sft=true", unless=is_set("use_sft")
  ),
  NoEffectOption(_DPO, "it has no effect without use_dpo=true", unless=is_set("use_dpo")),
  NoEffectOption(
    _FORMATTING,
    "it has no effect without use_sft=true or use_dpo=true",
    unless=any_of(is_set("use_sft"), is_set("use_dpo")),
  ),
  NoEffectOption(
    ("reference_log_probs_path",),
    "it has no effect without use_dpo=true and precompute_ref_log_probs=true",
    unless=all_of(is_set("use_dpo"), is_set("precompute_ref_log_probs")),
  ),
  NoEffectOption(
    ("precompute_ref_log_probs", "reference_log_probs_path"),
    "it has no effect on losses without a reference model",
    unless=_WITH_REFERENCE,
  ),
  NoEffectOption(
    ("kto_desirable_weight", "kto_undesirable_weight"), "it has no effect without dpo_loss_type=[kto]",
    unless=includes("dpo_loss_type", "kto"),
  ),
  NoEffectOption(
    ("simpo_gamma",), "it has no effect without dpo_loss_type=[simpo]", unless=includes("dpo_loss_type", "simpo")
  ),
  NoEffectOption(
    ("dpo_label_smoothing",),
    "it has no effect on dpo_loss_type=[hinge], [ipo], [orpo], [sft] or [kto]",
    unless=includes("dpo_loss_type", "sigmoid", "sigmoid_norm", "robust", "simpo"),
  ),
  NoEffectOption(
    ("z_loss_multiplier", "use_truncation"), "it has no effect on pairs (use_dpo=true)", unless=is_unset("use_dpo")
  ),
  NoEffectOption(
    ("dropout_rate", "projector_dropout_for_vit"), "it has no effect with enable_dropout=false",
    unless=is_set("enable_dropout"),
  ),
  UnsupportedOption(
    ("dropout_rate", "projector_dropout_for_vit"),
    "the replicas of enable_diloco=true would draw the same masks for different rows: leave one of them out",
    unless=any_of(is_unset("enable_diloco"), is_unset("enable_dropout")),
  ),
  NoEffectOption(
    ("formatting_func_kwargs",), "it has no effect without formatting_func_path", unless=is_set("formatting_func_path")
  ),
  UnsupportedOption(
    ("use_sft", "use_dpo"),
    "it needs conversations: write dataset_type=grain (grain_file_type=jsonl or parquet) or dataset_type=hf",
    unless=is_one_of("dataset_type", t.DatasetType.GRAIN, t.DatasetType.HF),
    allowed_values=(False,),
  ),
  UnsupportedOption(
    ("use_dpo",),
    "the reference model of DiLoCo replicas is not implemented: leave one of the two out",
    unless=is_unset("enable_diloco"),
    allowed_values=(False,),
  ),
  *(
    NoEffectOption(
      (f"distill_{name}_end",), f"it has no effect with distill_{name}_schedule=constant",
      unless=is_none_of(f"distill_{name}_schedule", "constant"),
    )
    for name in ("alpha", "temperature", "beta")
  ),
  NoEffectOption(
    ("distill_feature_loss_type", "distill_layer_indices"), "it has no effect without distill_beta",
    unless=any_of(is_set("distill_beta"), is_set("distill_beta_end")),
  ),
  NoEffectOption(
    _section(t.Distillation, but=("learn_to_init_mode", *_OF_LEARN_TO_INIT, "teacher_overrides", "offline_data_dir",
                                  "student_overrides", "student_params_to_update")),
    "it has no effect without a teacher: teacher_overrides, or offline_data_dir",
    unless=any_of(is_set("teacher_overrides"), is_set("offline_data_dir")),
  ),
  UnsupportedOption(
    ("distill_beta", "distill_beta_end", "distill_weights_copy_map"),
    "offline_data_dir has outputs of a teacher, and neither its layers nor its weights: leave one of them out",
    unless=is_unset("offline_data_dir"),
    allowed_values=(0.0,),
  ),
  UnsupportedOption(
    ("offline_data_dir",), "saved rows are read in batches of one size: write enable_rampup_batch_size=false",
    unless=is_unset("enable_rampup_batch_size"),
  ),
  UnsupportedOption(
    ("offline_data_dir",), "its batches are not repeated: write reuse_example_batch=0",
    unless=is_unset("reuse_example_batch"),
  ),
  UnsupportedOption(
    ("offline_data_dir",), "it has outputs at one temperature: write distill_temperature_schedule=constant",
    unless=is_one_of("distill_temperature_schedule", "constant"),
  ),
  UnsupportedOption(
    ("distill_beta", "distill_beta_end"), "layers of pipeline stages are not compared: leave one of them out",
    unless=negate(_PIPELINED),
    allowed_values=(0.0,),
  ),
  UnsupportedOption(
    ("teacher_overrides", "offline_data_dir"), "use_dpo=true and distillation are two methods: choose one of them",
    unless=is_unset("use_dpo"),
  ),
  UnsupportedOption(
    ("teacher_overrides",), "the teacher of DiLoCo replicas is not implemented: leave one of the two out",
    unless=is_unset("enable_diloco"),
  ),
  UnsupportedOption(
    _OF_LEARN_TO_INIT, "it is for the phase that learns the first weights: write learn_to_init_mode=true",
    unless=is_set("learn_to_init_mode"),
  ),
  UnsupportedOption(
    ("learn_to_init_mode",), "it maps the weights of a teacher: write teacher_overrides, and no offline_data_dir",
    unless=all_of(is_set("teacher_overrides"), is_unset("offline_data_dir")),
  ),
  UnsupportedOption(
    ("learn_to_init_mode",),
    "the student starts as a map of its teacher, and from no other weights: write load_parameters_path=''",
    unless=is_unset("load_parameters_path"),
  ),
  UnsupportedOption(
    ("learn_to_init_mode",), "its maps train in place of weights: leave lora_rank and use_qk_clip out",
    unless=all_of(is_unset("lora_rank"), is_unset("use_qk_clip")),
  ),
  NoEffectOption(_RL, "it has no effect without use_grpo=true", unless=is_set("use_grpo")),
  NoEffectOption(
    ("steps", "per_device_batch_size", "gradient_accumulation_steps"),
    "it has no effect with use_grpo=true, whose updates and rows are num_batches, batch_size, num_generations and "
    "train_micro_batch_size",
    unless=is_unset("use_grpo"),
  ),
  NoEffectOption(
    ("importance_sampling_cap",), "it has no effect with off_policy_steps=0, where rollouts are on policy",
    unless=is_set("off_policy_steps"),
  ),
  NoEffectOption(
    ("grpo_epsilon", "epsilon_high", "rl_clipping", "loss_algo"),
    "it has no effect without num_iterations above 1: a single update has ratios of 1",
    unless=is_above("num_iterations", 1),
  ),
  NoEffectOption(
    _NOT_OF_RL, "it has no effect with use_grpo=true, whose rows are answers of its own", unless=is_unset("use_grpo")
  ),
  NoEffectOption(
    ("routing_replay",), "it has no effect without num_experts above 1", unless=is_above("num_experts", 1)
  ),
  NoEffectOption(
    ("mismatch_limit",), "it has no effect with off_policy_steps, where the trainer is not the policy that answered",
    unless=is_unset("off_policy_steps"),
  ),
  NoEffectOption(
    ("overlong_penalty",), "it has no effect without overlong_buffer", unless=is_set("overlong_buffer")
  ),
  NoEffectOption(
    _section(t.RLEnvironment, but=("rl_environment",)), "it has no effect without rl_environment",
    unless=is_set("rl_environment"),
  ),
  NoEffectOption(
    ("environment_role",), "it has no effect without use_chat_template=true", unless=is_set("use_chat_template")
  ),
  NoEffectOption(
    (*_section(t.Reward, but=(*_ANSWER_LISTS, "math_verify_timeout", "math_verify_num_procs")),
     "reasoning_start_token", "reasoning_end_token"),
    "it has no effect without reward_functions=[format], [format_tags] or [answer]",
    unless=includes("reward_functions", "format", "format_tags", "answer"),
  ),
  NoEffectOption(
    ("solution_start_token", "solution_end_token"),
    "it has no effect without reward_functions=[format], [format_tags], [answer], [math_verify] or [code]",
    unless=includes("reward_functions", "format", "format_tags", "answer", "math_verify", "code"),
  ),
  NoEffectOption(
    ("code_timeout", "code_memory_gb"), "it has no effect without reward_functions=[code]",
    unless=includes("reward_functions", "code"),
  ),
  UnsupportedOption(
    ("use_grpo",), "it is a method of its own: leave use_sft, use_dpo, teacher_overrides and offline_data_dir out",
    unless=all_of(
      is_unset("use_sft"), is_unset("use_dpo"), is_unset("teacher_overrides"), is_unset("offline_data_dir")
    ),
    allowed_values=(False,),
  ),
  UnsupportedOption(
    ("use_grpo",), "prompts are read from JSON lines: write dataset_type=grain grain_file_type=jsonl",
    unless=all_of(is_one_of("dataset_type", t.DatasetType.GRAIN), is_one_of("grain_file_type", "jsonl")),
    allowed_values=(False,),
  ),
  UnsupportedOption(("chips_per_vm",), "devices are divided as JAX finds them: leave it out"),
  UnsupportedOption(("use_pathways",), "nothing here needs Pathways: leave it out", allowed_values=(False,)),
  NoEffectOption(
    ("rollout_data_parallelism", "rollout_tensor_parallelism", "rollout_expert_parallelism", "reshard_chunk_size"),
    "it has no effect where the engine shares the trainer's devices: set sampler_devices_fraction or sampler_address",
    unless=any_of(
      is_set("sampler_address"), is_none_of("sampler_devices_fraction", 1.0), is_above("num_samplers_slices", 0)
    ),
  ),
  NoEffectOption(
    ("max_concurrency",), "it has no effect without use_agentic_rollout=true", unless=is_set("use_agentic_rollout")
  ),
  UnsupportedOption(
    _section(t.VLLM, but=("stop_strings", "max_num_seqs")),
    "rollouts are generated by MaxText's own engine, from the trainer's own arrays; vLLM takes exported weights "
    "(maxtext convert to-hf)",
  ),
  NoEffectOption(
    ("math_verify_num_procs",), "it has no effect without reward_functions=[math_verify]",
    unless=includes("reward_functions", "math_verify"),
  ),
  UnsupportedOption(
    (*_ANSWER_LISTS, "debug"),
    "answers are listed in the run's rollouts.jsonl",
  ),
  NoEffectOption(
    ("decode_sampling_nucleus_p",),
    "it has no effect without decode_sampling_strategy=nucleus or composite",
    unless=is_one_of("decode_sampling_strategy", t.SamplingStrategy.NUCLEUS, t.SamplingStrategy.COMPOSITE),
  ),
  NoEffectOption(
    ("decode_sampling_top_k",),
    "it has no effect without decode_sampling_strategy=topk or composite",
    unless=is_one_of("decode_sampling_strategy", t.SamplingStrategy.TOPK, t.SamplingStrategy.COMPOSITE),
  ),
  NoEffectOption(
    ("decode_sampling_temperature",),
    "it has no effect on decode_sampling_strategy=greedy",
    unless=is_none_of("decode_sampling_strategy", t.SamplingStrategy.GREEDY),
  ),
  NoEffectOption(
    ("prefill_chunk_size",), "it has no effect without use_chunked_prefill=true", unless=is_set("use_chunked_prefill")
  ),
  NoEffectOption(
    ("load_from_prefill_dir",), "it has no effect without prefill_cache_dir", unless=is_set("prefill_cache_dir")
  ),
  UnsupportedOption(
    ("prefill_cache_dir",),
    "enable_prefix_caching=true caches prefixes of prompts in memory: leave one of them out",
    unless=is_unset("enable_prefix_caching"),
  ),
  UnsupportedOption(
    ("model_call_mode",), "the command decides it: `maxtext train` trains, `maxtext decode` decodes"
  ),
  UnsupportedOption(("enable_llm_inference_pool",), "a server is one process", allowed_values=(False,)),
  UnsupportedOption(
    _section(t.InferenceLayout),
    "caches have one order of dimensions, and the compiler chooses their memory layout",
    allowed_values=(False,),
  ),
  UnsupportedOption(
    _section(t.InferenceServer), "prefill and decoding run in one server on one mesh: `maxtext serve`"
  ),
  NoEffectOption(
    ("inference_microbenchmark_num_samples",),
    "it has no effect without multi_sampling=true",
    unless=is_set("multi_sampling"),
  ),
  UnsupportedOption(
    ("inference_benchmark_test",), "`maxtext bench serve` is the benchmark", allowed_values=(False,)
  ),
  NoEffectOption(
    ("prefix_caching_hbm_byte", "prefix_caching_dram_byte"),
    "it has no effect without enable_prefix_caching=true",
    unless=is_set("enable_prefix_caching"),
  ),
  UnsupportedOption(("constant_bound_config",), "it belongs to a debugging feature that is not implemented yet"),
  UnsupportedOption(
    ("max_checkify",), "a step from compiled_trainstep_file has no checks: leave one of them out",
    unless=is_unset("compiled_trainstep_file"), allowed_values=(False,),
  ),
  UnsupportedOption(
    _section(t.Metrics, t.Tensorboard, t.Profiling, t.HloDump, t.StackTrace, t.Goodput, t.GcpMonitoring,
             t.ManagedMLDiagnostics, but=(*_SHOWN, *_STORED, *_GOODPUT, *_PATHWAYS)),
    "metrics go to the console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics",
    allowed_values=(False,),
  ),
  UnsupportedOption(
    ("monitor_goodput",), "it needs the journal: write enable_goodput_recording=true too",
    unless=is_set("enable_goodput_recording"),
  ),
  NoEffectOption(
    ("goodput_upload_interval_seconds", "monitor_step_time_deviation"),
    "it has no effect without monitor_goodput=true",
    unless=is_set("monitor_goodput"),
  ),
  NoEffectOption(
    ("step_deviation_interval_seconds",), "it has no effect without monitor_goodput and monitor_step_time_deviation",
    unless=all_of(is_set("monitor_goodput"), is_set("monitor_step_time_deviation")),
  ),
  NoEffectOption(
    _STORED,
    "it has no effect without a base_output_directory in a bucket (gs://...): other runs have these files anyway",
    unless=is_in_bucket("base_output_directory"),
  ),
  UnsupportedOption(("profiler",), "only profiler=xplane is implemented yet", allowed_values=(t.ProfilerType.XPLANE,)),
  NoEffectOption(
    ("skip_first_n_steps_for_profiler", "profiler_steps", "profile_cleanly", "profile_periodically_period",
     "upload_all_profiler_results", "hide_profiler_step_metric", "enable_tpu_profiling_options",
     "profile_power_events"),
    "it has no effect without profiler=xplane",
    unless=is_none_of("profiler", t.ProfilerType.NONE),
  ),
  NoEffectOption(
    _TPU_TRACE, "it has no effect without enable_tpu_profiling_options=true",
    unless=is_set("enable_tpu_profiling_options"),
  ),
  NoEffectOption(
    _POWER_TRACE, "it has no effect without profile_power_events=true", unless=is_set("profile_power_events")
  ),
  NoEffectOption(
    ("event_stall_seconds",), "it has no effect without event_command", unless=is_set("event_command")
  ),
  NoEffectOption(_HLO[1:], "it has no effect without dump_hlo=true", unless=is_set("dump_hlo")),
  NoEffectOption(_JAXPR[1:], "it has no effect without dump_jaxpr=true", unless=is_set("dump_jaxpr")),
  NoEffectOption(
    ("jax_profiler_port",),
    "it has no effect without enable_jax_profiler=true",
    unless=is_set("enable_jax_profiler"),
  ),
  NoEffectOption(
    ("stack_trace_interval_seconds",),
    "it has no effect without collect_stack_trace=true",
    unless=is_set("collect_stack_trace"),
  ),
  UnsupportedOption(
    _section(t.MultimodalGeneral, t.VisionTower, t.VisionProjector, t.AudioEncoder,
             but=("use_multimodal", "use_audio", "max_num_images_per_example", *_VISION, *_AUDIO)),
    "no encoder here has it: leave it out",
    allowed_values=(False,),
  ),
  NoEffectOption(
    ("train_image_column", "eval_image_column", "max_num_images_per_example", "image_slots_per_row"),
    "it has no effect without use_multimodal=true, and use_sft=true, use_dpo=true or use_grpo=true",
    unless=all_of(is_set("use_multimodal"), any_of(is_set("use_sft"), is_set("use_dpo"), is_set("use_grpo"))),
  ),
  NoEffectOption(_VISION, "it has no effect without use_multimodal=true", unless=is_set("use_multimodal")),
  NoEffectOption(_AUDIO, "it has no effect without use_audio=true", unless=is_set("use_audio")),
)  # fmt: skip
