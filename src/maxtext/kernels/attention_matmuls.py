"""The two matmuls of attention as arguments of its kernels, so that a layer can replace them.

Fused kernels (splash, cuDNN, the decode kernels for TPUs) do their own matmuls and do not take these.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Einsum(Protocol):
  """A contraction of two arrays by einsum subscripts."""

  def __call__(
    self,
    subscripts: str,
    a: jax.Array,
    b: jax.Array,
    *,
    precision: str,
    preferred_element_type: Any = None,
  ) -> jax.Array: ...


def einsum(
  subscripts: str, a: jax.Array, b: jax.Array, *, precision: str, preferred_element_type: Any = None
) -> jax.Array:
  """The plain contraction."""
  return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=preferred_element_type)


@dataclass(frozen=True)
class AttentionMatmuls:
  """The matmuls that kernels call: `scores` with queries and keys, `values` with softmax weights and values."""

  scores: Einsum = einsum
  values: Einsum = einsum


PLAIN = AttentionMatmuls()
