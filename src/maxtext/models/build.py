"""From a configuration and a mesh to a model."""

import dataclasses
import pkgutil
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs import types as t
from maxtext.configs.derived import scaled_sizes
from maxtext.configs.refusals import default_of, keys_without_effect, plain
from maxtext.configs.types import DecoderBlockType, KvQuantAxis
from maxtext.layers.cache import Rounding
from maxtext.layers.how import How
from maxtext.mesh.rules import Rules
from maxtext.models import families
from maxtext.models.attention import attention, cache_pages, check_attention
from maxtext.models.experts import check_experts, dispatch
from maxtext.models.features import with_features
from maxtext.models.model import Model
from maxtext.models.remat import remat
from maxtext.models.spec import DecoderSpec
from maxtext.models.stages import pipelines
from maxtext.models.weight_table import Table

# Every file in `families` is one; it bears the name that decoder_block gives it.
FAMILIES: Mapping[DecoderBlockType, ModuleType] = {
  DecoderBlockType(module.name): import_module(f"{families.__name__}.{module.name}")
  for module in pkgutil.iter_modules(families.__path__)
}

# Sections that describe a model: what of them its family does not read has no effect on it.
_DESCRIBES_A_MODEL = (
  t.ModelArchitecture, t.Attention, t.MlaAttention, t.AttentionIndexer, t.Llama4Attention, t.DeepSeekMoE, t.Qwen3Next,
  t.PositionalEmbedding, t.Rope, t.YarnRope,
)  # fmt: skip
_DESCRIBES_EXPERTS = {"moe_expert_input_dim", "base_moe_mlp_dim", "interleave_moe_layer_step", "norm_topk_prob"}


def build_model(config: MaxTextConfig, mesh: Mesh) -> Model:
  """The model of a run, abstract."""
  spec, execution = model_spec(config), how(config, mesh)
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
  execution = dataclasses.replace(execution, pipelines=pipelines(config, spec, execution))
  return Model.of(spec, execution, _trained(config))


def abstract_model(config: MaxTextConfig) -> Model:
  """The model alone, for who never runs it: nothing that a mesh or a kernel would need is looked at."""
  mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
  return Model.of(model_spec(config), How(mesh, _rules(config, mesh), weight_dtype=config.weight_dtype.value))


def model_spec(config: MaxTextConfig) -> DecoderSpec:
  """What a configuration describes; a key that says something about a model and that its family does not read is
  refused."""
  reader = _Reader(config.model_copy(update=scaled_sizes(config)))
  read = cast(MaxTextConfig, reader)
  spec = with_features(read, FAMILIES[config.decoder_block].spec(read))
  keys = _DESCRIBES_EXPERTS.union(*(section.model_fields for section in _DESCRIBES_A_MODEL))
  unread = keys - reader.read - _READ_ELSEWHERE
  for key in sorted(unread - keys_without_effect(config, unread).keys()):
    value = getattr(config, key)
    if value != default_of(key):
      raise ConfigError(
        f"{key}={plain(value)} has no effect here, on decoder_block={config.decoder_block.value}: leave it out."
      )
  return spec


def weight_table(config: MaxTextConfig, spec: DecoderSpec) -> Table:
  """The names of a model's weights in Hugging Face files."""
  family = FAMILIES[config.decoder_block]
  return family.weights(spec) if hasattr(family, "weights") else family.WEIGHTS


class _Reader:
  """A configuration that remembers what was read of it."""

  def __init__(self, config: MaxTextConfig) -> None:
    self._config, self.read = config, set[str]()

  def __getattr__(self, key: str) -> Any:
    self.read.add(key)
    return getattr(self._config, key)


# What describes how a model runs, or is checked when a configuration is loaded.
_READ_ELSEWHERE = {
  "decoder_block", "dense_init_scale", "attention", "use_ragged_attention", "ragged_block_size", "use_iota_embed",
  "max_position_embeddings", "qk_clip_threshold", "global_parameter_scale",
}  # fmt: skip


def _trained(config: MaxTextConfig) -> Callable[[str], bool]:
  patterns = [re.compile(pattern) for pattern in config.trainable_parameters_mask]
  return lambda path: not patterns or any(pattern.search(path) for pattern in patterns)


def how(config: MaxTextConfig, mesh: Mesh) -> How:
  """How this configuration executes any model on a mesh."""
  c = config
  rules = _rules(c, mesh)
  return How(
    mesh=mesh,
    rules=rules,
    dtype=c.dtype.value,
    weight_dtype=c.weight_dtype.value,
    precision=c.matmul_precision.value,
    activations_in_float32=c.activations_in_float32,
    logits_dot_in_float32=c.logits_dot_in_fp32,
    cast_logits_to_float32=c.cast_logits_to_fp32,
    attention=attention(c, mesh, rules.parts(mesh, "activation_length")),
    experts=dispatch(c, mesh),
    remat=remat(c),
    scan=c.scan_layers,
    init_scale=c.dense_init_scale,
    one_hot_embedding=c.use_iota_embed,
    cache_rounding=_cache_rounding(c),
    cache_pages=cache_pages(c, mesh),
    cache_kernel=mesh.devices.flat[0].platform == "tpu",
    cache_block=c.ragged_block_size if c.use_ragged_attention else _CACHE_BLOCKS.get(mesh.devices.flat[0].platform),
  )


def _rules(config: MaxTextConfig, mesh: Mesh) -> Rules:
  rules = Rules.parse(config.logical_axis_rules, config.mesh_axes)
  if not config.shard_exp_on_fsdp:
    return rules
  rules = rules.experts_over("fsdp")
  if config.num_experts % (parts := rules.parts(mesh, "expert")):
    raise ConfigError(
      f"shard_exp_on_fsdp=true splits the experts over {parts} devices, which does not divide "
      f"num_experts={config.num_experts}: choose another mesh, or leave it out."
    )
  return rules


# Many small products are slow where starting one takes longer than reading what it reads.
_CACHE_BLOCKS = {"cpu": 32}

_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}


def _cache_rounding(config: MaxTextConfig) -> Rounding | None:
  if not config.quantize_kvcache:
    return None
  return Rounding(_BITS[config.kv_quant_dtype], per_head=config.kv_quant_axis is KvQuantAxis.DKV)
