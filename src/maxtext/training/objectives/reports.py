"""What layers report beside their output: losses of their own, and figures."""

from typing import Any

import jax
import jax.numpy as jnp


def gathered(reports: list[Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The sum of the layers' losses, and all figures by name, each as the mean over the layers that report it.

  Reports are what `Decoder.hidden` returns: per group and place in the cycle, arrays over the repeats. A name that ends
  in _loss is a loss; what is not one number per layer is left to others.
  """
  found: dict[str, list[jax.Array]] = {}
  for layer in (layer for group in reports for layer in group):
    for name, values in layer.items():
      if values.ndim == 1:
        found.setdefault(name, []).append(values)
  means = {name: jnp.concatenate(values).mean() for name, values in found.items()}
  return sum((mean for name, mean in means.items() if name.endswith("_loss")), jnp.zeros(())), means
