"""The train step of every named model lowers for a topology that would hold it."""

import json
from pathlib import Path

import jax
import pytest

from maxtext import load_config
from maxtext.plan.compile import program_for

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

PARAMETERS = json.loads((Path(__file__).parent / "data" / "parameters.json").read_text())
BYTES_OF_A_PARAMETER = 12  # float32, with two moments
TOPOLOGIES = {8: "v5p-8", 64: "v5p-64", 1024: "v5p-1024", 2048: "v5p-2048"}  # by what their name counts
USABLE = 50e9  # of a chip's memory, for the state


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_step_lowers(name):
  wanted = 2 * PARAMETERS[name]["total"] * BYTES_OF_A_PARAMETER / USABLE  # the name counts two for a chip
  topology = TOPOLOGIES[min(size for size in TOPOLOGIES if size >= wanted)]
  program, _ = program_for(
    load_config(name, compile_topology=topology, dataset_type="synthetic", max_target_length=1024)
  )
  text = program.lower().as_text()
  assert f"num_partitions = {program.model.how.mesh.size}" in text
  local = sum(_local(a) for a in jax.tree.leaves(program.state))
  assert local < USABLE, "nothing large is held whole"


def _local(array):
  size = array.dtype.itemsize
  for length in array.sharding.shard_shape(array.shape):
    size *= length
  return size
