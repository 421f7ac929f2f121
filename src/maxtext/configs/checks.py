"""Checks of values and of combinations of keys. No devices are known here."""

import re
import shlex
from collections.abc import Callable

from maxtext.configs.errors import ConfigError, did_you_mean
from maxtext.configs.secrets import REDACTED
from maxtext.configs.types import (
  DatasetType,
  DType,
  KvQuantAxis,
  MaxTextConfig,
  QuantizationType,
  RematPolicy,
  SamplingStrategy,
  ShardMode,
  SpecialTokens,
)
from maxtext.configs.unsupported import UNSUPPORTED, NoEffectOption
from maxtext.configs.values import ACTIVATIONS, ATTENTION_KERNELS, STORES, default_of, in_bucket, policy_names


def check(config: MaxTextConfig) -> None:
  """Raises `ConfigError` for the first key that is invalid or unsupported."""
  for rule in (*RULES, *(row.problem for row in UNSUPPORTED if not isinstance(row, NoEffectOption))):
    if problem := rule(config):
      raise ConfigError(problem)


def _heads(c: MaxTextConfig) -> str | None:
  if c.base_num_query_heads % c.base_num_kv_heads:
    return (
      f"base_num_query_heads={c.base_num_query_heads} is not a multiple of base_num_kv_heads={c.base_num_kv_heads}: "
      f"each key head serves the same number of query heads."
    )
  if c.head_dim % 2:
    return f"head_dim={c.head_dim} must be even: rotary embeddings rotate pairs of dimensions."
  return None


def _encoders(c: MaxTextConfig) -> str | None:
  if c.num_channels_for_vit != 3:
    return f"num_channels_for_vit={c.num_channels_for_vit} must be 3: images are read as RGB."
  if c.vision_output_length != -1 and c.vision_output_length < 1:
    return f"vision_output_length={c.vision_output_length} must be at least 1, or -1, which leaves it to the model."
  if min(c.mrope_section, default=1) < 1:
    return f"mrope_section={c.mrope_section} must have numbers of at least 1."
  return None


def _preference(c: MaxTextConfig) -> str | None:
  if not c.use_dpo:
    return None
  if c.use_sft:
    return "use_sft=true and use_dpo=true are two methods: choose one of them."
  if c.dpo_beta <= 0:
    return f"dpo_beta={c.dpo_beta} must be above 0."
  if c.dpo_loss_weights and len(c.dpo_loss_weights) != len(c.dpo_loss_type):
    return f"dpo_loss_weights={c.dpo_loss_weights} must have a weight for each of dpo_loss_type={c.dpo_loss_type}."
  if "kto" in c.dpo_loss_type and len(c.dpo_loss_type) > 1:
    return f"dpo_loss_type={c.dpo_loss_type}: kto is of single answers with labels, and the others are of pairs."
  if any(not 0 <= weight < float("inf") for weight in c.dpo_loss_weights):
    return f"dpo_loss_weights={c.dpo_loss_weights} must be finite numbers from 0 on."
  if "robust" in c.dpo_loss_type and c.dpo_label_smoothing >= 0.5:
    return f"dpo_label_smoothing={c.dpo_label_smoothing} must be below 0.5 for dpo_loss_type=[robust]."
  return None


