"""Model architectures as data: a decoder, and towers whose features are input to it."""

from dataclasses import dataclass, fields

from maxtext.layers.block import Layer
from maxtext.layers.mtp import MultiTokenPrediction
from maxtext.layers.norm import NormSpec
from maxtext.layers.patches import FeatureAdapter, FrontEnd, Projector
from maxtext.layers.rope import RotaryEmbedding


@dataclass(frozen=True)
class Group:
  """`repeats` copies of a short cycle of layers."""

  cycle: tuple[Layer, ...]
  repeats: int


def cycles(cycle: tuple[Layer, ...], layers: int) -> tuple[Group, ...]:
  """Groups of `layers` layers in total that repeat a cycle; an incomplete last repeat is a group of its own."""
  repeats, rest = divmod(layers, len(cycle))
  groups = (Group(cycle, repeats), Group(cycle[:rest], 1))
  return tuple(group for group in groups if group.cycle and group.repeats)


@dataclass(frozen=True)
class DecoderSpec:
  """Embedding, groups of layers, final norm, head.

  Attributes:
    tied: whether the head shares the embedding table.
    embedding_scale: factor on the embeddings.
    learned_positions: rows of the learned position table; None if there is none.
    sinusoidal_positions: whether fixed sinusoidal positions are added.
    streams: number of residual streams that the layers take and return.
    mtp: multi-token prediction layers, used in training only; None if there are none.
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
    """Whether layers need the token ids, not only the embeddings."""
    return any(getattr(layer, "memory", None) is not None for group in self.groups for layer in group.cycle)

  @property
  def chooses_keys(self) -> bool:
    """Whether layers select the keys that a query attends to (MoBA, an indexer), among earlier keys only."""
    mixers = [layer.mixer for group in self.groups for layer in group.cycle]
    return any(getattr(m, name, None) is not None for m in mixers for name in ("blocks", "indexer"))

  @property
  def has_mrope(self) -> bool:
    """Whether rotary positions have several components (time, row, column), which differ in media."""
    return any(rope.mrope_sections is not None for rope in self.ropes)

  @property
  def order_invariant(self) -> bool:
    """Whether the tokens of a row may be in any order, because every layer takes their order from positions."""
    mixers = [layer.mixer for group in self.groups for layer in group.cycle]
    return all(getattr(m, "order_invariant", False) for m in mixers) and self.mtp is None and not self.needs_tokens

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The distinct rotary embeddings of all layers."""
    return _ropes(self.groups)


@dataclass(frozen=True)
class TowerSpec:
  """An encoder of inputs other than tokens: front end, groups of layers, final norm, projector to the decoder's width.

  Its layers are those of a decoder, with bidirectional attention (`GQA(causal=False)`).

  Attributes:
    name: its parameters are under `towers/<name>/`.
    width: hidden size of its layers.
    length: maximum number of tokens of one input; where media have any size, the usual number.
    front_end: maps inputs to tokens.
    projector: maps the tower's width to the decoder's.
    final_norm: the norm before the projector; None if there is none.
    learned_positions: whether a learned table of `length` positions is added to the tokens.
    position_grid: side of a square table of learned positions, which is interpolated to the grid of each image; None if
      there is none.
    axis_positions: length of two learned tables, of the columns and of the rows of an image, whose sum is added to the
      patches; rotary positions are then (column, row) too. None if there are none.
    class_token: a learned token is appended to those of an input, and is not passed on after the final norm.
    first_norm: the norm before the first layer; None if there is none.
    rotary_grid: side of the square grid of tokens, whose rotary positions are (column, row) from 1, and those of a
      class token (0, 0); None where `Tower` is given them, or needs none.
    adapter: converts the normed outputs to what the projector takes, and is part of the encoder; None if there is none.
    bidirectional_features: the decoder's tokens of one input attend to each other in both directions.
    deepstack: indices of groups whose outputs are features too, each with its own projector (DeepStack). They are added
      to the outputs of the decoder's first layers, of which its first group has one more than there are features.
    deepstack_projector: of those features; None is one like `projector`.
    projector_dropout: share of the values of features that is zeroed in training.
  """

  name: str
  width: int
  length: int
  front_end: FrontEnd
  groups: tuple[Group, ...]
  projector: Projector
  final_norm: NormSpec | None = None
  learned_positions: bool = False
  position_grid: int | None = None
  axis_positions: int | None = None
  class_token: bool = False
  first_norm: NormSpec | None = None
  rotary_grid: int | None = None
  adapter: FeatureAdapter | None = None
  bidirectional_features: bool = False
  deepstack: tuple[int, ...] = ()
  deepstack_projector: Projector | None = None
  projector_dropout: float = 0.0

  @property
  def any_size(self) -> bool:
    """Whether media may have any size, and several share an input: no table has a place for each token."""
    return not self.learned_positions and self.rotary_grid is None

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The distinct rotary embeddings of all layers."""
    return _ropes(self.groups)


@dataclass(frozen=True)
class ModelSpec(DecoderSpec):
  """A decoder with towers.

  It is a `DecoderSpec` too, so code that reads or changes a decoder's spec preserves the towers.
  """

  towers: tuple[TowerSpec, ...] = ()

  @staticmethod
  def of(decoder: DecoderSpec, *towers: TowerSpec) -> "ModelSpec":
    """This decoder with these towers, which need distinct names."""
    names = [tower.name for tower in towers]
    if len(set(names)) < len(names):
      raise ValueError(f"towers need names of their own, and these are {names}.")
    return ModelSpec(**{f.name: getattr(decoder, f.name) for f in fields(DecoderSpec)}, towers=towers)

  @property
  def decoder(self) -> DecoderSpec:
    """The decoder alone."""
    return DecoderSpec(**{f.name: getattr(self, f.name) for f in fields(DecoderSpec)})


def towers_of(spec: DecoderSpec) -> tuple[TowerSpec, ...]:
  """The towers of a model; () for a plain `DecoderSpec`."""
  return spec.towers if isinstance(spec, ModelSpec) else ()


def groups_of(spec: DecoderSpec, tower: str = "") -> tuple[Group, ...]:
  """The groups of layers of a tower, or of the decoder if `tower` is empty."""
  return next(t.groups for t in towers_of(spec) if t.name == tower) if tower else spec.groups


def _ropes(groups: tuple[Group, ...]) -> tuple[RotaryEmbedding, ...]:
  return tuple(dict.fromkeys(rope for group in groups for block in group.cycle for rope in block.mixer.ropes))
