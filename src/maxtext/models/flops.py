"""The FLOPs of a training step by the usual count, which MFU is computed from."""

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from maxtext.layers.parameter_paths import LayerPath, tower_name
from maxtext.layers.router import Router
from maxtext.models.model import Model
from maxtext.models.spec import Group, groups_of, towers_of


def train_flops_per_token(model: Model, length: int) -> float:
  """Floating-point operations per token of a train step, recomputation not counted.

  Six for each weight that takes part in a product (two forward, four backward), which leaves out the input embedding
  unless it is the head too, and the experts that a token does not go to; and for attention 12 x heads x head_dim x
  (length / 2) per layer, or the window where it is shorter, since a query sees half of a causal sequence on average.
  Towers are not counted: what they cost goes by their inputs, see `tower_flops`.
  """
  weights = _multiplied(model, "")
  if model.spec.tied:
    weights += model.struct("embedding/table").size
  return 6.0 * float(weights) + _attention(model.spec.groups, lambda window: _seen(window, length))


def tower_flops(model: Model, name: str, length: int | None = None) -> float:
  """Floating-point operations of a train step for one input of a tower, with `length` tokens; None is the most.

  As for a decoder's tokens, but a token sees all tokens of its input, or those of a window on both sides. Every weight
  is counted for every token, also those of a projector that has fewer. A tower that is not trained needs a third.
  """
  tower = next(t for t in towers_of(model.spec) if t.name == name)
  tokens = tower.length if length is None else length
  seen = _attention(tower.groups, lambda window: min(2 * (window or tokens), tokens))
  return tokens * (6.0 * float(_multiplied(model, name)) + seen)


def _multiplied(model: Model, tower: str) -> Fraction:
  """The weights of a tower, or of the decoder, that one token is multiplied by."""
  structs = model.params | model.buffers
  weights = (path for path in structs if path.endswith("/weight") and tower_name(path) == tower)
  return sum((structs[path].size * active_share(model, path) for path in weights), Fraction())


def _attention(groups: tuple[Group, ...], seen: Callable[[int | None], float]) -> float:
  return sum(
    group.repeats * 12 * block.mixer.attention_width * seen(block.mixer.window)
    for group in groups
    for block in group.cycle
  )


def active_share(model: Model, path: str) -> Fraction:
  """The share of a parameter that one token meets: of experts, those that it goes to."""
  if "expert" not in model.logical_axes[path]:
    return Fraction(1)
  found = LayerPath.parse(path)
  where = groups_of(model.spec, found.tower)[found.group].cycle[found.place] if found else model.spec
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
