"""From keys to an `ExecutionConfig`, with checks of which options a model supports."""

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import compares_features
from maxtext.configs.types import DType
from maxtext.layers.execution import ExecutionConfig, Kernels, KVCacheConfig, Numerics, Sharding
from maxtext.mesh.explicit import is_explicit
from maxtext.mesh.rules import Rules
from maxtext.models.execution.adapters import adapters
from maxtext.models.execution.attention_kernel import attention, check_attention, for_spans
from maxtext.models.execution.batch_split import batch_split
from maxtext.models.execution.expert_dispatch import check_experts, dispatch
from maxtext.models.execution.kv_cache import kv_cache_block, kv_cache_pages, kv_cache_parts, kv_cache_quantization
from maxtext.models.execution.pipeline_stages import pipelines
from maxtext.models.execution.quantization import (
  quantized_matmuls,
  rounded_weights,
  sparse_matmuls,
  weights_at_rest,
)
from maxtext.models.execution.remat_policy import remat, tower_remat
from maxtext.models.spec import DecoderSpec


def execution_of_model(config: MaxTextConfig, mesh: Mesh, spec: DecoderSpec, serving: bool = False) -> ExecutionConfig:
  """The execution of one model on a mesh, for training or for inference (`serving`).

  Raises:
    ConfigError: the model does not support an option.
  """
  execution = execution_config(config, mesh, serving)
  execution = execution.replace(attention=for_spans(config, spec, execution.kernels.attention))
  check_attention(config, spec, execution.kernels.attention.kernel)
  check_experts(config, spec, execution)
  policies = len(execution.remat)
  if odd := [group.repeats for group in spec.groups if group.repeats % policies]:
    raise ConfigError(
      f"remat_policy={config.remat_policy} names {policies} policies that take turns over the layers, and this model "
      f"repeats {odd[0]} layers, which is not a multiple of {policies}."
    )
  if execution.kernels.attention.order is not None and not spec.order_invariant:
    raise ConfigError(
      "context_parallel_load_balance=true reorders the tokens of a row, and this model has layers that need them in "
      "order: write context_parallel_load_balance=false."
    )
  return execution.replace(
    pipelines=pipelines(config, spec, execution),
    batch_split=1 if serving else batch_split(config, execution.sharding),
  )


def execution_config(config: MaxTextConfig, mesh: Mesh, serving: bool = False) -> ExecutionConfig:
  """The execution of any model on a mesh, without the checks and pipelines of one model."""
  c = config
  rules, lora = sharding_rules(c, mesh), adapters(c)
  return ExecutionConfig(
    sharding=Sharding(mesh, rules, c.reduce_scatter_gradients),
    numerics=Numerics(
      dtype=c.dtype.value,
      weight_dtype=c.weight_dtype.value,
      precision=c.matmul_precision.value,
      activations_in_float32=c.activations_in_float32,
      logits_dot_in_float32=c.logits_dot_in_fp32,
      cast_logits_to_float32=c.cast_logits_to_fp32,
      init_scale=c.dense_init_scale,
    ),
    kernels=Kernels(
      attention=attention(c, mesh, rules.num_shards(mesh, "activation_length")),
      experts=dispatch(c, mesh),
      one_hot_embedding=c.use_iota_embed,
      decode_attention=mesh.devices.flat[0].platform == "tpu",
    ),
    remat=remat(c),
    tower_dtype=_tower_dtype(c) if c.use_multimodal or c.use_audio else None,
    tower_remat=tower_remat(c) if c.use_multimodal or c.use_audio else None,
    scan_layers=c.scan_layers,
    kv_cache=KVCacheConfig(
      kv_cache_quantization(c), kv_cache_pages(c, mesh), kv_cache_block(c, mesh), kv_cache_parts(mesh)
    ),
    # The quantized one must be the last.
    matmul=(
      *((lora,) if lora else ()),
      *sparse_matmuls(c),
      *rounded_weights(c, serving),
      *quantized_matmuls(c, mesh, rules.num_shards(mesh, "activation_batch")),
    ),
    weight_format=weights_at_rest(c, serving),
    dropout_rate=c.dropout_rate if c.enable_dropout else 0.0,
    keep_mixer_outputs=compares_features(c),
    measure_activations=c.record_internal_nn_metrics > 0,
  )


def _tower_dtype(config: MaxTextConfig) -> str:
  names = [dtype.value for dtype in DType]
  if config.dtype_mm not in names:
    raise ConfigError(f"dtype_mm={config.dtype_mm} is not one of {', '.join(names)}.")
  return config.dtype_mm


def sharding_rules(config: MaxTextConfig, mesh: Mesh) -> Rules:
  """The rules that map logical axes to mesh axes."""
  rules = Rules.parse(config.logical_axis_rules, config.mesh_axes)
  if is_explicit(mesh):  # weights are gathered over axes that split tokens
    rules = rules.without_split_tokens()
  if not config.shard_exp_on_fsdp:
    return rules
  rules = rules.with_experts_over("fsdp")
  if config.num_experts % (parts := rules.num_shards(mesh, "expert")):
    raise ConfigError(
      f"shard_exp_on_fsdp=true splits the experts over {parts} devices, which does not divide "
      f"num_experts={config.num_experts}: choose another mesh, or leave it out."
    )
  return rules
