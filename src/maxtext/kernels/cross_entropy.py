"""Cross-entropy and hits of next tokens, at once or in tiles, so that the logits of the whole batch never exist.

Shapes: B batch, S sequence, E width, V vocabulary, N tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.mesh.explicit import auto_axes


def cross_entropy(logits: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
  """Loss per token from logits [B,S,V]: -log p(target) + z_loss * log(partition)^2, computed in float32."""
  return auto_axes(partial(_losses, z_loss), jax.typeof(targets).sharding, logits, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(z_loss: float, logits: jax.Array, targets: jax.Array) -> jax.Array:
  return _forward(z_loss, logits, targets)[0]


def _forward(z_loss: float, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
  """All elementwise or a reduction, so that no array in float32 of the size of the logits is ever written: a gather's
  operand would be, and its gradient."""
  wide = logits.astype(jnp.float32)
  largest = wide.max(-1)
  total = jnp.exp(wide - largest[..., None]).sum(-1)
  log_partition = jnp.log(total) + largest
  gold = jnp.where(_is_target(logits, targets), wide, 0.0).sum(-1)
  gold = jnp.where((targets >= 0) & (targets < logits.shape[-1]), gold, jnp.nan)  # of another vocabulary: not hidden
  return log_partition - gold + z_loss * jnp.square(log_partition), (logits, targets, largest, total)


def _backward(z_loss: float, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
  logits, targets, largest, total = saved
  scale = (1.0 + 2.0 * z_loss * (jnp.log(total) + largest)) / total
  shares = jnp.exp(logits.astype(jnp.float32) - largest[..., None]) * scale[..., None]
  return (gradient[..., None] * (shares - _is_target(logits, targets))).astype(logits.dtype), None


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
  return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


_losses.defvjp(_forward, _backward)


def is_hit(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Whether the largest of the logits [B,S,V] of a token is that of its target [B,S]."""

  def hits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return logits.argmax(-1) == targets

  return auto_axes(hits, jax.typeof(targets).sharding, logits, targets)


def tiled_cross_entropy(
  hidden: jax.Array, logits_of: Callable[[jax.Array], jax.Array], targets: jax.Array, z_loss: float, tiles: int
) -> jax.Array:
  """`cross_entropy` from hidden states [B,S,E], `tiled`."""
  return tiled(lambda hidden, targets: cross_entropy(logits_of(hidden), targets, z_loss), tiles, hidden, targets)


def tiled(function: Callable[..., Any], tiles: int, *arrays: jax.Array) -> Any:
  """`function` of arrays [B,S,...], which returns a tree of such arrays, one tile of positions at a time, recomputed in
  the backward pass.

  Tile n holds positions n, n + N, n + 2N, ..., so every device has part of every tile, however the sequence is sharded.
  """
  if tiles == 1:
    return function(*arrays)

  def split(x: jax.Array) -> jax.Array:
    B, S = x.shape[:2]
    return jnp.moveaxis(x.reshape(B, S // tiles, tiles, *x.shape[2:]), 2, 0)

  def join(x: jax.Array) -> jax.Array:
    whole = jnp.moveaxis(x, 0, 2)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

  one = jax.checkpoint(lambda tile: function(*tile))
  return jax.tree.map(join, jax.lax.map(one, tuple(map(split, arrays))))
