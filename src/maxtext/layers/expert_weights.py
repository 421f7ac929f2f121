"""The gradient of the weights of experts' outputs, without the outputs.

An expert's output is out = hidden x down, so the weight's gradient <gradient, out> is <gradient x down^T, hidden>. The
backward pass has both: the gradient of the hidden values, which holds the weight as a factor, and the hidden values,
which the gradient of `down` needs too. With the outputs, rematerialization would compute `down` a second time, and sort
its outputs again, for this gradient alone.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def weigh_by_gradient(values: jax.Array, weights: jax.Array) -> jax.Array:
  """The values [...,I] themselves, of which outputs are linear that are multiplied by the weights [...] later.

  The gradient of the weights comes from here, so it must not from there. A weight of 0, which is that of a row without
  a token, has none.
  """
  return values


def _forward(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return values, (values, weights)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  values, weights = saved
  products = (gradient.astype(jnp.float32) * values.astype(jnp.float32)).sum(-1)
  used = weights != 0
  return gradient, jnp.where(used, products / jnp.where(used, weights, 1), 0).astype(weights.dtype)


weigh_by_gradient.defvjp(_forward, _backward)
