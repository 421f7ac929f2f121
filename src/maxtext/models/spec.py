"""What a decoder is, as data."""

from dataclasses import dataclass

from maxtext.layers.block import Block
from maxtext.layers.norm import Norm
from maxtext.layers.rope import Rope


@dataclass(frozen=True)
class Group:
  """`repeats` copies of a short cycle of layers."""

  cycle: tuple[Block, ...]
  repeats: int


@dataclass(frozen=True)
class DecoderSpec:
  """Embedding, groups of layers, final norm, head."""

  vocab: int
  width: int
  groups: tuple[Group, ...]
  final_norm: Norm
  tied: bool = False
  logit_scale: float = 1.0
  logit_cap: float | None = None

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """The distinct rotary tables of all layers."""
    return tuple(dict.fromkeys(rope for group in self.groups for block in group.cycle for rope in block.mixer.ropes))
