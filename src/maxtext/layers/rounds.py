"""Work in rounds of bounded size, of which there are as many as the data needs.

The first round is part of the program as usual. The others run in a loop, which almost never does anything, and are
computed again in the backward pass, so that nothing is stored for them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

FURTHER_ROUNDS = "further_rounds"
"""In the names of the operations of the loop."""
Round = Callable[[Any, Any, jax.Array], jax.Array]
"""(differentiated operands, other operands, number of the round) to what the round adds to the result; it closes over
no array."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_further_rounds(run: Round, first: jax.Array, operands: Any, others: Any, rounds: jax.Array) -> jax.Array:
  """The result `first` of round 0, with those of rounds 1 to `rounds` - 1 added."""
  return _loop(rounds, first, lambda number: run(operands, others, number))


def _forward(run: Round, first: jax.Array, operands: Any, others: Any, rounds: jax.Array) -> tuple[jax.Array, tuple]:
  return add_further_rounds(run, first, operands, others, rounds), (operands, others, rounds)


def _backward(run: Round, saved: tuple, grad: jax.Array) -> tuple[jax.Array, Any, None, None]:
  operands, others, rounds = saved

  def gradients(number: jax.Array) -> Any:
    return jax.vjp(lambda operands: run(operands, others, number), operands)[1](grad)[0]

  return grad, _loop(rounds, jax.tree.map(jnp.zeros_like, operands), gradients), None, None


add_further_rounds.defvjp(_forward, _backward)


def _loop(rounds: jax.Array, start: Any, run: Callable[[jax.Array], Any]) -> Any:
  def add(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    number, total = carry
    return number + 1, jax.tree.map(jnp.add, total, run(number))

  with jax.named_scope(FURTHER_ROUNDS):
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, add, (jnp.ones_like(rounds), start))[1]
