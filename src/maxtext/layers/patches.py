"""Front end and projector of a tower: patches to the tower's width, and its outputs to the decoder's width.

Shapes: N inputs (images), T patches or tokens, P values of a patch, W width of the tower, E width of the decoder.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.norm import NormSpec
from maxtext.layers.param_factory import Buffer, ParamFactory


class TowerEnd(Protocol):
  """One end of a tower with its weights: [N,T,...] to [N,T',...], where T' may be fewer (pooling, pixel shuffle)."""

  def __call__(self, x: jax.Array) -> jax.Array: ...


class FrontEnd(Protocol):
  """The spec of a front end, which converts inputs of a tower to tokens."""

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> TowerEnd:
    """From inputs to tokens of this width."""
    ...


class Projector(Protocol):
  """The spec of a projector, which converts outputs of a tower to features."""

  def build(self, factory: ParamFactory, width: int, out_width: int, execution: ExecutionConfig) -> TowerEnd:
    """From the tower's width to the decoder's."""
    ...


class FeatureAdapter(Protocol):
  """The spec of an adapter, which converts the last layer's outputs to what the projector takes."""

  @property
  def out_width(self) -> int:
    """Width of its outputs."""
    ...

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> TowerEnd:
    """From the tower's width to `out_width`."""
    ...


@dataclass(frozen=True)
class PatchProjection:
  """A linear projection of each patch: a convolution whose stride is its size, on patches that are already extracted.

  Attributes:
    shape: of a patch, such as (channels, rows, columns), which is flat in this order.
    centred: values of 0 to 1 are mapped to -1 to 1 here.
  """

  shape: tuple[int, ...]
  bias: bool = True
  centred: bool = False

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> Linear:
    """[N,T,P] to [N,T,W]."""
    kind = CentredLinear if self.centred else Linear
    return kind(factory, {"narrow": math.prod(self.shape)}, {"embed": width}, execution, "patch_proj", bias=self.bias)


class CentredLinear(Linear):
  """A linear layer of values from 0 to 1, which become those from -1 to 1."""

  def __call__(self, x: jax.Array, *others: Any) -> jax.Array:
    return super().__call__(2 * x - 1, *others)


@dataclass(frozen=True)
class LinearProjector:
  """An optional norm and a linear projection."""

  norm: NormSpec | None = None
  bias: bool = False

  def build(self, factory: ParamFactory, width: int, out_width: int, execution: ExecutionConfig) -> "ProjectorLayer":
    """[N,T,W] to [N,T,E]."""
    return ProjectorLayer(factory, self, width, out_width, execution)


class ProjectorLayer(nnx.Module):
  """The layer of `LinearProjector`."""

  def __init__(
    self, factory: ParamFactory, spec: LinearProjector, width: int, out_width: int, execution: ExecutionConfig
  ) -> None:
    self.norm = None if spec.norm is None else spec.norm.build(factory.scope("norm"), width)
    out = {"latent_out": out_width}
    self.out = Linear(factory.scope("out"), {"embed": width}, out, execution, "projector_out", bias=spec.bias)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.out(x if self.norm is None else self.norm(x))


@dataclass(frozen=True)
class PooledProjector:
  """Means of square blocks of a square grid of patches, a norm, and a linear projection.

  Attributes:
    side: patches along a side of the grid.
    pooled: tokens along a side after pooling.
  """

  side: int
  pooled: int
  norm: NormSpec

  def build(self, factory: ParamFactory, width: int, out_width: int, execution: ExecutionConfig) -> "PooledPatches":
    """[N,T,W] to [N,T',E]."""
    return PooledPatches(factory, self, width, out_width, execution)


class PooledPatches(ProjectorLayer):
  """The layer of `PooledProjector`."""

  def __init__(
    self, factory: ParamFactory, spec: PooledProjector, width: int, out_width: int, execution: ExecutionConfig
  ) -> None:
    super().__init__(factory, LinearProjector(spec.norm), width, out_width, execution)
    self.side, self.block = spec.pooled, spec.side // spec.pooled

  def __call__(self, x: jax.Array) -> jax.Array:
    count, _, width = x.shape
    grid = x.reshape(count, self.side, self.block, self.side, self.block, width)
    return super().__call__(grid.mean((2, 4)).reshape(count, self.side**2, width))


@dataclass(frozen=True)
class PixelShuffle:
  """Square blocks of a square grid of patches become one token each, followed by two linear layers with activations.

  Attributes:
    side: patches along a side of the grid.
    block: patches along a side of a block.
    hidden_width: width of the outputs of the first layer.
    out_width: width of the outputs of the second.
    activation: after each of the layers.
  """

  side: int
  block: int
  hidden_width: int
  out_width: int
  activation: str

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "ShuffledPatches":
    """[N,T,W] to [N,T',out_width]."""
    return ShuffledPatches(factory, self, width, execution)


class ShuffledPatches(nnx.Module):
  """The layer of `PixelShuffle`."""

  def __init__(self, factory: ParamFactory, spec: PixelShuffle, width: int, execution: ExecutionConfig) -> None:
    self.side, self.block, self.activation = spec.side // spec.block, spec.block, ACTIVATIONS[spec.activation]
    wide, hidden, out = {"embed": width * spec.block**2}, {"mlp": spec.hidden_width}, {"embed": spec.out_width}
    self.up = Linear(factory.scope("up"), wide, hidden, execution, "mlpwi")
    self.down = Linear(factory.scope("down"), hidden, out, execution, "mlpwo")

  def __call__(self, x: jax.Array) -> jax.Array:
    count, _, width = x.shape
    grid = x.reshape(count, self.side, self.block, self.side, self.block, width).transpose(0, 1, 3, 2, 4, 5)
    blocks = grid.reshape(count, self.side**2, self.block**2 * width)
    return self.activation(self.down(self.activation(self.up(blocks))))


@dataclass(frozen=True)
class PatchMerger:
  """Runs of patches become one token each, by a norm, a linear layer, an activation and another linear layer.

  Attributes:
    count: patches of a token, which are neighbours in the order of the inputs.
    grouped_norm: the norm is of all patches of a token together, instead of each patch.
  """

  count: int
  norm: NormSpec
  activation: str
  grouped_norm: bool = False

  def build(self, factory: ParamFactory, width: int, out_width: int, execution: ExecutionConfig) -> "MergedPatches":
    """[N,T,W] to [N,T',E]."""
    return MergedPatches(factory, self, width, out_width, execution)


class MergedPatches(nnx.Module):
  """The layer of `PatchMerger`."""

  def __init__(
    self, factory: ParamFactory, spec: PatchMerger, width: int, out_width: int, execution: ExecutionConfig
  ) -> None:
    self.spec, self.activation, wide = spec, ACTIVATIONS[spec.activation], width * spec.count
    self.norm = spec.norm.build(factory.scope("norm"), wide if spec.grouped_norm else width)
    self.up = Linear(factory.scope("up"), {"embed": wide}, {"mlp": wide}, execution, "mlpwi", bias=True)
    out = {"latent_out": out_width}
    self.out = Linear(factory.scope("out"), {"mlp": wide}, out, execution, "projector_out", bias=True)

  def __call__(self, x: jax.Array) -> jax.Array:
    if not self.spec.grouped_norm:
      x = self.norm(x)
    inputs, tokens, width = x.shape
    x = x.reshape(inputs, tokens // self.spec.count, self.spec.count * width)
    if self.spec.grouped_norm:
      x = self.norm(x)
    return self.out(self.activation(self.up(x)))


@dataclass(frozen=True)
class PatchPooling:
  """Means of runs of patches times the square root of the width, standardized by constants of each dimension.

  Attributes:
    count: patches of a token, which are neighbours in the order of the inputs.
    out_width: the tower's width.
  """

  count: int
  out_width: int

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "PooledRuns":
    """[N,T,W] to [N,T',W]."""
    return PooledRuns(factory, self)


class PooledRuns(nnx.Module):
  """The layer of `PatchPooling`."""

  def __init__(self, factory: ParamFactory, spec: PatchPooling) -> None:
    self.count = spec.count
    self.mean = factory("mean", (spec.out_width,), ("norm",), kind=Buffer)
    self.scale = factory("scale", (spec.out_width,), ("norm",), fill=1.0, kind=Buffer)

  def __call__(self, x: jax.Array) -> jax.Array:
    inputs, tokens, width = x.shape
    pooled = x.reshape(inputs, tokens // self.count, self.count, width).astype(jnp.float32).mean(2) * width**0.5
    mean, scale = (a[...].astype(jnp.float32) for a in (self.mean, self.scale))
    return ((pooled - mean) * scale).astype(x.dtype)
