"""Auxiliary outputs of layers: auxiliary losses, and metrics."""

from typing import Any

import jax
import jax.numpy as jnp


def collect_auxiliary(outputs: list[Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The sum of the auxiliary losses, and all metrics by name, each as the mean over the layers that have it.

  `outputs` are the auxiliary outputs that `Decoder.hidden` returns: per group and place in the cycle, arrays over the
  repeats. A name that ends in _loss is a loss. An output that is not one number per layer is left out.
  """
  found: dict[str, list[jax.Array]] = {}
  for layer in (layer for group in outputs for layer in group):
    for name, values in layer.items():
      if values.ndim == 1:
        found.setdefault(name, []).append(values)
  means = {name: jnp.concatenate(values).mean() for name, values in found.items()}
  return sum((mean for name, mean in means.items() if name.endswith("_loss")), jnp.zeros(())), means
