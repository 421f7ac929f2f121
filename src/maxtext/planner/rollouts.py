"""What an update of policy optimization takes beside its training: rollouts, the transfer of parameters, waiting.

The decode step is the engine's own, compiled for the devices that generate; its time is that of the schedule, and at
least that of the bytes which it moves. Answers are taken to be as long as they may be, and prompts to be prefilled at
`_PREFILL` of the chip's peak. No published run has calibrated this.
"""

from dataclasses import asdict, dataclass
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.inference.as_read import as_read
from maxtext.inference.engine import dropless
from maxtext.mesh.topology import Topology
from maxtext.models.flops import train_flops_per_token
from maxtext.planner.calibration import CALIBRATION
from maxtext.planner.decode_step import compiled_decode_step
from maxtext.planner.estimate import estimate
from maxtext.planner.schedule import schedule
from maxtext.rl.devices import sampler_model, split_devices
from maxtext.rl.engines import copies_on_sampler, engine_slots, generates_ahead
from maxtext.training.live_engine import engine_problem, slots_on
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device, total_bytes

_PREFILL = 0.5
_FORWARD = 1 / 3  # of the operations of training


@dataclass(frozen=True)
class RolloutPlan:
  """The rollouts of one batch, and the time of everything that follows from them.

  Attributes:
    answers: of a batch.
    slots: answers that are generated at once.
    answer_tokens: of the longest answer.
    devices: that generate.
    separate_devices: whether they are others than those that train.
    overlaps: whether they generate while the others train.
    weights: bytes of parameters on one of them.
    cache: bytes of the KV cache on one of them.
    needed_bytes: on one of them while it generates; where devices are shared, those of training are beside them.
    memory_bytes: that one of them has.
    decode_step_seconds: of one token of every slot.
    prefill_seconds: of all prompts.
    seconds: of all rollouts of a batch.
    sync_bytes: of parameters that are sent to one device that generates, or to the sampler's process.
    sync_seconds: of sending them.
    update_seconds: of training with the batch, all its updates.
  """

  answers: int
  slots: int
  answer_tokens: int
  devices: int
  separate_devices: bool
  overlaps: bool
  weights: int
  cache: int
  needed_bytes: int
  memory_bytes: int
  decode_step_seconds: float
  prefill_seconds: float
  seconds: float
  sync_bytes: int
  sync_seconds: float
  update_seconds: float

  @property
  def fits(self) -> bool:
    """Whether what generates has the memory."""
    return self.needed_bytes <= self.memory_bytes

  @property
  def batch_seconds(self) -> float:
    """From one batch to the next."""
    working = max(self.seconds, self.update_seconds) if self.overlaps else self.seconds + self.update_seconds
    return working + self.sync_seconds

  @property
  def trainer_idle(self) -> float:
    """The share of the time in which the devices that train do not."""
    return 1 - self.update_seconds / self.batch_seconds

  @property
  def sampler_idle(self) -> float:
    """The share of the time in which the devices that generate do not."""
    return 1 - self.seconds / self.batch_seconds

  def as_json(self) -> dict[str, Any]:
    """As JSON values."""
    return asdict(self) | {
      "fits": self.fits,
      "batch_seconds": self.batch_seconds,
      "trainer_idle": self.trainer_idle,
      "sampler_idle": self.sampler_idle,
    }


def plan_rollouts(
  config: MaxTextConfig, topology: Topology, program: Program, step_seconds: float, train_peak: int
) -> RolloutPlan:
  """The rollouts of a batch on the devices of a topology, for a trainer whose step takes so long and so much memory.

  Raises:
    ConfigError: the engine cannot run the trainer's model on its mesh.
  """
  c, chip, calibration = config, topology.chip, CALIBRATION[topology.name]
  trainer, sampler = split_devices(c, topology.devices())
  apart = bool(c.sampler_address) or trainer != sampler
  if not apart and (problem := engine_problem(program)):
    raise ConfigError(f"use_grpo=true: rollouts cannot be generated there: {problem}")
  model = dropless(sampler_model(c, sampler) if apart else program.model)
  slots = slots_on(len(sampler), engine_slots(c))
  read = as_read(model)
  step = compiled_decode_step(model, slots, c.max_target_length, read)
  stored = model.params | model.buffers
  narrowed = bytes_per_device([struct for path, struct in read.items() if struct.dtype != stored[path].dtype])
  scheduled = estimate(schedule(step.program, topology, model.execution.sharding.mesh), calibration).seconds
  decode_step = max(scheduled, step.moved / (chip.hbm_bandwidth / chip.devices))
  answers, tokens = c.batch_size * c.num_generations, c.max_target_length - c.max_prefill_predict_length
  flops = train_flops_per_token(model, c.max_prefill_predict_length) * _FORWARD * c.batch_size
  peak = chip.flops / chip.devices * len(sampler) * _PREFILL
  prefill = flops * c.max_prefill_predict_length / peak
  weights = bytes_per_device(stored)
  copies = copies_on_sampler(c) if apart or generates_ahead(c) else 0
  sent, speed = weights, chip.link_bandwidth * calibration.link
  if c.sampler_address:  # from one device to one device
    sent, speed = total_bytes(stored), calibration.between_slices
  return RolloutPlan(
    answers=answers,
    slots=slots,
    answer_tokens=tokens,
    devices=len(sampler),
    separate_devices=apart,
    overlaps=apart and generates_ahead(c),
    weights=weights,
    cache=step.cache,
    needed_bytes=step.cache + step.temporary + narrowed + copies * weights + (0 if apart else train_peak),
    memory_bytes=chip.hbm_bytes // chip.devices,
    decode_step_seconds=decode_step,
    prefill_seconds=prefill,
    seconds=prefill + -(-answers // slots) * tokens * decode_step,
    sync_bytes=sent if apart else 0,
    sync_seconds=sent / speed if apart else 0.0,
    update_seconds=step_seconds * c.num_iterations,
  )
