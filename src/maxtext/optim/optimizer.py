"""The update rule of a run."""

import optax

from maxtext.configs import MaxTextConfig
from maxtext.optim.schedules import learning_rate


def make_optimizer(config: MaxTextConfig) -> optax.GradientTransformation:
  """Clipping, then AdamW."""
  c = config
  adamw = optax.adamw(
    learning_rate(c),
    b1=c.adam_b1,
    b2=c.adam_b2,
    eps=c.adam_eps,
    eps_root=c.adam_eps_root,
    weight_decay=c.adam_weight_decay,
    mu_dtype=c.mu_dtype or None,
  )
  if c.gradient_clipping_threshold == 0:
    return adamw
  return optax.chain(optax.clip_by_global_norm(c.gradient_clipping_threshold), adamw)
