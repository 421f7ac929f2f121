"""Rows sent between devices, as many to each as it is to have.

`ragged_all_to_all` of JAX is the fast path, of TPUs and GPUs; `reference` beside it does what JAX documents, by
gathering all rows, for where the compiler has no such collective, as for a CPU.

Shapes: M rows to send, R rows of room, D devices, G groups of rows for each device, W width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Kernel = Literal["reference", "ragged_all_to_all"]


class Slices(NamedTuple):
  """Which rows go where, as a device that sends says it; G slices for each device, [D*G] in all.

  Attributes:
    starts: first row of each slice here.
    sizes: rows of each.
    places: first row of each where it goes.
    arriving: rows of the slices that come from each device.
  """

  starts: jax.Array
  sizes: jax.Array
  places: jax.Array
  arriving: jax.Array


class ExchangePlan(NamedTuple):
  """Rows of groups that belong to devices, brought there sorted by group, and their results back.

  Attributes:
    there: from where rows are to the devices of their groups.
    back: the same rows from there.
    sizes: rows of each group of this device, from all devices [G].
  """

  there: Slices
  back: Slices
  sizes: jax.Array


def plan_exchange(counts: jax.Array, room: int, axes: tuple[str, ...]) -> ExchangePlan:
  """For rows that are sorted by the device [D] and the group [G] that they go to, of which there are counts [D,G].

  On arrival rows of a group stand together, in the order of the devices that they came from. What finds no room is not
  sent. Inside a `shard_map`; `axes` are the mesh axes whose devices take part, in the order that numbers them.
  """
  counts = jax.lax.all_gather(counts, axes)  # by sender, receiver and group
  senders, receivers, groups = counts.shape
  starts = _starts(counts.reshape(senders, -1)).reshape(counts.shape)
  places = _starts(counts.transpose(1, 2, 0).reshape(receivers, -1)).reshape(receivers, groups, senders)
  places = places.transpose(2, 0, 1)
  kept = jnp.clip(room - places, 0, counts)
  own = jax.lax.axis_index(axes)
  there = Slices(starts[own], kept[own], places[own], kept[:, own])
  back = Slices(places[:, own], kept[:, own], starts[:, own], kept[own])
  there, back = jax.tree.map(jnp.ravel, (there, back))
  return ExchangePlan(there, back, kept[:, own].sum(0))


@dataclass(frozen=True)
class RaggedAllToAll:
  """What carries rows.

  Attributes:
    kernel: by which collective.
  """

  kernel: Kernel = "reference"

  def dispatch(self, x: jax.Array, exchange: ExchangePlan, room: int, axes: tuple[str, ...]) -> jax.Array:
    """Rows [M,W] to [R,W], zeros where no row came."""
    return _carried(self, (x.shape[0], room), axes, x, exchange.there, exchange.back)

  def combine(self, x: jax.Array, exchange: ExchangePlan, rows: int, axes: tuple[str, ...]) -> jax.Array:
    """Rows [R,W] to [M,W], zeros for those that were not sent."""
    return _carried(self, (x.shape[0], rows), axes, x, exchange.back, exchange.there)


def reference(
  operand: jax.Array,
  output: jax.Array,
  input_offsets: jax.Array,
  send_sizes: jax.Array,
  output_offsets: jax.Array,
  recv_sizes: jax.Array,
  *,
  axis_name: tuple[str, ...],
) -> jax.Array:
  """`jax.lax.ragged_all_to_all`, by its documentation: every row that arrives is looked up among all rows."""
  del send_sizes  # what others receive
  starts, places = (jax.lax.all_to_all(a, axis_name, 0, 0, tiled=True) for a in (input_offsets, output_offsets))
  devices = jax.lax.axis_size(axis_name)
  sender = jnp.repeat(jnp.arange(devices), starts.size // devices)
  row = jnp.arange(output.shape[0])[:, None]
  inside = (row >= places) & (row < places + recv_sizes)
  source = jnp.where(inside, sender * operand.shape[0] + starts + row - places, 0).sum(1)
  rows = jax.lax.all_gather(operand, axis_name, tiled=True)[source]
  return jnp.where(inside.any(1).reshape(-1, *(1,) * (output.ndim - 1)), rows, output)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _carried(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], x: jax.Array, way: Slices, return_way: Slices
) -> jax.Array:
  """The gradient goes the other way."""
  carry = {"reference": reference, "ragged_all_to_all": jax.lax.ragged_all_to_all}[carrier.kernel]
  return carry(x, jnp.zeros((rows[1], *x.shape[1:]), x.dtype), *way, axis_name=axes)


def _carried_forward(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], x: jax.Array, way: Slices, return_way: Slices
) -> tuple[jax.Array, tuple[Slices, Slices]]:
  return _carried(carrier, rows, axes, x, way, return_way), (way, return_way)


def _carried_backward(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], ways: tuple[Slices, Slices], grad: jax.Array
) -> tuple[jax.Array, None, None]:
  way, return_way = ways
  return _carried(carrier, rows[::-1], axes, grad, return_way, way), None, None


_carried.defvjp(_carried_forward, _carried_backward)


def _starts(sizes: jax.Array) -> jax.Array:
  return jnp.cumsum(sizes, axis=1) - sizes
