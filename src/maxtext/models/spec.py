"""What a decoder is, as data."""

from dataclasses import dataclass

from maxtext.layers.ahead import Ahead
from maxtext.layers.block import Layer
from maxtext.layers.norm import AnyNorm
from maxtext.layers.rope import Rope


@dataclass(frozen=True)
class Group:
  """`repeats` copies of a short cycle of layers."""

  cycle: tuple[Layer, ...]
  repeats: int


def cycles(cycle: tuple[Layer, ...], layers: int) -> tuple[Group, ...]:
  """`layers` layers that go round a cycle; those of a last, incomplete round are a group of their own."""
  repeats, rest = divmod(layers, len(cycle))
  groups = (Group(cycle, repeats), Group(cycle[:rest], 1))
  return tuple(group for group in groups if group.cycle and group.repeats)


@dataclass(frozen=True)
class DecoderSpec:
  """Embedding, groups of layers, final norm, head.

  Attributes:
    tied: the head is the embedding's table.
    embedding_scale: times the looked-up rows.
    learned_positions: rows of a table of positions that is added to the tokens'; None is no table.
    sinusoidal_positions: fixed sines of positions are added too.
    streams: residual streams that the layers take and return.
    ahead: predicts tokens after the next one, while training; None is nothing.
  """

  vocab: int
  width: int
  groups: tuple[Group, ...]
  final_norm: AnyNorm
  tied: bool = False
  logit_scale: float = 1.0
  logit_cap: float | None = None
  embedding_scale: float = 1.0
  learned_positions: int | None = None
  sinusoidal_positions: bool = False
  streams: int = 1
  ahead: Ahead | None = None

  @property
  def looks_up_tokens(self) -> bool:
    """Whether layers need the tokens themselves."""
    return any(getattr(layer, "memory", None) is not None for group in self.groups for layer in group.cycle)

  @property
  def any_order(self) -> bool:
    """Whether the tokens of a row may stand in any order, since positions say what comes before what."""
    mixers = [layer.mixer for group in self.groups for layer in group.cycle]
    return all(getattr(m, "any_order", False) for m in mixers) and self.ahead is None and not self.looks_up_tokens

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """The distinct rotary tables of all layers."""
    return tuple(dict.fromkeys(rope for group in self.groups for block in group.cycle for rope in block.mixer.ropes))