def _reinforcement(c: MaxTextConfig) -> str | None:
  if not c.use_grpo:
    return None
  least_values = {
    "num_generations": 2, "num_iterations": 1, "batch_size": 1, "num_batches": 1, "num_eval_passes": 1,
    "num_test_batches": 0, "off_policy_steps": 0, "test_batch_start_index": 0, "math_verify_timeout": 1,
  }  # fmt: skip
  for key, least in least_values.items():
    if getattr(c, key) < least:
      return f"{key}={getattr(c, key)} must be at least {least}."
  for key in ("grpo_beta", "grpo_epsilon", "epsilon_high"):
    if not 0 <= (getattr(c, key) or 0.0) < float("inf"):
      return f"{key}={getattr(c, key)} must be a finite number from 0 on."
  if not 0 < c.train_fraction <= 1:
    return f"train_fraction={c.train_fraction} must be above 0 and at most 1."
  rows = c.batch_size * c.num_generations
  if c.train_micro_batch_size != -1 and (c.train_micro_batch_size < 1 or rows % c.train_micro_batch_size):
    return (
      f"train_micro_batch_size={c.train_micro_batch_size} must divide the {rows} answers of batch_size={c.batch_size} "
      f"x num_generations={c.num_generations}, or be -1."
    )
  if c.rollout_micro_batch_size != -1 and c.rollout_micro_batch_size < 1:
    return f"rollout_micro_batch_size={c.rollout_micro_batch_size} must be at least 1, or -1 for all prompts."
  if c.eval_sampling_strategy not in c.generation_configs:
    return (
      f"eval_sampling_strategy={c.eval_sampling_strategy} is not in generation_configs, which has "
      f"{', '.join(c.generation_configs) or 'nothing'}.{did_you_mean(c.eval_sampling_strategy, c.generation_configs)}"
    )
  if not (c.reward_functions or c.rl_environment) or len(set(c.reward_functions)) < len(c.reward_functions):
    return f"reward_functions={c.reward_functions} must name at least one function, and each once."
  if c.rl_environment and not all(c.rl_environment.partition(":")):
    return f"rl_environment={c.rl_environment} must be module:Class."
  if "" in (c.stop_strings or ()):
    return f"stop_strings={c.stop_strings} has an empty text, which would end every answer at once: leave it out."
  marks = {key: getattr(c, key) for key in SpecialTokens.model_fields}
  for key, mark in marks.items():
    if not mark:
      return f"{key}='' must be a text."
    if any(mark in stop for stop in c.stop_strings or ()):
      return f"stop_strings={c.stop_strings} would cut {key}={mark} off before an answer is rewarded: leave it out."
  if c.reward_weights and len(c.reward_weights) != len(c.reward_functions):
    return f"reward_weights={c.reward_weights} must have a weight for each of reward_functions={c.reward_functions}."
  if c.max_prefill_predict_length >= c.max_target_length:
    return (
      f"max_prefill_predict_length={c.max_prefill_predict_length} leaves no room for answers in max_target_length="
      f"{c.max_target_length}: lower it."
    )
  longest = c.max_target_length - c.max_prefill_predict_length
  if c.overlong_buffer > longest:
    return (
      f"overlong_buffer={c.overlong_buffer} must be at most {longest}, the tokens that max_target_length leaves after "
      f"max_prefill_predict_length."
    )
  if c.decode_sampling_strategy is SamplingStrategy.GREEDY:
    return "decode_sampling_strategy=greedy gives every answer of a group the same text: write weighted."
  is_plain = c.decode_sampling_strategy is SamplingStrategy.WEIGHTED and c.decode_sampling_temperature == 1.0
  if c.off_policy_steps and c.importance_sampling_cap and not is_plain:
    return (
      f"off_policy_steps={c.off_policy_steps} weights tokens by the policy that wrote them, which is the model's own: "
      f"write decode_sampling_strategy=weighted decode_sampling_temperature=1.0, or importance_sampling_cap=0."
    )
  return None


def _rollout_devices(c: MaxTextConfig) -> str | None:
  if not c.use_grpo:
    return None
  shares = {key: getattr(c, key) for key in ("trainer_devices_fraction", "sampler_devices_fraction")}
  slices = {key: getattr(c, key) for key in ("num_trainer_slices", "num_samplers_slices")}
  shared, whole = all(share == 1 for share in shares.values()), all(count == -1 for count in slices.values())
  if c.sampler_address and not (shared and whole):
    return (
      f"sampler_address={c.sampler_address} is a process with devices of its own: leave num_trainer_slices and "
      f"num_samplers_slices out, and trainer_devices_fraction and sampler_devices_fraction at 1.0."
    )
  if whole and not shared and not (min(shares.values()) > 0 and sum(shares.values()) <= 1):
    return (
      f"trainer_devices_fraction={shares['trainer_devices_fraction']:g} sampler_devices_fraction="
      f"{shares['sampler_devices_fraction']:g}: write 1.0 for both, which shares all devices, or at most 1 in all."
    )
  if not whole and min(slices.values()) < 1:
    return f"num_trainer_slices={c.num_trainer_slices} num_samplers_slices={c.num_samplers_slices}: set both."
  for key in ("max_concurrency", "max_num_seqs", "reshard_chunk_size", "rollout_expert_parallelism"):
    if getattr(c, key) is not None and getattr(c, key) < 1:
      return f"{key}={getattr(c, key)} must be at least 1."
  return None


