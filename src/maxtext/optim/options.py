"""What optimizers and schedules need of a run's configuration. This module alone reads its keys for them."""

from dataclasses import dataclass

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import LearningRateScheduleType, OptimizerType, WsdDecayStyle


@dataclass(frozen=True)
class ScheduleOptions:
  """The learning rate over a run.

  Attributes:
    kind: what follows the rise.
    peak: the largest rate.
    final_fraction: of the peak, at the end.
    steps: the whole schedule's.
    warmup_fraction: of the steps, in which the rate rises.
    decay_fraction: of the steps, in which it falls; for warmup-stable-decay.
    decay_style: how it falls then.
  """

  kind: LearningRateScheduleType
  peak: float
  final_fraction: float
  steps: int
  warmup_fraction: float
  decay_fraction: float
  decay_style: WsdDecayStyle


@dataclass(frozen=True)
class AdamOptions:
  """Decay of both moments, what is added to the root of the second and under it, and decoupled weight decay."""

  b1: float
  b2: float
  eps: float
  eps_root: float
  weight_decay: float


@dataclass(frozen=True)
class MuonOptions:
  """Decay of the momentum, weight decay of matrices, and the update's size; None scales it by the matrix's shape."""

  beta: float
  weight_decay: float
  consistent_rms: float | None


@dataclass(frozen=True)
class SpikeOptions:
  """Updates that are left out: more than so many deviations above the mean of so many recent steps."""

  interval: int
  deviations: float


@dataclass(frozen=True)
class OptimizerOptions:
  """The update rule.

  Attributes:
    kind: which it is.
    schedule: of the learning rate.
    adam: of Adam, also where Muon leaves parameters to it.
    muon: of Muon.
    moment_dtype: of the first moment. Always named: left open, it would follow the gradients after the first step.
    undecayed: patterns of the paths of parameters without weight decay.
    spikes: which updates are left out; None leaves out none.
  """

  kind: OptimizerType
  schedule: ScheduleOptions
  adam: AdamOptions
  muon: MuonOptions
  moment_dtype: str
  undecayed: tuple[str, ...]
  spikes: SpikeOptions | None


def schedule_options(config: MaxTextConfig) -> ScheduleOptions:
  """From a run's keys."""
  c, steps = config, config.learning_rate_schedule_steps
  return ScheduleOptions(
    kind=c.lr_schedule_type,
    peak=c.learning_rate,
    final_fraction=c.learning_rate_final_fraction,
    steps=c.steps if steps == -1 else steps,
    warmup_fraction=c.warmup_steps_fraction,
    decay_fraction=c.wsd_decay_steps_fraction,
    decay_style=c.wsd_decay_style,
  )


def optimizer_options(config: MaxTextConfig) -> OptimizerOptions:
  """From a run's keys."""
  c = config
  return OptimizerOptions(
    kind=c.opt_type,
    schedule=schedule_options(c),
    adam=AdamOptions(c.adam_b1, c.adam_b2, c.adam_eps, c.adam_eps_root, c.adam_weight_decay),
    muon=MuonOptions(c.muon_beta, c.muon_weight_decay, c.muon_consistent_rms),
    moment_dtype=c.mu_dtype or c.weight_dtype.value,
    undecayed=tuple(c.adamw_mask),
    spikes=SpikeOptions(c.skip_step_interval, c.skip_step_scaling_factor) if c.skip_step_on_spikes else None,
  )
