"""The learning rate over a run."""

from collections.abc import Callable, Mapping

import optax

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import LearningRateScheduleType, WsdDecayStyle


def learning_rate(config: MaxTextConfig) -> optax.Schedule:
  """A linear rise, then what `lr_schedule_type` says, down to the final fraction, which is then kept."""
  steps = config.learning_rate_schedule_steps
  steps = config.steps if steps == -1 else steps
  warmup = int(config.warmup_steps_fraction * steps)
  rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
  rest = _AFTER_WARMUP[config.lr_schedule_type](config, steps, max(steps - warmup, 1))
  return optax.join_schedules([rise, rest], [warmup])


def _cosine(c: MaxTextConfig, steps: int, left: int) -> optax.Schedule:
  return optax.cosine_decay_schedule(c.learning_rate, left, alpha=c.learning_rate_final_fraction)


def _warmup_stable_decay(c: MaxTextConfig, steps: int, left: int) -> optax.Schedule:
  decay = min(max(int(c.wsd_decay_steps_fraction * steps), 1), left)
  final = c.learning_rate * c.learning_rate_final_fraction
  fall = {
    WsdDecayStyle.LINEAR: optax.linear_schedule(c.learning_rate, final, decay),
    WsdDecayStyle.COSINE: optax.cosine_decay_schedule(c.learning_rate, decay, alpha=c.learning_rate_final_fraction),
  }
  return optax.join_schedules([optax.constant_schedule(c.learning_rate), fall[c.wsd_decay_style]], [left - decay])


_AFTER_WARMUP: Mapping[LearningRateScheduleType, Callable[[MaxTextConfig, int, int], optax.Schedule]] = {
  LearningRateScheduleType.COSINE: _cosine,
  LearningRateScheduleType.WSD: _warmup_stable_decay,
}
