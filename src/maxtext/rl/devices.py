"""Which devices train a policy and which generate its rollouts, and the model of those that generate."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import plural
from maxtext.configs.types import ShardMode
from maxtext.logs import readable_size
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.memory import device_memory, host_memory
from maxtext.models.build import build_model
from maxtext.models.model import Model
from maxtext.rl.engines import process_part
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device

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


def process_model(config: MaxTextConfig, mesh: Mesh) -> Model:
  """The model of the trainer on the part of its mesh that this process has.

  Raises:
    ConfigError: its devices are no part of that mesh.
  """
  return build_model(config, Mesh(process_part(mesh, jax.process_index()), mesh.axis_names))


def check_room(config: MaxTextConfig, program: Program, model: Model) -> None:
  """Raises where the devices of a process cannot hold all parameters beside their part of the trainer's state."""
  devices, state = model.execution.sharding.mesh.local_devices, bytes_per_device((program.state, program.frozen))
  copies = config.off_policy_steps + 1 if config.use_agentic_rollout else 1
  own = bytes_per_device(model.params | model.buffers) * copies
  is_cpu = devices[0].platform == "cpu"
  count, there = (len(devices), host_memory()) if is_cpu else (1, device_memory(devices[0]))
  if there and count * (state + own) > there:
    raise ConfigError(
      f"{config.model_name}: every process generates with all parameters on its {plural(len(devices), 'device')}. They "
      f"take {readable_size(count * own)} beside {readable_size(count * state)} of the trainer's, and "
      f"{'this host' if is_cpu else 'a device'} has {readable_size(there)}: take more devices a process, a smaller "
      f"model, or lora_rank."
    )


def _by_slice(devices: Sequence[jax.Device]) -> list[Devices]:
  found: dict[int, Devices] = {}
  for device in devices:
    found.setdefault(getattr(device, "slice_index", 0), []).append(device)
  return [found[number] for number in sorted(found)]
