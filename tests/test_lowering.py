"""The train step of every named model lowers for a topology that would hold it."""

import json
import re
from pathlib import Path

import jax
import pytest
import yaml

import maxtext.configs
from maxtext import ConfigError, load_config
from maxtext.planner.compile import program_for
from tests.cases import cases

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

MODELS = Path(maxtext.configs.__file__).parent / "models"
PARAMETERS = json.loads((Path(__file__).parent / "data" / "parameters.json").read_text())
BYTES_OF_A_PARAMETER = 12  # float32, with two moments
TOPOLOGIES = {8: "v5p-8", 64: "v5p-64", 1024: "v5p-1024", 2048: "v5p-2048"}  # by what their name counts
USABLE = 50e9  # of a chip's memory, for the state


def largest_of_each_kind():
  """Of the models whose files set the same keys for the same block: others differ from them by values alone."""
  kinds = {}
  for name in sorted(PARAMETERS, key=lambda name: PARAMETERS[name]["total"]):
    keys = yaml.safe_load((MODELS / f"{name}.yml").read_text()) or {}
    kinds[keys.get("decoder_block"), frozenset(keys)] = name
  return set(kinds.values())


def program_of(name):
  wanted = 2 * PARAMETERS[name]["total"] * BYTES_OF_A_PARAMETER / USABLE  # the name counts two for a chip
  topology = TOPOLOGIES[min(size for size in TOPOLOGIES if size >= wanted)]
  keys = {"compile_topology": topology, "dataset_type": "synthetic", "max_target_length": 1024}
  return program_for(load_config(name, **keys))[0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_nothing_large_is_held_whole(name):
  local = sum(_local(a) for a in jax.tree.leaves(program_of(name).state))
  assert local < USABLE


@pytest.mark.parametrize("name", cases(PARAMETERS, gate=largest_of_each_kind()))
def test_the_step_lowers(name):
  program = program_of(name)
  assert f"num_partitions = {program.model.execution.sharding.mesh.size}" in program.lower().as_text()


def test_layouts_of_attention_reach_its_kernel():
  keys = {"compile_topology": "v5e-4", "attention": "flash", "sa_q_layout": "SEQ_MINOR"}
  text = program_for(load_config("small-llama", **keys))[0].lower().as_text()
  assert set(re.findall(r"([qkv])_layout\S*: (\d)", text)) == {("q", "2"), ("k", "1"), ("v", "1")}
  with pytest.raises(ConfigError, match="sa_v_layout=sideways must be HEAD_DIM_MINOR or SEQ_MINOR"):
    program_for(load_config("small-llama", **keys, sa_v_layout="sideways"))


def _local(array):
  size = array.dtype.itemsize
  for length in array.sharding.shard_shape(array.shape):
    size *= length
  return size
