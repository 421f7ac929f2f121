"""From keys to rematerialisation: which tensors of a layer are kept for the backward pass, and where."""

from maxtext.configs import MaxTextConfig
from maxtext.configs.derived import tensors_at
from maxtext.configs.types import RematLocation, RematPolicy
from maxtext.configs.values import remat_policies
from maxtext.layers.how import Remat

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


def remat(config: MaxTextConfig) -> tuple[Remat, ...]:
  """What the layers keep, which take turns where several policies are named."""
  return tuple(_kept(config, policy) for policy in remat_policies(config.remat_policy))


def _kept(config: MaxTextConfig, policy: RematPolicy) -> Remat:
  if policy is not RematPolicy.CUSTOM:
    return _REMAT[policy]
  saved, offloaded = (tensors_at(config, place) for place in (RematLocation.DEVICE, RematLocation.OFFLOAD))
  return Remat(tuple(saved), tuple(offloaded))
