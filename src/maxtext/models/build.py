"""From a configuration and a mesh to a model."""

from collections.abc import Mapping
from types import ModuleType

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.checks import remat_policies
from maxtext.configs.types import DecoderBlockType, RematAndOffload, RematLocation, RematPolicy
from maxtext.kernels.attention import Attention, SplashBlocks, choose_kernel
from maxtext.layers.how import How, Remat
from maxtext.mesh.rules import Rules
from maxtext.models import llama
from maxtext.models.model import Model

FAMILIES: Mapping[DecoderBlockType, ModuleType] = {DecoderBlockType.LLAMA2: llama}


def build_model(config: MaxTextConfig, mesh: Mesh) -> Model:
  """The model of a run, abstract."""
  return Model.of(FAMILIES[config.decoder_block].spec(config), how(config, mesh))


def how(config: MaxTextConfig, mesh: Mesh) -> How:
  """How this configuration executes any model on a mesh."""
  c = config
  try:
    kernel = choose_kernel(c.attention, mesh.devices.flat[0].platform)
  except ValueError as error:
    raise ConfigError(f"{error}.") from None
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
    attention=Attention(kernel, c.matmul_precision.value, blocks),
    remat=tuple(_remat(policy, c) for policy in remat_policies(c)),
    scan=c.scan_layers,
    init_scale=c.dense_init_scale,
  )


_QKV = ("query_proj", "key_proj", "value_proj")
_PRODUCTS = (*_QKV, "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")

_REMAT = {
  RematPolicy.FULL: Remat(),
  RematPolicy.MINIMAL: Remat(saved=_PRODUCTS),
  RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP: Remat(saved=(*_QKV, "context", "out_proj")),
  RematPolicy.SAVE_DOT_EXCEPT_MLPWI: Remat(saved=(*_QKV, "out_proj", "mlpwo")),
  RematPolicy.SAVE_DOT_EXCEPT_MLP: Remat(saved=(*_QKV, "out_proj")),
  RematPolicy.SAVE_QKV_PROJ: Remat(saved=_QKV),
  RematPolicy.QKV_PROJ_OFFLOADED: Remat(offloaded=_QKV),
  RematPolicy.MINIMAL_OFFLOADED: Remat(offloaded=_PRODUCTS),
  RematPolicy.SAVE_OUT_PROJ: Remat(saved=("out_proj",)),
}


def _remat(policy: RematPolicy, config: MaxTextConfig) -> Remat:
  if policy is not RematPolicy.CUSTOM:
    return _REMAT[policy]

  def names(place: RematLocation) -> tuple[str, ...]:
    return tuple(n for n in RematAndOffload.model_fields if getattr(config, n) is place)

  return Remat(names(RematLocation.DEVICE), names(RematLocation.OFFLOAD))