def _distillation(c: MaxTextConfig) -> str | None:
  for key in ("student_overrides", "teacher_overrides"):
    for name in ("load_parameters_path", "load_full_state_path"):
      if not isinstance(getattr(c, key).get(name, ""), str):
        return f"{key}: {name}={getattr(c, key)[name]} must be a path."
    for name in getattr(c, key):
      if name not in MaxTextConfig.model_fields:
        return f"{key}: '{name}' is not a key.{did_you_mean(str(name), MaxTextConfig.model_fields)}"
  if nested := c.student_overrides.keys() & {"student_overrides", "teacher_overrides"}:
    return f"student_overrides: '{min(nested)}' belongs beside it."
  for name, least, most in (("alpha", 0.0, 1.0), ("temperature", 1e-3, 1e3), ("beta", 0.0, 1e6)):
    end, schedule = getattr(c, f"distill_{name}_end"), getattr(c, f"distill_{name}_schedule")
    for key, value in ((f"distill_{name}", getattr(c, f"distill_{name}")), (f"distill_{name}_end", end)):
      if value is not None and not least <= value <= most:
        return f"{key}={value} must be from {least:g} to {most:g}."
    if schedule != "constant" and end is None:
      return f"distill_{name}_schedule={schedule} needs distill_{name}_end, the value that it leads to."
  if c.student_params_to_update and c.trainable_parameters_mask:
    return "student_params_to_update and trainable_parameters_mask both name what trains: leave one of them out."
  return None


def _scale(c: MaxTextConfig) -> str | None:
  scale = c.global_parameter_scale
  if scale < 1 or scale.bit_count() > 1 or scale > 2**20:
    return f"global_parameter_scale={scale} must be a power of two, from 1 to 1048576."
  if scale > 1 and c.model_name != "default" and not c.override_model_config:
    return (
      f"global_parameter_scale={scale} contradicts model_name={c.model_name}, which has its own sizes. "
      f"Add override_model_config=true to change the model."
    )
  return None


def _activations(c: MaxTextConfig) -> str | None:
  ok = c.mlp_activations[:1] and c.mlp_activations[0] in ACTIVATIONS and c.mlp_activations[1:] in ([], ["linear"])
  if not ok:
    return (
      f"mlp_activations={c.mlp_activations} must be one of {ACTIVATIONS}, with 'linear' after it for a gated layer."
    )
  return None


def _window(c: MaxTextConfig) -> str | None:
  for kind, key in {"local_sliding": "sliding_window_size", "chunk": "chunk_attn_window_size"}.items():
    if c.attention_type == kind and getattr(c, key) < 1:
      return f"attention_type={kind} needs {key} above 0; it is {getattr(c, key)}."
  return None


def _positions(c: MaxTextConfig) -> str | None:
  if 0 < c.trainable_position_size < c.max_target_length:
    return f"max_target_length={c.max_target_length} is more than trainable_position_size={c.trainable_position_size}."
  return None


def _cache(c: MaxTextConfig) -> str | None:
  if c.quantize_kvcache and c.kv_quant_axis == KvQuantAxis.NONE:
    return "quantize_kvcache=true needs scales: write kv_quant_axis=dkv, or heads_and_dkv for fewer of them."
  return None


