"""Hugging Face tensors to parameters."""

from collections.abc import Mapping

import numpy as np

from maxtext.models.model import Model
from maxtext.models.weight_table import Weight


def from_tensors(model: Model, table: Mapping[str, Weight], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Parameters from named tensors; every tensor and every parameter must be used once.

  Raises:
    ValueError: names what is missing or left over.
  """
  used: set[str] = set()
  params = {path: _assemble(table[path], a.shape, tensors, used) for path, a in model.params.items()}
  if left := sorted(set(tensors) - used):
    raise ValueError(f"Tensors that no parameter takes: {', '.join(left)}.")
  return params


def _assemble(weight: Weight, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray], used: set[str]) -> np.ndarray:
  stacked = "{layer}" in weight.name
  names = [weight.name.format(layer=i) for i in range(shape[0])] if stacked else [weight.name]
  if missing := [n for n in names if n not in tensors]:
    raise ValueError(f"Tensors that are missing: {', '.join(missing)}.")
  used.update(names)
  pieces = [tensors[n].T if weight.transposed else tensors[n] for n in names]
  return (np.stack(pieces) if stacked else pieces[0]).reshape(shape)
