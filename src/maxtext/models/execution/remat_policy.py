"""From keys to rematerialisation: which tensors of a layer are saved for the backward pass, and where."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import tensors_at
from maxtext.configs.types import RematLocation, RematPolicy
from maxtext.configs.values import remat_policies
from maxtext.layers.execution import RematSpec

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
_MATMULS = (*_QKV, "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", *_EXPERTS)

_REMAT = {
  RematPolicy.FULL: RematSpec(),
  RematPolicy.MINIMAL: RematSpec(saved=_MATMULS),
  RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP: RematSpec(saved=(*_QKV, "context", "out_proj")),
  RematPolicy.SAVE_DOT_EXCEPT_MLPWI: RematSpec(saved=(*_QKV, "out_proj", "mlpwo", "moe_mlpwo")),
  RematPolicy.SAVE_DOT_EXCEPT_MLP: RematSpec(saved=(*_QKV, "out_proj")),
  RematPolicy.SAVE_QKV_PROJ: RematSpec(saved=_QKV),
  RematPolicy.QKV_PROJ_OFFLOADED: RematSpec(offloaded=_QKV),
  RematPolicy.MINIMAL_OFFLOADED: RematSpec(offloaded=_MATMULS),
  RematPolicy.SAVE_OUT_PROJ: RematSpec(saved=("out_proj",)),
}


def remat(config: MaxTextConfig) -> tuple[RematSpec, ...]:
  """What layers save. With several policies, layers alternate between them."""
  return tuple(_remat_spec(config, policy) for policy in remat_policies(config.remat_policy))


def tower_remat(config: MaxTextConfig) -> RematSpec:
  """What the layers of towers save."""
  names = [policy.value for policy in RematPolicy]
  if config.remat_policy_for_vit not in names:
    raise ConfigError(f"remat_policy_for_vit={config.remat_policy_for_vit} is not one of {', '.join(names)}.")
  return _remat_spec(config, RematPolicy(config.remat_policy_for_vit))


def _remat_spec(config: MaxTextConfig, policy: RematPolicy) -> RematSpec:
  if policy is not RematPolicy.CUSTOM:
    return _REMAT[policy]
  saved, offloaded = (tensors_at(config, place) for place in (RematLocation.DEVICE, RematLocation.OFFLOAD))
  return RematSpec(tuple(saved), tuple(offloaded))