def _quantization(c: MaxTextConfig) -> str | None:
  if c.quantization == QuantizationType.INTMP and not c.quant_cfg_path:
    return "quantization=intmp needs quant_cfg_path, a JSON file of bits by module path (docs/quantization.md)."
  if c.quantization and c.shard_mode == ShardMode.EXPLICIT:
    return f"quantization={c.quantization.value} needs shard_mode=auto: its gradients have no shardings as types."
  if c.weight_format and c.shard_mode == ShardMode.EXPLICIT:
    return f"weight_format={c.weight_format} needs shard_mode=auto: blocks of weights have no shardings as types."
  if (parts := c.quantization_local_shard_count) == 0 or parts < -1:
    return f"quantization_local_shard_count={parts} must be 1 or more, or -1 for the number of slices."
  return None


def _sparsity(c: MaxTextConfig) -> str | None:
  kept, block = c.weight_sparsity_n, c.weight_sparsity_m
  if kept is None and block is None:
    return None
  if kept is None or block is None or not 0 < kept < block:
    return f"weight_sparsity_n={kept} and weight_sparsity_m={block} must be N and M of N:M sparsity, such as 2 and 4."
  if c.weight_sparsity_start_step < 0 or c.weight_sparsity_update_step < 1:
    return "weight_sparsity_start_step must be 0 or more, and weight_sparsity_update_step 1 or more."
  if c.shard_mode == ShardMode.EXPLICIT:
    return f"weight_sparsity_n={kept} needs shard_mode=auto."
  if c.enable_diloco:
    return f"weight_sparsity_n={kept} does not go with enable_diloco=true: replicas have masks of their own."
  return None


def _pages(c: MaxTextConfig) -> str | None:
  if (most := c.pagedattn_max_pages_per_group) == 0 or most < -1:
    return f"pagedattn_max_pages_per_group={most} must be 1 or more, or -1 for as many as the longest text needs."
  return None


def _attention(c: MaxTextConfig) -> str | None:
  if c.attention not in ATTENTION_KERNELS:
    hint = did_you_mean(c.attention, ATTENTION_KERNELS)
    return f"attention={c.attention} must be one of {', '.join(ATTENTION_KERNELS)}.{hint}"
  return None


def _experts(c: MaxTextConfig) -> str | None:
  if c.num_experts_per_tok > c.num_experts:
    return f"num_experts_per_tok={c.num_experts_per_tok} is more than num_experts={c.num_experts}."
  if c.routed_score_func not in ("", "softmax", "sigmoid"):
    return f"routed_score_func={c.routed_score_func} must be softmax or sigmoid, or empty, which is softmax."
  for key in ("capacity_factor", "ragged_buffer_factor"):
    if not (getattr(c, key) == -1 or getattr(c, key) > 0):
      return f"{key}={getattr(c, key)} must be above 0, or -1."
  return None


def _engram(c: MaxTextConfig) -> str | None:
  if not c.engram_layers:
    return None
  if c.engram_max_ngram_size < 2 or len(c.engram_vocab_bases) != c.engram_max_ngram_size - 1:
    return (
      f"engram_vocab_bases={c.engram_vocab_bases} must have a size for each n-gram length from 2 to "
      f"engram_max_ngram_size={c.engram_max_ngram_size}."
    )
  for key in ("engram_num_heads", "engram_head_dim", "engram_kernel_size"):
    if getattr(c, key) < 1:
      return f"{key}={getattr(c, key)} must be 1 or more."
  if not all(1 <= base < 2**30 for base in c.engram_vocab_bases):
    return f"engram_vocab_bases={c.engram_vocab_bases} must be from 1 to 1073741823."
  return None if c.engram_seed >= 0 else f"engram_seed={c.engram_seed} must be 0 or more."


