"""Rows sent between devices arrive where they belong, and their results where they came from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxtext.kernels.ragged_all_to_all import RaggedAllToAll, plan_exchange, reference

pytestmark = pytest.mark.mesh

AXES = ("a", "b")
SPLIT = PartitionSpec(AXES)
D, G, W = 4, 3, 2


def on_devices(function, sizes=(2, 2)):
  mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 2)
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))


def test_the_example_of_the_documentation():
  """Of `jax.lax.ragged_all_to_all`, which no CPU runs."""
  operand, output = jnp.array([1, 2, 2, 3, 4, 0]), jnp.zeros(8, int)
  offsets = [jnp.array(a) for a in ([0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1])]
  found = on_devices(partial(reference, axis_name=AXES), (2, 1))(operand, output, *offsets)
  assert found.tolist() == [1, 3, 0, 0, 2, 2, 4, 0]


@pytest.mark.parametrize("room", [40, 12])
def test_rows_go_to_their_group_and_back(room):
  rng = np.random.default_rng(0)
  counts = rng.integers(0, 5, (D, D, G))  # from each device, to each device, of each of its groups
  M = counts.sum((1, 2)).max()
  names = [[(i, j, g, n) for j in range(D) for g in range(G) for n in range(counts[i, j, g])] for i in range(D)]
  rows = rng.standard_normal((D, M, W)).astype(np.float32)
  there = [[rows[i, names[i].index((i, j, g, n))] for g in range(G) for i in range(D) for n in range(counts[i, j, g])]
           for j in range(D)]  # fmt: skip
  assert (max(map(len, there)) > room) == (room == 12), "in one of the two cases some find no room"

  def local(x, counts):
    exchange = plan_exchange(counts[0], room, AXES)
    arrived, again = jax.vjp(lambda x: RaggedAllToAll().dispatch(x, exchange, room, AXES), x[0])
    returned = RaggedAllToAll().combine(arrived, exchange, M, AXES)
    later = plan_exchange(counts[0], room, AXES, 1)
    rest = RaggedAllToAll().combine(RaggedAllToAll().dispatch(x[0], later, room, AXES), later, M, AXES)
    return arrived[None], returned[None], rest[None], again(arrived)[0][None], exchange.sizes[None]

  arrived, returned, rest, gradient, sizes = on_devices(local)(rows, counts)
  for j in range(D):
    kept = min(len(there[j]), room)
    assert sizes[j].sum() == kept
    np.testing.assert_array_equal(arrived[j, :kept], there[j][:room])
    assert not arrived[j, kept:].any()
  known = {row.tobytes() for row in np.asarray(arrived).reshape(-1, W)}
  for i in range(D):
    came = np.array([row.tobytes() in known for row in rows[i]]) & (np.arange(M) < len(names[i]))
    np.testing.assert_array_equal(returned[i], np.where(came[:, None], rows[i], 0))
    own = np.arange(M) < len(names[i])
    if max(map(len, there)) <= 2 * room:
      np.testing.assert_array_equal((returned + rest)[i], np.where(own[:, None], rows[i], 0), "two rounds send all")
  np.testing.assert_array_equal(gradient, returned)
