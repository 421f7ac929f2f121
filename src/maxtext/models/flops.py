"""FLOPs of a training step by the standard formula, for computing MFU."""

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from maxtext.layers.lora import is_adapter
from maxtext.layers.parameter_paths import LayerPath, tower_name
from maxtext.layers.router import Router
from maxtext.models.model import Model
from maxtext.models.spec import Group, groups_of, towers_of


def train_flops_per_token(model: Model, length: int) -> float:
  """Floating-point operations per token of a train step, recomputation not counted.

  Each weight of a matmul counts six: two forward, two for the gradient of its input, and two for its own; a frozen one,
  as below LoRA adapters, counts four. The input embedding is not counted unless it is also
  the head, nor are experts that a token is not routed to. Attention counts 12 x heads x head_dim x (length / 2) per
  layer, or the window if it is shorter, since a query attends to half of a causal sequence on average. Towers are not
  counted, because their cost depends on their inputs: see `tower_flops`.
  """
  weights = _matmul_weights(model, "") | ({"embedding/table": Fraction(1)} if model.spec.tied else {})
  operations = sum(model.count(path) * used * (6 if path in model.params else 4) for path, used in weights.items())
  return float(operations) + _attention(model.spec.groups, lambda window: _attended(window, length))


def tower_flops(model: Model, name: str, length: int | None = None) -> float:
  """Floating-point operations of a train step for one input of a tower, with `length` tokens (None: the maximum).

  As for a decoder's tokens, but a token attends to all tokens of its input, or to a window on both sides. Every weight
  is counted for every token, even in a projector that outputs fewer tokens. A frozen tower needs a third of this.
  """
  tower = next(t for t in towers_of(model.spec) if t.name == name)
  tokens = tower.length if length is None else length
  attention = _attention(tower.groups, lambda window: min(2 * (window or tokens), tokens))
  weights = sum(model.count(path) * used for path, used in _matmul_weights(model, name).items())
  return tokens * (6.0 * float(weights) + attention)


def _matmul_weights(model: Model, tower: str) -> dict[str, Fraction]:
  """The weights of matmuls in a tower, or in the decoder if `tower` is empty, adapters among them, and how much of each
  a token uses."""
  paths = (path for path in (*model.params, *model.buffers) if tower_name(path) == tower)
  return {path: active_share(model, path) for path in paths if path.endswith("/weight") or is_adapter(path)}


def _attention(groups: tuple[Group, ...], attended: Callable[[int | None], float]) -> float:
  return sum(
    group.repeats * 12 * block.mixer.attention_width * attended(block.mixer.window)
    for group in groups
    for block in group.cycle
  )


def active_share(model: Model, path: str) -> Fraction:
  """The fraction of a parameter that one token uses: experts per token over all experts, and 1 for other parameters."""
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


def _attended(window: int | None, length: int) -> float:
  return min(window or length, length / 2)