def _routing_groups(c: MaxTextConfig) -> str | None:
  groups, selected = c.n_routing_groups, c.topk_routing_group
  if groups <= 0:
    return None
  if c.num_experts % groups or c.num_experts // groups < 2:
    return f"n_routing_groups={groups} must divide num_experts={c.num_experts} into groups of two or more."
  if not 1 <= selected <= groups:
    return f"topk_routing_group={selected} must be from 1 to n_routing_groups={groups}."
  if c.num_experts_per_tok > selected * (c.num_experts // groups):
    return (
      f"num_experts_per_tok={c.num_experts_per_tok} is more than the experts of topk_routing_group={selected} of "
      f"n_routing_groups={groups}."
    )
  return None


def _mesh_axes(c: MaxTextConfig) -> str | None:
  known = (*default_of("mesh_axes"), "diloco")
  for axis in c.mesh_axes:
    if axis not in known:
      return f"mesh_axes: '{axis}' is not a mesh axis; they are {', '.join(known)}.{did_you_mean(axis, known)}"
  if "data" not in c.mesh_axes or len(set(c.mesh_axes)) < len(c.mesh_axes):
    return f"mesh_axes={c.mesh_axes} must name data, and no axis twice; data may have size 1."
  return None


def _remat(c: MaxTextConfig) -> str | None:
  known = [p.value for p in RematPolicy]
  for name in policy_names(c.remat_policy):
    if name not in known:
      return f"remat_policy={c.remat_policy}: '{name}' must be one of {', '.join(known)}.{did_you_mean(name, known)}"
  return None


def _tiling(c: MaxTextConfig) -> str | None:
  if c.num_vocab_tiling < 1 or c.max_target_length % c.num_vocab_tiling:
    return f"num_vocab_tiling={c.num_vocab_tiling} must divide max_target_length={c.max_target_length}."
  return None


def _context(c: MaxTextConfig) -> str | None:
  if c.context_parallel_strategy not in ("all_gather", "ring"):
    return f"context_parallel_strategy={c.context_parallel_strategy} must be all_gather or ring."
  return None


def _mtp(c: MaxTextConfig) -> str | None:
  if c.mtp_num_layers >= c.max_target_length:
    return f"mtp_num_layers={c.mtp_num_layers} must be below max_target_length={c.max_target_length}."
  if c.mtp_eval_target_module > c.mtp_num_layers:
    return (
      f"mtp_eval_target_module={c.mtp_eval_target_module} is more than mtp_num_layers={c.mtp_num_layers}: it is the "
      f"number of a layer, from 1, or 0 for none."
    )
  return None


def _dropout(c: MaxTextConfig) -> str | None:
  if c.enable_dropout and c.dropout_rate >= 1:
    return f"dropout_rate={c.dropout_rate} leaves nothing of the activations: it must be below 1."
  return None


def _indexer(c: MaxTextConfig) -> str | None:
  weight = c.indexer_loss_scaling_factor
  if weight < 0:
    return f"indexer_loss_scaling_factor={weight} must be 0 or more."
  if c.use_indexer and weight and c.indexer_topk >= c.max_target_length:
    return (
      f"indexer_loss_scaling_factor={weight} trains an indexer that has nothing to select: indexer_topk="
      f"{c.indexer_topk} must be below max_target_length={c.max_target_length}."
    )
  return None


def _length(c: MaxTextConfig) -> str | None:
  if c.steps == -1 and c.learning_rate_schedule_steps == -1:
    return "steps=-1 takes learning_rate_schedule_steps, which is -1 too: set one of them."
  return None


def _evaluation(c: MaxTextConfig) -> str | None:
  if c.eval_interval == 0 or c.eval_interval < -1:
    return f"eval_interval={c.eval_interval} must be above 0, or -1 for no evaluation."
  if c.eval_steps == 0 or c.eval_steps < -1:
    return f"eval_steps={c.eval_steps} must be above 0, or -1 for the whole evaluation set."
  if c.eval_interval > 0 and c.eval_steps == -1 and c.dataset_type == DatasetType.SYNTHETIC:
    return f"eval_interval={c.eval_interval} with eval_steps=-1 never ends: synthetic data is endless; set eval_steps."
  return None


def _profile(c: MaxTextConfig) -> str | None:
  period = c.profile_periodically_period
  if period != -1 and period <= c.profiler_steps:
    return f"profile_periodically_period={period} must be above profiler_steps={c.profiler_steps}, or -1 to trace once."
  return None


def _events(c: MaxTextConfig) -> str | None:
  try:
    words = shlex.split(c.event_command)
  except ValueError as error:
    return f"event_command={c.event_command} is no command: {str(error).lower()}."
  return None if words or not c.event_command else f"event_command={c.event_command!r} is no command: leave it out."


def _compiler_flags(c: MaxTextConfig) -> str | None:
  for key in ("dump_hlo_xla_flags", "compile_xla_flags"):
    for flag in getattr(c, key).split():
      if not re.fullmatch(r"--\w+=\S+", flag):
        return f"{key}: '{flag}' must look like --xla_dump_to=folder."
  return None


def _sizes(c: MaxTextConfig) -> str | None:
  for key, least in _LEAST.items():
    if not least <= getattr(c, key) < 2**31:
      return f"{key}={getattr(c, key)} must be from {least} to 2147483647."
  return None


_PATTERN_KEYS = (
  "trainable_parameters_mask", "student_params_to_update", "adamw_mask", "lora_targets", "weight_format_targets",
)  # fmt: skip


def _patterns(c: MaxTextConfig) -> str | None:
  for key in _PATTERN_KEYS:
    for pattern in getattr(c, key) or ():
      if not isinstance(pattern, str):
        return f"{key}: {pattern} is not a regular expression: write it in quotes."
      try:
        re.compile(pattern)
      except re.error as error:
        return f"{key}: '{pattern}' is not a regular expression: {error}."
  return None


def _moment(c: MaxTextConfig) -> str | None:
  known = [d.value for d in DType]
  if c.mu_dtype and c.mu_dtype not in known:
    return f"mu_dtype={c.mu_dtype} must be one of {', '.join(known)}, or empty."
  return None


def _checkpoints(c: MaxTextConfig) -> str | None:
  if c.max_num_checkpoints_to_keep is not None and c.max_num_checkpoints_to_keep < 1:
    return f"max_num_checkpoints_to_keep={c.max_num_checkpoints_to_keep} must be at least 1, or null to keep all."
  if c.checkpoint_storage_target_data_file_size_bytes < 1:
    size = c.checkpoint_storage_target_data_file_size_bytes
    return f"checkpoint_storage_target_data_file_size_bytes={size} must be at least 1."
  for key in ("base_output_directory", "load_full_state_path", "load_parameters_path"):
    scheme, separator, _ = (path := getattr(c, key)).partition("://")
    if separator and scheme not in STORES:
      return (
        f"{key}={path} is in a store that Orbax does not write: checkpoints are on file systems or in gs://. Mount the "
        f"bucket and name the folder."
      )
  if c.load_full_state_path and c.load_parameters_path:
    return "load_full_state_path and load_parameters_path are both set, and a run starts from one of them."
  return None


def _local_checkpoints(c: MaxTextConfig) -> str | None:
  if not c.enable_emergency_checkpoint:
    return None
  if not c.local_checkpoint_directory or in_bucket(c.local_checkpoint_directory):
    folder = c.local_checkpoint_directory or "..."
    return f"enable_emergency_checkpoint=true needs local_checkpoint_directory={folder} to be a folder on a disk."
  if c.local_checkpoint_period < 1:
    return "enable_emergency_checkpoint=true needs local_checkpoint_period above 0."
  return None


def _ramp(c: MaxTextConfig) -> str | None:
  if c.enable_rampup_batch_size and not 0 < c.per_device_batch_size_start < c.per_device_batch_size:
    return (
      f"per_device_batch_size_start={c.per_device_batch_size_start:g} must be above 0 and below "
      f"per_device_batch_size={c.per_device_batch_size:g}, or there is nothing to grow."
    )
  if c.enable_rampup_batch_size and not c.per_device_batch_size_increment > 0:
    return f"per_device_batch_size_increment={c.per_device_batch_size_increment:g} must be above 0."
  return None


def _mixture(c: MaxTextConfig) -> str | None:
  if c.grain_train_files and c.grain_train_mixture_config_path:
    return "grain_train_files and grain_train_mixture_config_path are both set: leave one out."
  return None


def _token(c: MaxTextConfig) -> str | None:
  if c.hf_access_token and not re.fullmatch(r"[!-~]+", c.hf_access_token):  # HTTP's own message would quote it
    return f"hf_access_token={REDACTED} holds a space, a line's end or another character that no token has."
  return None


def _sampling(c: MaxTextConfig) -> str | None:
  strategy = c.decode_sampling_strategy
  both = (SamplingStrategy.COMPOSITE,)
  for key, strategies, fits, words in (
    ("decode_sampling_nucleus_p", (SamplingStrategy.NUCLEUS, *both), lambda p: 0 < p <= 1, "above 0, and at most 1"),
    ("decode_sampling_top_k", (SamplingStrategy.TOPK, *both), lambda k: k > 0, "1 or more"),
    ("decode_sampling_temperature", tuple(SamplingStrategy), lambda t: t > 0, "above 0"),
  ):
    if strategy in strategies and not fits(getattr(c, key)):
      return f"{key}={getattr(c, key)} must be {words}, with decode_sampling_strategy={strategy.value}."
  return None


_LEAST = {
  "base_emb_dim": 1,
  "base_num_query_heads": 1,
  "base_num_kv_heads": 1,
  "base_mlp_dim": 1,
  "base_num_decoder_layers": 1,
  "head_dim": 1,
  "vocab_size": 1,
  "max_target_length": 1,
  "max_prefill_predict_length": 1,
  "prefill_chunk_size": 1,
  "ragged_block_size": 1,
  "mhc_expansion_rate": 1,
  "diloco_sync_period": 1,
  "rope_factor": 1,
  "rope_max_timescale": 2,
  "rope_min_timescale": 1,
  "rope_linear_scaling_factor": 1e-6,
  "beta_fast": 1,
  "beta_slow": 1,
  "inhomogeneous_layer_cycle_interval": 1,
  "global_head_dim": 0,
  "global_num_kv_heads": 0,
  "global_rope_proportion": 0,
  "local_rope_proportion": 0,
  "partial_rotary_factor": 0,
  "original_max_position_embeddings": 1,
  "log_period": 1,
  "checkpoint_period": 1,
  "checkpoint_storage_concurrent_gb": 1,
  "param_scan_axis": 0,
  "moba_chunk_size": 1,
  "moba_topk": 1,
  "profiler_steps": 1,
  "stack_trace_interval_seconds": 1,
  "skip_first_n_steps_for_profiler": 0,
  "data_shuffle_seed": 0,
  "num_epoch": 1,
  "max_segments_per_seq": -1,
  "reuse_example_batch": 0,
  "global_rampup_samples": 1,
  "grain_worker_count": -1,
  "grain_worker_count_eval": -1,
  "grain_per_worker_buffer_size": 1,
  "grain_per_worker_buffer_size_eval": 1,
  "grain_num_threads": 1,
  "grain_num_threads_eval": 1,
  "grain_prefetch_buffer_size": 0,
  "grain_prefetch_buffer_size_eval": 0,
  "grain_shuffle_buffer_size": 1,
  "grain_data_source_max_workers": 1,
  "grain_ram_budget_mb": 1,
  "init_weights_seed": 0,
  "dense_init_scale": 0,
  "normalization_layer_epsilon": 0,
}

RULES: tuple[Callable[[MaxTextConfig], str | None], ...] = (
  _sizes,
  _mesh_axes,
  _scale,
  _heads,
  _encoders,
  _preference,
  _reinforcement,
  _rollout_devices,
  _distillation,
  _activations,
  _window,
  _positions,
  _cache,
  _quantization,
  _sparsity,
  _attention,
  _pages,
  _experts,
  _routing_groups,
  _engram,
  _remat,
  _tiling,
  _mtp,
  _dropout,
  _indexer,
  _context,
  _length,
  _evaluation,
  _profile,
  _compiler_flags,
  _events,
  _moment,
  _patterns,
  _checkpoints,
  _local_checkpoints,
  _ramp,
  _mixture,
  _token,
  _sampling,
)
