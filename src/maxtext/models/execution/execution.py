"""How a configuration executes a model on a mesh: all parts of `How`, and what of them a model cannot have."""

import dataclasses

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.how import How
from maxtext.mesh.rules import Rules
from maxtext.models.execution.attention_kernel import attention, check_attention
from maxtext.models.execution.expert_dispatch import check_experts, dispatch
from maxtext.models.execution.kv_cache import cache_block, cache_pages, cache_rounding
from maxtext.models.execution.pipeline_stages import pipelines
from maxtext.models.execution.remat_policy import remat
from maxtext.models.spec import DecoderSpec


def how_of_model(config: MaxTextConfig, mesh: Mesh, spec: DecoderSpec) -> How:
  """How this configuration executes one model on a mesh; refuses what does not go with it."""
  execution = how(config, mesh)
  check_attention(config, spec, execution.attention.kernel)
  check_experts(config, spec)
  turns = len(execution.remat)
  if odd := [group.repeats for group in spec.groups if group.repeats % turns]:
    raise ConfigError(
      f"remat_policy={config.remat_policy} names {turns} policies that take turns over the layers, and this model "
      f"repeats {odd[0]} layers, which is not a multiple of {turns}."
    )
  if execution.attention.order is not None and not spec.any_order:
    raise ConfigError(
      "context_parallel_load_balance=true reorders the tokens of a row, and this model has layers that need them in "
      "order: write context_parallel_load_balance=false."
    )
  return dataclasses.replace(execution, pipelines=pipelines(config, spec, execution))


def how(config: MaxTextConfig, mesh: Mesh) -> How:
  """How this configuration executes any model on a mesh."""
  c = config
  rules = sharding_rules(c, mesh)
  return How(
    mesh=mesh,
    rules=rules,
    dtype=c.dtype.value,
    weight_dtype=c.weight_dtype.value,
    precision=c.matmul_precision.value,
    activations_in_float32=c.activations_in_float32,
    logits_dot_in_float32=c.logits_dot_in_fp32,
    cast_logits_to_float32=c.cast_logits_to_fp32,
    attention=attention(c, mesh, rules.num_shards(mesh, "activation_length")),
    experts=dispatch(c, mesh),
    remat=remat(c),
    scan=c.scan_layers,
    init_scale=c.dense_init_scale,
    one_hot_embedding=c.use_iota_embed,
    cache_rounding=cache_rounding(c),
    cache_pages=cache_pages(c, mesh),
    cache_kernel=mesh.devices.flat[0].platform == "tpu",
    cache_block=cache_block(c, mesh),
  )


def sharding_rules(config: MaxTextConfig, mesh: Mesh) -> Rules:
  """The table from logical axes to mesh axes."""
  rules = Rules.parse(config.logical_axis_rules, config.mesh_axes)
  if not config.shard_exp_on_fsdp:
    return rules
  rules = rules.with_experts_over("fsdp")
  if config.num_experts % (parts := rules.num_shards(mesh, "expert")):
    raise ConfigError(
      f"shard_exp_on_fsdp=true splits the experts over {parts} devices, which does not divide "
      f"num_experts={config.num_experts}: choose another mesh, or leave it out."
    )
  return rules
