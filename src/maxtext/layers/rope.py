"""Rotary positions: pairs of dimensions (j, j + D/2) turn by position times frequency."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Table = tuple[jax.Array, jax.Array]  # cosine and sine, [B,S,1,D/2]


@dataclass(frozen=True)
class LongContext:
  """Scaling by wavelength: long ones are stretched by `factor`, short ones kept, those between blended."""

  factor: float
  original_length: int
  low: float = 1.0
  high: float = 4.0


@dataclass(frozen=True)
class Rope:
  """Frequencies of one kind of layer."""

  head_dim: int
  theta: float = 1e4
  scaling: LongContext | None = None


def rotary_table(spec: Rope, positions: jax.Array, dtype: jax.typing.DTypeLike) -> Table:
  """Cosine and sine for positions [B,S]; made once per call and shared by all layers with this spec."""
  angle = positions[..., None, None].astype(jnp.float32) * jnp.asarray(_frequencies(spec), jnp.float32)
  return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(x: jax.Array, table: Table) -> jax.Array:
  """Applies the rotation to heads [B,S,H,D]."""
  cos, sin = table
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _frequencies(spec: Rope) -> np.ndarray:
  half = spec.head_dim // 2
  frequency = spec.theta ** (-np.arange(half, dtype=np.float64) / half)
  if spec.scaling is None:
    return frequency
  s = spec.scaling
  turns = s.original_length * frequency / (2 * math.pi)  # full turns within the original length
  keep = np.clip((turns - s.low) / (s.high - s.low), 0, 1)
  return frequency * ((1 - keep) / s.factor + keep)
