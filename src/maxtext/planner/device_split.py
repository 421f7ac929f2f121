"""The division of devices among trainer and sampler with which policy optimization is planned to be fastest."""

from collections.abc import Callable
from pathlib import Path

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.planner.plan import Plan, plan

Keys = dict[str, float]
_GIB = 2**30
_TRAINER_SHARES = (0.25, 0.5, 0.75)


def search_device_split(
  config: MaxTextConfig, config_name: str, cache: Path | None, report: Callable[[str], None]
) -> tuple[Keys, Plan]:
  """Plans the run with all devices shared and with several divisions, and returns the fastest that fits.

  Raises:
    ConfigError: none fits, or the devices are divided already.
  """
  for key, unset in (("sampler_address", ""), ("num_trainer_slices", -1)):
    if getattr(config, key) != unset:
      raise ConfigError(f"--search divides the devices, and {key}={getattr(config, key)} has done so: leave it out.")
  best: tuple[float, Keys, Plan] | None = None
  for trainer, sampler in ((1.0, 1.0), *((share, 1 - share) for share in _TRAINER_SHARES)):
    keys = {"trainer_devices_fraction": trainer, "sampler_devices_fraction": sampler}
    try:
      found = plan(config.model_copy(update=keys), config_name=config_name, cache=cache)
    except ConfigError as error:
      report(f"not possible  {_shown(keys)}: {error}")
      continue
    report(_line(keys, found))
    rollouts = found.rollouts
    if rollouts and found.fits and (best is None or rollouts.batch_seconds < best[0]):
      best = rollouts.batch_seconds, keys, found
  if best is None:
    raise ConfigError(
      "--search: no division of these devices fits: more chips, or fewer answers at once (max_num_seqs)."
    )
  return best[1:]


def _line(keys: Keys, found: Plan) -> str:
  rollouts = found.rollouts
  if rollouts is None or not found.fits:
    return f"does not fit  {_shown(keys)}"
  memory = f"{found.memory.peak / _GIB:.1f} and {rollouts.needed_bytes / _GIB:.1f} GiB"
  idle = f"trainer idle {rollouts.trainer_idle:.0%}, sampler idle {rollouts.sampler_idle:.0%}"
  return f"{rollouts.batch_seconds:9.2f} s a batch  {idle}  {memory}  {_shown(keys)}"


def _shown(keys: Keys) -> str:
  return " ".join(f"{key}={value:g}" for key, value in keys.items())
