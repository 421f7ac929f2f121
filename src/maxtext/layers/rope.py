"""Rotary position embeddings (RoPE): pairs of dimensions are rotated by position times frequency.

A pair is (j, j + D/2), or (2j, 2j + 1) where a `RotaryEmbedding` is interleaved.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

Table = tuple[jax.Array, jax.Array]  # cosine and sine, [B,S,1,D/2]


class Scaling(Protocol):
  """A scaling of frequencies for positions beyond the length that a model was pre-trained on."""

  @property
  def multiplier(self) -> float:
    """Factor of cosine and sine, and so of queries and keys."""
    ...

  def stretch(self, frequency: np.ndarray, theta: float) -> np.ndarray:
    """Frequencies [D/2] to lower ones."""
    ...


@dataclass(frozen=True)
class LinearScaling:
  """Every wavelength is stretched by `factor`."""

  factor: float
  multiplier: float = 1.0

  def stretch(self, frequency: np.ndarray, theta: float) -> np.ndarray:
    """Divides all frequencies by the factor."""
    return frequency / self.factor


@dataclass(frozen=True)
class LongContextScaling:
  """By wavelength: long ones are stretched by `factor`, short ones unchanged, those between interpolated."""

  factor: float
  original_length: int
  low: float = 1.0
  high: float = 4.0
  multiplier: float = 1.0

  def stretch(self, frequency: np.ndarray, theta: float) -> np.ndarray:
    """By the number of full rotations within the original length; with low = high nothing is interpolated."""
    rotations = self.original_length * frequency / (2 * math.pi)
    keep = np.clip((rotations - self.low) / max(self.high - self.low, 1e-9), 0, 1)
    return frequency * ((1 - keep) / self.factor + keep)


@dataclass(frozen=True)
class YarnScaling:
  """By dimension: those with over `fast` rotations in the original length are unchanged, under `slow` stretched.

  Attributes:
    truncate: the two bounds are rounded outwards to whole dimensions.
  """

  factor: float
  original_length: int
  fast: float = 32.0
  slow: float = 1.0
  truncate: bool = True
  multiplier: float = 1.0

  def stretch(self, frequency: np.ndarray, theta: float) -> np.ndarray:
    """A linear ramp between the dimensions with `fast` and `slow` rotations."""
    dim = 2 * len(frequency)

    def dimension_with(rotations: float) -> float:
      return dim * math.log(self.original_length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = dimension_with(self.fast), dimension_with(self.slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(len(frequency)) - low) / max(high - low, 1e-3), 0, 1)
    return frequency / self.factor * ramp + frequency * (1 - ramp)


@dataclass(frozen=True)
class RotaryEmbedding:
  """The rotary frequencies of a layer.

  Attributes:
    head_dim: number of rotated dimensions, the first of a head; others are unchanged.
    shortest: the shortest wavelength, divided by 2 pi.
    share: the share of the pairs that are rotated, those with the highest frequencies.
    interleaved: neighbouring dimensions are a pair.
    mrope_sections: number of frequencies of each component of positions that have several (mRoPE: time, height, width);
      None for positions of one component.
    mrope_interleaved: frequencies alternate between components (0, 1, 2, 0, 1, 2, ...; where the section of a later
      component is used up, 0 replaces it), instead of contiguous sections.
    axial: each section has the whole range of frequencies, as for the axes of images, instead of its part of one range.
    apart: the dimensions of each section are contiguous, and pairs are within them.
  """

  head_dim: int
  theta: float = 1e4
  shortest: float = 1.0
  scaling: Scaling | None = None
  share: float = 1.0
  interleaved: bool = False
  mrope_sections: tuple[int, ...] | None = None
  mrope_interleaved: bool = False
  axial: bool = False
  apart: bool = False

  def __post_init__(self) -> None:
    sections = self.mrope_sections
    if sections is not None and sum(sections) != self.head_dim // 2:
      raise ValueError(
        f"mrope_sections={list(sections)} have {sum(sections)} frequencies together, and head_dim={self.head_dim} has "
        f"{self.head_dim // 2}."
      )

  @property
  def parts(self) -> int:
    """The number of runs of dimensions that are rotated each by itself."""
    return len(self.mrope_sections) if self.apart and self.mrope_sections else 1

  @property
  def components(self) -> np.ndarray:
    """The component of positions that each frequency uses, [D/2]."""
    sections = self.mrope_sections or (self.head_dim // 2,)
    if not self.mrope_interleaved:
      return np.repeat(np.arange(len(sections)), sections)
    index = np.arange(self.head_dim // 2)
    component, used = index % len(sections), index // len(sections)
    return np.where(used < np.asarray(sections)[component], component, 0)


def rotary_table(spec: RotaryEmbedding, positions: jax.Array, dtype: jax.typing.DTypeLike) -> Table:
  """Cosine and sine for positions [B,S], or [B,S,C] of C components; made once per call and shared by all layers with
  this spec.

  A position of one component applies to all components, so text gives the same table to the bit either way.
  """
  angle = _angles(spec, positions).astype(jnp.float32) * jnp.asarray(_frequencies(spec), jnp.float32)
  multiplier = 1.0 if spec.scaling is None else spec.scaling.multiplier
  return (jnp.cos(angle) * multiplier).astype(dtype), (jnp.sin(angle) * multiplier).astype(dtype)


def rotate(x: jax.Array, table: Table, interleaved: bool = False, parts: int = 1) -> jax.Array:
  """Applies the rotation to heads [B,S,H,D], or to their first dimensions where the table is narrower; or to each of
  several equal parts of a head."""
  if parts > 1:
    apart, *tables = (a.reshape(*a.shape[:-1], parts, -1) for a in (x, *table))
    return rotate(apart, (tables[0], tables[1]), interleaved).reshape(x.shape)
  cos, sin = table
  rotated = 2 * cos.shape[-1]
  if rotated < x.shape[-1]:
    return jnp.concatenate([rotate(x[..., :rotated], table, interleaved), x[..., rotated:]], axis=-1)
  a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
  pair = (a * cos - b * sin, b * cos + a * sin)
  return jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)


def _angles(spec: RotaryEmbedding, positions: jax.Array) -> jax.Array:
  """The position that each frequency is multiplied by, [B,S,1,1], or [B,S,1,D/2] where positions have components."""
  if positions.ndim == 2:
    return positions[..., None, None]
  count, sections = positions.shape[-1], spec.mrope_sections
  if sections is None or len(sections) != count:
    raise ValueError(f"positions have {count} components, and mrope_sections={sections and list(sections)}.")
  found = positions[..., :1]
  for component in range(1, count):
    found = jnp.where(spec.components == component, positions[..., component : component + 1], found)
  return found[..., None, :]


def _frequencies(spec: RotaryEmbedding) -> np.ndarray:
  half = spec.head_dim // 2
  sections = spec.mrope_sections if spec.axial and spec.mrope_sections else (half,)
  exponents = np.concatenate([np.arange(size, dtype=np.float64) / size for size in sections])
  frequency = (spec.theta / spec.shortest) ** -exponents / spec.shortest
  if spec.scaling is not None:
    frequency = spec.scaling.stretch(frequency, spec.theta)
  return np.where(np.arange(half) < round(half * spec.share), frequency, 0.0)
