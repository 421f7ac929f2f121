"""The learning rate over a run."""

from collections.abc import Callable, Mapping

import optax

from maxtext.configs.types import LearningRateScheduleType, WsdDecayStyle
from maxtext.optim.options import ScheduleOptions


def learning_rate(options: ScheduleOptions) -> optax.Schedule:
  """A linear warm-up, then the decay of the schedule's kind to the final fraction, which stays from there on."""
  warmup = int(options.warmup_fraction * options.steps)
  rise = optax.linear_schedule(0.0, options.peak, max(warmup, 1))
  rest = _AFTER_WARMUP[options.kind](options, max(options.steps - warmup, 1))
  return optax.join_schedules([rise, rest], [warmup])


def _cosine(o: ScheduleOptions, left: int) -> optax.Schedule:
  return optax.cosine_decay_schedule(o.peak, left, alpha=o.final_fraction)


def _warmup_stable_decay(o: ScheduleOptions, left: int) -> optax.Schedule:
  decay = min(max(int(o.decay_fraction * o.steps), 1), left)
  fall = {
    WsdDecayStyle.LINEAR: optax.linear_schedule(o.peak, o.peak * o.final_fraction, decay),
    WsdDecayStyle.COSINE: optax.cosine_decay_schedule(o.peak, decay, alpha=o.final_fraction),
  }
  return optax.join_schedules([optax.constant_schedule(o.peak), fall[o.decay_style]], [left - decay])


_AFTER_WARMUP: Mapping[LearningRateScheduleType, Callable[[ScheduleOptions, int], optax.Schedule]] = {
  LearningRateScheduleType.COSINE: _cosine,
  LearningRateScheduleType.WSD: _warmup_stable_decay,
}
