"""Which devices train a policy and which generate its rollouts, and the model of those that generate."""

from collections.abc import Sequence

import jax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import plural
from maxtext.configs.types import ShardMode
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.models.model import Model

Devices = list[jax.Device]
_FRACTIONS = ("trainer_devices_fraction", "sampler_devices_fraction")
_SLICES = ("num_trainer_slices", "num_samplers_slices")


def split_devices(config: MaxTextConfig, devices: Sequence[jax.Device]) -> tuple[Devices, Devices]:
  """Devices of the trainer and of the sampler: all for both, or the first ones and those behind them."""
  c = config
  by_slice = c.num_trainer_slices != -1
  if not by_slice and c.trainer_devices_fraction == c.sampler_devices_fraction == 1:
    return list(devices), list(devices)
  units = _by_slice(devices) if by_slice else [[device] for device in devices]
  names = _SLICES if by_slice else _FRACTIONS
  counts = {name: getattr(c, name) if by_slice else round(getattr(c, name) * len(units)) for name in names}
  if min(counts.values()) < 1 or sum(counts.values()) > len(units):
    written = " ".join(f"{name}={getattr(c, name):g}" for name in names)
    raise ConfigError(
      f"{written}: {plural(len(units), 'slice' if by_slice else 'device')} cannot be divided so; trainer and sampler "
      "need at least one each."
    )
  trainers, samplers = counts.values()
  parts = units[:trainers], units[trainers : trainers + samplers]
  trainer, sampler = ([device for unit in part for device in unit] for part in parts)
  return trainer, sampler


def sampler_model(config: MaxTextConfig, devices: Sequence[jax.Device]) -> Model:
  """The model of the trainer on the sampler's mesh, of `rollout_*_parallelism`."""
  c = config
  data, tensor, expert = c.rollout_data_parallelism, c.rollout_tensor_parallelism, c.rollout_expert_parallelism
  axes = {name: 1 for name in type(c).model_fields if name.endswith("_parallelism") and name[:4] in ("ici_", "dcn_")}
  axes |= {
    "ici_data_parallelism": data,
    "ici_tensor_parallelism": 1 if data == tensor == -1 else tensor,
    "ici_expert_parallelism": expert,
    "dcn_data_parallelism": -1,
  }
  own = {"shard_mode": ShardMode.AUTO, "parameter_memory_host_offload": False, "custom_mesh": "", "num_slices": -1}
  changed = c.model_copy(update=axes | own)
  try:
    mesh = make_mesh(changed, devices)
  except ConfigError:
    raise ConfigError(
      f"rollout_data_parallelism={data} rollout_tensor_parallelism={tensor} rollout_expert_parallelism={expert} do not "
      f"multiply to the {plural(len(devices), 'device')} that generate: one of the first two may be -1."
    ) from None
  return build_model(changed, mesh)


def _by_slice(devices: Sequence[jax.Device]) -> list[Devices]:
  found: dict[int, Devices] = {}
  for device in devices:
    found.setdefault(getattr(device, "slice_index", 0), []).append(device)
  return [found[number] for number in sorted(found)]
