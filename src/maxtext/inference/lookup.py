"""Guesses of what comes next, by what followed the same words before: prompt lookup, without a model.

A guess is only ever checked, so a wrong one costs nothing but the place it took.

Shapes: B rows, T places of a text, N words that are compared, W guesses.
"""

import jax
import jax.numpy as jnp

_COMPARED = 3  # last words that are compared; more of them alike are better, and then the latest place


def guesses(text: jax.Array, last: jax.Array, count: int) -> jax.Array:
  """The `count` tokens [B,W] that may follow the text [B,T] that ends at place `last` [B].

  They are read on from the place that is most like the end of the text, round and round where they reach it.
  """
  T = text.shape[1]
  places = jnp.arange(T)
  alike, run = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
  for back in range(_COMPARED):
    word = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1)
    run &= (jnp.roll(text, back, axis=1) == word) & (places >= back)
    alike += run
  score = jnp.where(places < last[:, None], alike * T + places, -1)
  found = jnp.argmax(score, axis=1)[:, None]
  period = jnp.maximum(last[:, None] - found, 1)
  return jnp.take_along_axis(text, jnp.minimum(found + 1 + jnp.arange(count) % period, T - 1), axis=1)
