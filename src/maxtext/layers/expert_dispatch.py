"""Dispatch of tokens to the experts they are routed to, and combination of the outputs.

All methods give the same output, except that `capacity` and a bounded buffer drop tokens beyond the capacity.

Shapes: B batch, S sequence, K experts per token, E width, X experts of this device, N = B*S tokens, M rows, C capacity.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.grouped_matmul import GroupedMatmul
from maxtext.kernels.ragged_all_to_all import RaggedAllToAll, plan_exchange
from maxtext.layers.rounds import add_further_rounds


class Routing(NamedTuple):
  """The experts of each token by number [B,S,K], and the weights of their outputs [B,S,K]."""

  experts: jax.Array
  weights: jax.Array


class Experts(Protocol):
  """The module of the experts of one device, applied to rows [M,E] sorted by expert with their sizes [X], or to [X,C,E]
  without. Their hidden width is sharded over `parts` devices. With `weights` of the rows, which multiply the outputs
  later, their gradient is of the hidden values (`expert_weights.py`), where that is `exact`."""

  @property
  def exact(self) -> bool: ...

  def __call__(
    self, x: jax.Array, sizes: jax.Array | None, parts: int = 1, weights: jax.Array | None = None
  ) -> jax.Array: ...


@dataclass(frozen=True)
class ExpertDispatch:
  """How a run executes mixtures of experts.

  Attributes:
    method: dense computes every expert on every token (the plain implementation); capacity gives each expert the same
      capacity in each sequence and drops tokens beyond it; dropless sorts tokens by expert for grouped matmuls.
    capacity: capacity factor, relative to an even load, for the method of that name.
    buffer: rows of a device relative to an even load, for dropless; None drops no token.
    wi, wo: grouped matmuls of the experts' input and output projections, for dropless.
    merge_gate_up: gate and up are one grouped matmul, for dropless with plain weights.
    carrier: ragged all-to-all to the devices of the experts, for dropless; None all-gathers tokens.
    float32_sum: outputs are weighted and summed in float32.
    float32_logits: the router's logits are computed in float32.
    random: tokens are routed to random experts, to measure speed under an even load.
    gather_gradients: the gradient of sorting is a gather, instead of the scatter that JAX derives.
    hidden_gradient: the gradient of the weights is of the experts' hidden values, where that is exact and tokens are
      not sent to other devices.
  """

  method: Literal["dense", "capacity", "dropless"] = "dropless"
  capacity: float = 1.0
  buffer: float | None = None
  wi: GroupedMatmul = field(default_factory=GroupedMatmul)
  wo: GroupedMatmul = field(default_factory=GroupedMatmul)
  merge_gate_up: bool = False
  carrier: RaggedAllToAll | None = None
  float32_sum: bool = True
  float32_logits: bool = False
  random: bool = False
  gather_gradients: bool = True
  hidden_gradient: bool = True

  @property
  def drops(self) -> bool:
    """Whether tokens can be dropped."""
    return self.method == "capacity" or self.buffer is not None

  @property
  def sends(self) -> bool:
    """Whether tokens are sent by a ragged all-to-all, and not all-gathered."""
    return self.method == "dropless" and self.carrier is not None

  def room(self, devices: int) -> float:
    """Rows that a device has a buffer for, relative to an even load of so many devices."""
    return min(devices, self.buffer or (_ROOM if self.sends else devices))

  def __call__(
    self,
    experts: Experts,
    x: jax.Array,
    routing: Routing,
    first: jax.typing.ArrayLike,
    count: int,
    total: int,
    weigh_inputs: bool,
    over: tuple[str, ...] = (),
    parts: int = 1,
  ) -> tuple[jax.Array, jax.Array]:
    """Output [B,S,E] of `count` of `total` experts, from number `first` on, and how many of their tokens were dropped.

    Weights multiply the experts' outputs, or with `weigh_inputs` their inputs. With mesh axes `over`, tokens are sent
    between the devices along them: each has `count` experts and its own tokens, and the output is that of all experts.
    """
    if over:
      return self._dropless(experts, x, routing, count, total, weigh_inputs, parts, over)
    local = routing.experts - first
    own = (local >= 0) & (local < count)
    part = Routing(jnp.where(own, local, count), jnp.where(own, routing.weights, 0))
    method: Callable[..., tuple[jax.Array, jax.Array]] = {
      "dense": self._dense,
      "capacity": self._capacity,
      "dropless": self._dropless,
    }[self.method]
    return method(experts, x, part, count, total, weigh_inputs, parts)

  def _dense(
    self, experts: Experts, x: jax.Array, part: Routing, count: int, total: int, weigh_inputs: bool, parts: int
  ) -> tuple[jax.Array, jax.Array]:
    B, S, E = x.shape
    selected = jax.nn.one_hot(part.experts, count, dtype=jnp.float32)
    weights = (selected * part.weights[..., None]).sum(2).reshape(B * S, count).T[..., None]
    rows = jnp.broadcast_to(x.reshape(1, B * S, E), (count, B * S, E))
    if weigh_inputs:
      rows, weights = rows * weights.astype(x.dtype), selected.sum(2).reshape(B * S, count).T[..., None]
    y = self._weighted(experts(rows, None, parts), weights).sum(0)
    return y.reshape(B, S, E), jnp.zeros((), jnp.int32)

  def _capacity(
    self, experts: Experts, x: jax.Array, part: Routing, count: int, total: int, weigh_inputs: bool, parts: int
  ) -> tuple[jax.Array, jax.Array]:
    B, S, E = x.shape
    K = part.experts.shape[2]
    capacity = min(math.ceil(S * K / total * self.capacity), S)
    expert = part.experts.reshape(B, S * K)
    queue = jax.nn.one_hot(expert, count, dtype=jnp.int32).cumsum(1)
    slot = jnp.take_along_axis(queue, jnp.minimum(expert, count - 1)[..., None], axis=2)[..., 0] - 1
    fits = (expert < count) & (slot < capacity)
    # The token in each slot of each expert; S for an empty slot.
    row, token = jnp.arange(B)[:, None], jnp.arange(S * K)[None] // K
    where = row, jnp.where(fits, expert, count), slot
    occupant = jnp.full((B, count, capacity), S).at[where].set(jnp.broadcast_to(token, (B, S * K)), mode="drop")
    rows = x.at[jnp.arange(B)[:, None, None], occupant].get(mode="fill", fill_value=0)
    weights, scale = jnp.where(fits, part.weights.reshape(B, S * K), 0), None
    if weigh_inputs or (self.hidden_gradient and experts.exact):
      scale = jnp.zeros((B, count, capacity)).at[where].set(weights, mode="drop")
    if weigh_inputs:
      assert scale is not None
      rows, weights, scale = rows * scale[..., None].astype(x.dtype), fits.astype(jnp.float32), None
    if scale is not None:
      weights, scale = jax.lax.stop_gradient(weights), scale.swapaxes(0, 1).reshape(count, B * capacity)
    out = experts(rows.swapaxes(0, 1).reshape(count, B * capacity, E), None, parts, scale)
    out = out.reshape(count, B, capacity, E)
    back = out.at[jnp.where(fits, expert, count), row, slot].get(mode="fill", fill_value=0)
    y = self._weighted(back, weights[..., None]).reshape(B, S, K, E).sum(2)
    return y, ((expert < count) & ~fits).sum()

  def _dropless(
    self,
    experts: Experts,
    x: jax.Array,
    part: Routing,
    count: int,
    total: int,
    weigh_inputs: bool,
    parts: int,
    over: tuple[str, ...] = (),
  ) -> tuple[jax.Array, jax.Array]:
    B, S, E = x.shape
    K = part.experts.shape[2]
    known = total if over else count  # number of experts here; tokens of other experts are sorted behind them
    expert, weights = part.experts.reshape(-1), part.weights.reshape(-1, 1)
    order = jnp.argsort(expert, stable=True)
    slot = jnp.argsort(order)
    wanted = jnp.bincount(expert, length=known).astype(jnp.int32)
    rows = expert.size if over else self._row_capacity(expert.size, count / total)
    move = _move if self.gather_gradients else _gather
    order = order[:rows]
    sorted_rows = move(x.reshape(B * S, E), order, slot, K)
    if weigh_inputs:
      sorted_rows, weights = sorted_rows * weights[order].astype(x.dtype), (expert < known)[:, None]
    if over:
      out, sent = self._send(experts, sorted_rows, wanted.reshape(-1, count), parts, over)
    else:
      sizes, scale = jnp.diff(jnp.minimum(jnp.cumsum(wanted), rows), prepend=0), None
      if self.hidden_gradient and experts.exact and not weigh_inputs:
        weights, scale = jax.lax.stop_gradient(weights), move(weights, order, slot, 1)[:, 0]
      out, sent = experts(sorted_rows, sizes, parts, scale), sizes.sum()
    y = self._weighted(move(out, slot, order, 1), weights).reshape(B, S, K, E).sum(2)
    return y, wanted.sum() - sent

  def _send(
    self, experts: Experts, x: jax.Array, wanted: jax.Array, parts: int, over: tuple[str, ...]
  ) -> tuple[jax.Array, jax.Array]:
    """Outputs of rows [M,E], sorted by expert, `wanted` [D,X] for each device and expert, and how many were sent."""
    devices = wanted.shape[0]
    least = _LEAST_ROOM if self.buffer is None else 0
    capacity = min(x.shape[0] * devices, max(math.ceil(x.shape[0] * self.room(devices)), least))
    run = partial(self._round, parts, capacity, over)
    out = run(experts, x, wanted, 0)
    if self.buffer is not None or capacity == x.shape[0] * devices:
      return out, plan_exchange(wanted, capacity, over).there.sizes.sum()
    graph, state, others = nnx.split(experts, _is_inexact, ...)
    # The same number on all devices of the mesh, even those that do not take part in this exchange.
    rounds = jax.lax.pmax(-(-jax.lax.psum(wanted.sum(1), over).max() // capacity), _mesh_axes())
    again = partial(_with_weights, graph, run)
    return add_further_rounds(again, out, (state, x), (others, wanted), rounds), wanted.sum()

  def _round(
    self,
    parts: int,
    capacity: int,
    over: tuple[str, ...],
    experts: Experts,
    x: jax.Array,
    wanted: jax.Array,
    number: jax.typing.ArrayLike,
  ) -> jax.Array:
    """Outputs of the rows that one round sends; the others are zeros."""
    assert self.carrier is not None
    exchange = plan_exchange(wanted, capacity, over, number)
    out = experts(self.carrier.dispatch(x, exchange, capacity, over), exchange.sizes, parts)
    return self.carrier.combine(out, exchange, x.shape[0], over)

  def _row_capacity(self, rows: int, share: float) -> int:
    """Capacity of a device in rows: at most `rows`, of which it gets `share` under an even load."""
    return rows if self.buffer is None else min(rows, math.ceil(rows * share * self.buffer))

  def _weighted(self, out: jax.Array, weights: jax.Array) -> jax.Array:
    dtype = jnp.float32 if self.float32_sum else out.dtype
    return out.astype(dtype) * weights.astype(dtype)


# What a device that must receive all rows receives in one round: relative to an even load, and rows at least.
_ROOM = 2.0
_LEAST_ROOM = 1024


def _with_weights(
  graph: Any, run: Callable[..., jax.Array], operands: tuple[Any, jax.Array], others: tuple[Any, jax.Array], number: Any
) -> jax.Array:
  (state, x), (rest, wanted) = operands, others
  return run(nnx.merge(graph, state, rest, copy=True), x, wanted, number)


def _is_inexact(path: Any, variable: Any) -> bool:
  return jnp.issubdtype(variable.get_value().dtype, jnp.inexact)


def _mesh_axes() -> tuple[str, ...]:
  """All axes of the mesh inside `shard_map`."""
  return jax.sharding.get_abstract_mesh().axis_names


def _gather(x: jax.Array, rows: jax.Array, back: jax.Array, copies: int) -> jax.Array:
  """Rows of x repeated `copies` times each, by index; zeros for an index out of range."""
  return x.at[rows // copies].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _move(x: jax.Array, rows: jax.Array, back: jax.Array, copies: int) -> jax.Array:
  """The same where `back` is the inverse of `rows`, so that the gradient is a gather too."""
  return _gather(x, rows, back, copies)


def _move_forward(
  x: jax.Array, rows: jax.Array, back: jax.Array, copies: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _gather(x, rows, back, copies), (rows, back)


def _move_backward(copies: int, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None, None]:
  spread = _gather(grad, saved[1], saved[0], 1)
  return spread.reshape(-1, copies, grad.shape[-1]).sum(1), None, None


_move.defvjp(_move_forward, _move_backward)
