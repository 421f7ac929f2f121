"""Auxiliary outputs of layers: auxiliary losses, and metrics."""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext.layers.block import ACTIVATION_RMS


def collect_auxiliary(outputs: list[Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The sum of the auxiliary losses, and all metrics by name, each as the mean over the layers that have it.

  `outputs` are the auxiliary outputs that `Decoder.hidden` returns: per group and place in the cycle, arrays over the
  repeats. A name that ends in _loss is a loss. An output that is not one number per layer is left out. Statistics of
  activations are not averaged: their names end with the number of the layer, from 0.
  """
  found: dict[str, list[jax.Array]] = {}
  first = 0
  for group in outputs:
    repeats = 0
    for place, layer in enumerate(group):
      for name, values in layer.items():
        if values.ndim != 1:
          continue
        repeats = len(values)
        if name.startswith(ACTIVATION_RMS):
          found |= {f"{name}_{first + i * len(group) + place:03}": [values[i : i + 1]] for i in range(repeats)}
        else:
          found.setdefault(name, []).append(values)
    first += repeats * len(group)
  means = {name: jnp.concatenate(values).mean() for name, values in found.items()}
  return sum((mean for name, mean in means.items() if name.endswith("_loss")), jnp.zeros(())), means
