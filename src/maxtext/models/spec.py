"""What a model is, as data: a decoder, and towers whose features enter it."""

from dataclasses import dataclass, fields

from maxtext.layers.block import Layer
from maxtext.layers.mtp import MultiTokenPrediction
from maxtext.layers.norm import NormSpec
from maxtext.layers.patches import FrontEnd, Projector
from maxtext.layers.rope import RotaryEmbedding


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
  final_norm: NormSpec
  tied: bool = False
  logit_scale: float = 1.0
  logit_cap: float | None = None
  embedding_scale: float = 1.0
  learned_positions: int | None = None
  sinusoidal_positions: bool = False
  streams: int = 1
  mtp: MultiTokenPrediction | None = None

  @property
  def needs_tokens(self) -> bool:
    """Whether layers need the tokens themselves."""
    return any(getattr(layer, "memory", None) is not None for group in self.groups for layer in group.cycle)

  @property
  def chooses_keys(self) -> bool:
    """Whether layers choose the keys that a query sees (MoBA, an indexer), which they do among earlier ones."""
    mixers = [layer.mixer for group in self.groups for layer in group.cycle]
    return any(getattr(m, name, None) is not None for m in mixers for name in ("blocks", "indexer"))

  @property
  def order_invariant(self) -> bool:
    """Whether the tokens of a row may stand in any order, since positions say what comes before what."""
    mixers = [layer.mixer for group in self.groups for layer in group.cycle]
    return all(getattr(m, "order_invariant", False) for m in mixers) and self.mtp is None and not self.needs_tokens

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The distinct rotary tables of all layers."""
    return _ropes(self.groups)


@dataclass(frozen=True)
class TowerSpec:
  """An encoder of other inputs than tokens: front end, groups of layers, final norm, projector to the decoder's width.

  Its layers are those of a decoder, whose mixers see both ways (`GQA(causal=False)`).

  Attributes:
    name: its parameters are under `towers/<name>/`.
    width: of its layers.
    length: most tokens of one input.
    front_end: from inputs to tokens.
    projector: from the tower's width to the decoder's.
    final_norm: before the projector; None is none.
    learned_positions: a table of `length` positions is added to the tokens.
    deepstack: groups whose outputs are features too, each with a projector of its own (deepstack).
  """

  name: str
  width: int
  length: int
  front_end: FrontEnd
  groups: tuple[Group, ...]
  projector: Projector
  final_norm: NormSpec | None = None
  learned_positions: bool = False
  deepstack: tuple[int, ...] = ()

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The distinct rotary tables of all layers."""
    return _ropes(self.groups)


@dataclass(frozen=True)
class ModelSpec(DecoderSpec):
  """A decoder with towers beside it.

  It is its decoder's spec as well, so whatever reads or changes a decoder's spec keeps the towers.
  """

  towers: tuple[TowerSpec, ...] = ()

  @staticmethod
  def of(decoder: DecoderSpec, *towers: TowerSpec) -> "ModelSpec":
    """This decoder with these towers, whose names differ."""
    names = [tower.name for tower in towers]
    if len(set(names)) < len(names):
      raise ValueError(f"towers need names of their own, and these are {names}.")
    return ModelSpec(**{f.name: getattr(decoder, f.name) for f in fields(DecoderSpec)}, towers=towers)

  @property
  def decoder(self) -> DecoderSpec:
    """The decoder alone."""
    return DecoderSpec(**{f.name: getattr(self, f.name) for f in fields(DecoderSpec)})


def towers_of(spec: DecoderSpec) -> tuple[TowerSpec, ...]:
  """The towers of a model; a decoder alone has none."""
  return spec.towers if isinstance(spec, ModelSpec) else ()


def groups_of(spec: DecoderSpec, tower: str = "") -> tuple[Group, ...]:
  """The groups of layers of a tower, or of the decoder where no name is given."""
  return next(t.groups for t in towers_of(spec) if t.name == tower) if tower else spec.groups


def _ropes(groups: tuple[Group, ...]) -> tuple[RotaryEmbedding, ...]:
  return tuple(dict.fromkeys(rope for group in groups for block in group.cycle for rope in block.mixer.ropes))
