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
from maxtext.configs.derived import scaled_sizes, tensors_placed
from maxtext.configs.refusals import default_of, plain, remat_policies
from maxtext.configs.types import (
  DecoderBlockType,
  KvQuantAxis,
  RematLocation,
  RematPolicy,
  ReorderStrategy,
  SplashAttention,
)
from maxtext.kernels.attention import Attention, Kernel
from maxtext.kernels.splash import SplashBlocks
from maxtext.kernels.token_order import TokenOrder
from maxtext.layers.cache import Rounding
from maxtext.layers.how import How, Remat
from maxtext.mesh.rules import Rules
from maxtext.models import families
from maxtext.models.experts import check_experts, dispatch
from maxtext.models.features import with_features
from maxtext.models.model import Model
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
  _check_kernel(config, spec, execution.attention.kernel)
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
  for key in sorted(keys - reader.read - _READ_ELSEWHERE):
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
  "decoder_block", "dense_init_scale", "attention", "use_iota_embed", "max_position_embeddings", "qk_clip_threshold",
  "global_parameter_scale",
}  # fmt: skip


def _trained(config: MaxTextConfig) -> Callable[[str], bool]:
  patterns = [re.compile(pattern) for pattern in config.trainable_parameters_mask]
  return lambda path: not patterns or any(pattern.search(path) for pattern in patterns)


