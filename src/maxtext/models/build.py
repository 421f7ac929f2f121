"""From a configuration and a mesh to a model."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import ModuleType

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import tensors_placed
from maxtext.configs.refusals import remat_policies
from maxtext.configs.types import DecoderBlockType, RematLocation, RematPolicy, SplashAttention
from maxtext.kernels.attention import Attention, Kernel, SplashBlocks
from maxtext.layers.how import How, Remat
from maxtext.mesh.rules import Rules
from maxtext.models import llama
from maxtext.models.experts import check_experts, dispatch
from maxtext.models.model import Model

# Which file a family's spec and weight table are in.
FAMILIES: Mapping[DecoderBlockType, ModuleType] = {DecoderBlockType.LLAMA2: llama}


def build_model(config: MaxTextConfig, mesh: Mesh) -> Model:
  """The model of a run, abstract."""
  spec, execution = FAMILIES[config.decoder_block].spec(config), how(config, mesh)
  check_experts(config, spec)
  turns = len(execution.remat)
  if odd := [group.repeats for group in spec.groups if group.repeats % turns]:
    raise ConfigError(
      f"remat_policy={config.remat_policy} names {turns} policies that take turns over the layers, and this model "
      f"repeats {odd[0]} layers, which is not a multiple of {turns}."
    )
  return Model.of(spec, execution, _trained(config))


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
  return How(
    mesh=mesh,
    rules=Rules.parse(c.logical_axis_rules, c.mesh_axes),
    dtype=c.dtype.value,
    weight_dtype=c.weight_dtype.value,
    precision=c.matmul_precision.value,
    activations_in_float32=c.activations_in_float32,
    logits_dot_in_float32=c.logits_dot_in_fp32,
    cast_logits_to_float32=c.cast_logits_to_fp32,
    attention=Attention(_kernel(c, mesh, blocks), c.matmul_precision.value, blocks),
    experts=dispatch(c, mesh),
    remat=tuple(_remat(policy, c) for policy in remat_policies(c)),
    scan=c.scan_layers,
    init_scale=c.dense_init_scale,
  )


def _kernel(config: MaxTextConfig, mesh: Mesh, blocks: SplashBlocks) -> Kernel:
  platform = mesh.devices.flat[0].platform
  kernels = _KERNELS[config.attention]
  if platform not in kernels:
    raise ConfigError(f"attention={config.attention} does not run on {platform} devices: write attention=autoselected.")
  kernel = kernels[platform]
  if kernel == "splash":
    _check_splash(config, blocks)
  return kernel


def _check_splash(config: MaxTextConfig, blocks: SplashBlocks) -> None:
  length = config.max_target_length
  if length % 128:
    raise ConfigError(f"max_target_length={length} is not a multiple of 128, which the splash kernel needs.")
  for key, size in zip(SplashAttention.model_fields, dataclasses.astuple(blocks)[:-1], strict=False):
    if size < 128 or size % 128 or length % min(size, length):
      raise ConfigError(f"{key}={size} must be a multiple of 128 that divides max_target_length={length}.")


_PLATFORMS = ("tpu", "gpu", "cuda", "cpu")
_FAST: Mapping[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
_KERNELS: Mapping[str, Mapping[str, Kernel]] = {
  "autoselected": {"cpu": "chunked", **_FAST},
  "dot_product": dict.fromkeys(_PLATFORMS, "dot_product"),
  "chunked": dict.fromkeys(_PLATFORMS, "chunked"),
  "flash": _FAST,
  "cudnn_flash_jax": {name: kernel for name, kernel in _FAST.items() if kernel == "cudnn"},
}

_QKV = ("query_proj", "key_proj", "value_proj")
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
