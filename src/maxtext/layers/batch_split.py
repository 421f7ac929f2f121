"""The batch-split schedule: a layer runs on parts of the batch that do not depend on each other.

So the collectives of one part, such as those of its experts, can overlap with the matmuls of another, in the forward
and in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def split_rows(tree: Any, parts: int, dim: int = 0) -> list[Any]:
  """A pytree of arrays with rows at `dim`, in parts: a round-robin, so that each part has rows of every device."""

  def part(a: jax.Array, i: int) -> jax.Array:
    dealt = a.reshape(*a.shape[:dim], -1, parts, *a.shape[dim + 1 :])
    return jax.lax.index_in_dim(dealt, i, dim + 1, keepdims=False)

  return [jax.tree.map(lambda a, i=i: part(a, i), tree) for i in range(parts)]


def join_rows(parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
  """The array that `split_rows` split."""
  shape = parts[0].shape
  return jnp.stack(parts, axis=dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def over_parts(layer: Callable[..., Any]) -> Callable[..., Any]:
  """A layer of a `Stack` that runs on each part of x, of the layer inputs and of the context.

  Its weights are those of all parts. Buffers that it assigns to pass from part to part; auxiliary outputs are means,
  or the rows of all parts.
  """

  def run(
    x: list[jax.Array], weights: Any, inputs: list[Any], contexts: list[Any], cache: None, repeat: Any, number: Any
  ) -> tuple[list[jax.Array], None, Any]:
    out, found = [], []
    for own, given, context in zip(x, inputs, contexts, strict=True):
      y, _, result = layer(own, weights, given, context, cache, repeat, number)
      weights = nnx.merge_state(weights, result.buffers)
      out.append(y)
      found.append(result.aux)
    return out, None, result._replace(aux=jax.tree.map(_joined, *found))

  return run


def _joined(*values: jax.Array) -> jax.Array:
  return join_rows(values) if values[0].ndim else sum(values[1:], values[0]) / len(values)