def how(config: MaxTextConfig, mesh: Mesh) -> How:
  """How this configuration executes any model on a mesh."""
  c = config
  blocks = SplashBlocks(
    c.sa_block_q,
    c.sa_block_kv,
    c.sa_block_kv_compute,
    c.sa_block_q_dkv,
    c.sa_block_kv_dkv,
    c.sa_block_kv_dkv_compute,
    c.sa_block_q_dq,
    c.sa_block_kv_dq,
    c.sa_use_fused_bwd_kernel,
  )
  rules = _rules(c, mesh)
  parts = rules.parts(mesh, "activation_length")
  return How(
    mesh=mesh,
    rules=rules,
    dtype=c.dtype.value,
    weight_dtype=c.weight_dtype.value,
    precision=c.matmul_precision.value,
    activations_in_float32=c.activations_in_float32,
    logits_dot_in_float32=c.logits_dot_in_fp32,
    cast_logits_to_float32=c.cast_logits_to_fp32,
    attention=Attention(
      _kernel(c, mesh, blocks, parts),
      c.matmul_precision.value,
      blocks,
      c.context_parallel_strategy == "ring",
      _order(c, mesh, parts),
    ),
    experts=dispatch(c, mesh),
    remat=tuple(_remat(policy, c) for policy in remat_policies(c)),
    scan=c.scan_layers,
    init_scale=c.dense_init_scale,
    one_hot_embedding=c.use_iota_embed,
    cache_rounding=_cache_rounding(c),
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


def _cache_rounding(config: MaxTextConfig) -> Rounding | None:
  if not config.quantize_kvcache:
    return None
  return Rounding(_BITS[config.kv_quant_dtype], per_head=config.kv_quant_axis is KvQuantAxis.DKV)


def _order(config: MaxTextConfig, mesh: Mesh, parts: int) -> TokenOrder | None:
  """The order of tokens in rows that are split, where the parts are to have the same work."""
  c = config
  if c.max_target_length % parts:
    raise ConfigError(f"max_target_length={c.max_target_length} cannot be split over {parts} devices in equal parts.")
  if mesh.shape.get("context", 1) == 1 or not c.context_parallel_load_balance:
    return None
  ring, asked = c.context_parallel_strategy == "ring", c.context_parallel_reorder_strategy
  striped = ring if asked is ReorderStrategy.AUTO else asked is ReorderStrategy.STRIPED
  order = TokenOrder("striped" if striped else "dual_chunk_swap", parts)
  if c.max_target_length % order.divisor:
    raise ConfigError(
      f"max_target_length={c.max_target_length} is not a multiple of {order.divisor}, which "
      f"context_parallel_load_balance=true needs to deal {parts} equal parts."
    )
  return order


def _kernel(config: MaxTextConfig, mesh: Mesh, blocks: SplashBlocks, parts: int) -> Kernel:
  platform = mesh.devices.flat[0].platform
  kernels = _KERNELS[config.attention]
  if platform not in kernels:
    raise ConfigError(f"attention={config.attention} does not run on {platform} devices: write attention=autoselected.")
  kernel = kernels[platform]
  if parts > 1 and (kernel == "cudnn" or (kernel == "splash" and config.context_parallel_strategy == "ring")):
    raise ConfigError(
      f"attention={config.attention}: {kernel} attention cannot take rows split over {parts} devices by "
      f"context_parallel_strategy={config.context_parallel_strategy}: write attention=chunked."
    )
  if kernel == "splash":
    _check_splash(config, blocks, parts)
  return kernel


def _check_kernel(config: MaxTextConfig, spec: DecoderSpec, kernel: Kernel) -> None:
  """cuDNN has neither soft caps, nor chunks, nor sinks."""
  mixers = [block.mixer for group in spec.groups for block in group.cycle]
  lacking = {
    "attn_logits_soft_cap": any(getattr(mixer, "cap", None) for mixer in mixers),
    "chunk_attn_window_size": any(getattr(mixer, "chunked", False) for mixer in mixers),
    "attention_sink": any(getattr(mixer, "sinks", False) for mixer in mixers),
  }
  for key, needed in lacking.items():
    if needed and kernel == "cudnn":
      raise ConfigError(f"{key}={getattr(config, key)}: cuDNN attention cannot do it; write attention=chunked.")


def _check_splash(config: MaxTextConfig, blocks: SplashBlocks, parts: int) -> None:
  length = config.max_target_length
  if length % (128 * parts):
    raise ConfigError(
      f"max_target_length={length} is not a multiple of {128 * parts}, 128 for each device that has a part of a row, "
      "which the splash kernel needs."
    )
  for key, size in zip(SplashAttention.model_fields, dataclasses.astuple(blocks)[:-1], strict=False):
    own = length // parts if "block_q" in key else length
    if size < 128 or size % 128 or own % min(size, own):
      raise ConfigError(
        f"{key}={size} must be a multiple of 128 that divides {own}, "
        f"max_target_length={length} over {length // own} devices."
      )


_PLATFORMS = ("tpu", "gpu", "cuda", "cpu")
_FAST: Mapping[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
_KERNELS: Mapping[str, Mapping[str, Kernel]] = {
  "autoselected": {"cpu": "chunked", **_FAST},
  "dot_product": dict.fromkeys(_PLATFORMS, "dot_product"),
  "chunked": dict.fromkeys(_PLATFORMS, "chunked"),
  "flash": _FAST,
  "cudnn_flash_jax": {name: kernel for name, kernel in _FAST.items() if kernel == "cudnn"},
}

_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
_PRODUCTS = (*_QKV, "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", *_EXPERTS)

_REMAT = {
  RematPolicy.FULL: Remat(),
  RematPolicy.MINIMAL: Remat(saved=_PRODUCTS),
  RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP: Remat(saved=(*_QKV, "context", "out_proj")),
  RematPolicy.SAVE_DOT_EXCEPT_MLPWI: Remat(saved=(*_QKV, "out_proj", "mlpwo", "moe_mlpwo")),
  RematPolicy.SAVE_DOT_EXCEPT_MLP: Remat(saved=(*_QKV, "out_proj")),
  RematPolicy.SAVE_QKV_PROJ: Remat(saved=_QKV),
  RematPolicy.QKV_PROJ_OFFLOADED: Remat(offloaded=_QKV),
  RematPolicy.MINIMAL_OFFLOADED: Remat(offloaded=_PRODUCTS),
  RematPolicy.SAVE_OUT_PROJ: Remat(saved=("out_proj",)),
}


def _remat(policy: RematPolicy, config: MaxTextConfig) -> Remat:
  if policy is not RematPolicy.CUSTOM:
    return _REMAT[policy]
  saved, offloaded = (tensors_placed(config, place) for place in (RematLocation.DEVICE, RematLocation.OFFLOAD))
  return Remat(tuple(saved), tuple(offloaded))
