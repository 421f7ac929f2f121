"""The learning rate over a run."""

import optax

from maxtext.configs import MaxTextConfig


def learning_rate(config: MaxTextConfig) -> optax.Schedule:
  """A linear rise, then half a cosine down to the final fraction, which is then kept."""
  steps = config.learning_rate_schedule_steps
  steps = config.steps if steps == -1 else steps
  peak, warmup = config.learning_rate, int(config.warmup_steps_fraction * steps)
  decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.learning_rate_final_fraction)
  return optax.join_schedules([optax.linear_schedule(0.0, peak, max(warmup, 1)), decay], [warmup])
