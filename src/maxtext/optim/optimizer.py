"""The update rule of a run."""

import optax

from maxtext.configs import MaxTextConfig
from maxtext.optim.schedules import learning_rate


def make_optimizer(config: MaxTextConfig) -> optax.GradientTransformation:
  """AdamW. The first moment's format is always named: left open, it would follow the gradients after the first step."""
  c = config
  return optax.adamw(
    learning_rate(c),
    b1=c.adam_b1,
    b2=c.adam_b2,
    eps=c.adam_eps,
    eps_root=c.adam_eps_root,
    weight_decay=c.adam_weight_decay,
    mu_dtype=c.mu_dtype or c.weight_dtype.value,
  )
