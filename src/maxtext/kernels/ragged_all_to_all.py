"""Ragged all-to-all: every device sends a different number of rows to each other device.

`jax.lax.ragged_all_to_all` is the fast path, on TPUs and GPUs. `reference` computes the same by gathering all rows, for
backends without that collective, such as CPUs.

Shapes: M rows to send, R rows of capacity, D devices, G groups of rows for each device, W width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Kernel = Literal["reference", "ragged_all_to_all"]


class Slices(NamedTuple):
  """The slices that a device sends: G for each device, [D*G] in all.

  Attributes:
    starts: first row of each slice on this device.
    sizes: number of rows of each slice.
    places: first row of each slice on the receiving device.
    arriving: number of rows of the slices that this device receives.
  """

  starts: jax.Array
  sizes: jax.Array
  places: jax.Array
  arriving: jax.Array


class ExchangePlan(NamedTuple):
  """Dispatch of rows to the devices of their groups, where they arrive sorted by group, and combine of the results.

  Attributes:
    there: slices of the dispatch.
    back: slices of the combine, which returns the same rows.
    sizes: [G] rows of each group of this device, from all devices.
  """

  there: Slices
  back: Slices
  sizes: jax.Array


def plan_exchange(
  counts: jax.Array, room: int, axes: tuple[str, ...], number: jax.typing.ArrayLike = 0
) -> ExchangePlan:
  """The plan for rows that are sorted by receiving device and group, `counts` [D,G] of each. Runs inside `shard_map`.

  On arrival rows are sorted by group, and within a group by the device that sent them. A round sends as many as the
  receiving device has capacity for, `room`: round `number` skips those of the rounds before it. `axes` are the mesh
  axes of the devices that take part, in the order that numbers them.
  """
  counts = jax.lax.all_gather(counts, axes)  # by sender, receiver and group
  senders, receivers, groups = counts.shape
  starts = _starts(counts.reshape(senders, -1)).reshape(counts.shape)
  places = _starts(counts.transpose(1, 2, 0).reshape(receivers, -1)).reshape(receivers, groups, senders)
  places = places.transpose(2, 0, 1) - number * room
  begins, ends = jnp.clip(-places, 0, counts), jnp.clip(room - places, 0, counts)
  starts, places, sent = starts + begins, jnp.clip(places, 0, room), ends - begins
  own = jax.lax.axis_index(axes)
  there = Slices(starts[own], sent[own], places[own], sent[:, own])
  back = Slices(places[:, own], sent[:, own], starts[:, own], sent[own])
  there, back = jax.tree.map(jnp.ravel, (there, back))
  return ExchangePlan(there, back, sent[:, own].sum(0))


@dataclass(frozen=True)
class RaggedAllToAll:
  """Sends rows to the devices of their groups and back.

  Attributes:
    kernel: which implementation of the collective.
  """

  kernel: Kernel = "reference"

  def dispatch(self, x: jax.Array, exchange: ExchangePlan, room: int, axes: tuple[str, ...]) -> jax.Array:
    """Rows [M,W] to [R,W], zeros where no row arrived."""
    return _transfer(self, (x.shape[0], room), axes, x, exchange.there, exchange.back)

  def combine(self, x: jax.Array, exchange: ExchangePlan, rows: int, axes: tuple[str, ...]) -> jax.Array:
    """Rows [R,W] to [M,W], zeros for those that were not sent."""
    return _transfer(self, (x.shape[0], rows), axes, x, exchange.back, exchange.there)


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
  """`jax.lax.ragged_all_to_all` as documented, by an all-gather from which each device takes its rows."""
  del send_sizes  # the receivers know their sizes
  starts, places = (jax.lax.all_to_all(a, axis_name, 0, 0, tiled=True) for a in (input_offsets, output_offsets))
  devices = jax.lax.axis_size(axis_name)
  sender = jnp.repeat(jnp.arange(devices), starts.size // devices)
  row = jnp.arange(output.shape[0])[:, None]
  inside = (row >= places) & (row < places + recv_sizes)
  source = jnp.where(inside, sender * operand.shape[0] + starts + row - places, 0).sum(1)
  rows = jax.lax.all_gather(operand, axis_name, tiled=True)[source]
  return jnp.where(inside.any(1).reshape(-1, *(1,) * (output.ndim - 1)), rows, output)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _transfer(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], x: jax.Array, forward: Slices, reverse: Slices
) -> jax.Array:
  """The transfer; its gradient is the transfer in the opposite direction."""
  collective = {"reference": reference, "ragged_all_to_all": jax.lax.ragged_all_to_all}[carrier.kernel]
  return collective(x, jnp.zeros((rows[1], *x.shape[1:]), x.dtype), *forward, axis_name=axes)


def _transfer_forward(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], x: jax.Array, forward: Slices, reverse: Slices
) -> tuple[jax.Array, tuple[Slices, Slices]]:
  return _transfer(carrier, rows, axes, x, forward, reverse), (forward, reverse)


def _transfer_backward(
  carrier: RaggedAllToAll, rows: tuple[int, int], axes: tuple[str, ...], slices: tuple[Slices, Slices], grad: jax.Array
) -> tuple[jax.Array, None, None]:
  forward, reverse = slices
  return _transfer(carrier, rows[::-1], axes, grad, reverse, forward), None, None


_transfer.defvjp(_transfer_forward, _transfer_backward)


def _starts(sizes: jax.Array) -> jax.Array:
  return jnp.cumsum(sizes, axis=1) - sizes
