"""How much arithmetic a model asks for, by the usual count."""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from maxtext.layers.parameter_paths import LayerPath
from maxtext.layers.router import Router
from maxtext.models.model import Model


def train_flops_per_token(model: Model, length: int) -> float:
  """Floating-point operations per token of a train step, recomputation not counted.

  Six for each weight that takes part in a product (two forward, four backward), which leaves out the input embedding
  unless it is the head too, and the experts that a token does not go to; and for attention 12 x heads x head_dim x
  (length / 2) per layer, or the window where it is shorter, since a query sees half of a causal sequence on average.
  """
  structs = model.params | model.buffers
  weights = sum(a.size * active_share(model, path) for path, a in structs.items() if path.endswith("/weight"))
  if model.spec.tied:
    weights += structs["embedding/table"].size
  attention = sum(
    group.repeats * 12 * block.mixer.attention_width * _seen(block.mixer.window, length)
    for group in model.spec.groups
    for block in group.cycle
  )
  return 6.0 * float(weights) + attention


def active_share(model: Model, path: str) -> Fraction:
  """The share of a parameter that one token meets: of experts, those that it goes to."""
  if "expert" not in model.named_dimensions[path]:
    return Fraction(1)
  found = LayerPath.parse(path)
  where = model.spec.groups[found.group].cycle[found.place] if found else model.spec
  router = next(_routers(where))
  return Fraction(router.per_token, router.count)


def _routers(spec: Any) -> Iterator[Router]:
  if isinstance(spec, Router):
    yield spec
  elif isinstance(spec, tuple):
    for part in spec:
      yield from _routers(part)
  elif dataclasses.is_dataclass(spec):
    for field in dataclasses.fields(spec):
      yield from _routers(getattr(spec, field.name))


def _seen(window: int | None, length: int) -> float:
  return min(window or length, length / 2)
