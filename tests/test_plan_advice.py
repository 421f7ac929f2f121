"""Advice of a plan, and its page: sentences for its own numbers, layers in the order of the schedule, the torus."""

import html
import re
from dataclasses import replace

import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxtext import load_config
from maxtext.mesh.topology import Topology
from maxtext.planner.compile import program_for
from maxtext.planner.cost_model import forward_costs, policy_that_fits, saved_bytes
from maxtext.planner.estimate import Estimate, Loop, Operation
from maxtext.planner.html import as_html
from maxtext.planner.plan import Memory, Plan
from maxtext.planner.text import as_text
from maxtext.planner.torus import TorusSide, torus_sides
from tests.support import TINY

GIB = 2**30
MATMUL = Operation("fusion.1", "MLP gate and up", "compute", "layers/mlp.py:62", 4, 6.0)
AGAIN = replace(MATMUL, label="MLP gate and up, again", seconds=2.0, recomputed=True)
GATHER = Operation("all-gather", "MLP down", "collective", "layers/mlp.py:62", 4, 1.0, 8, ("fsdp",))
UPDATE = Operation("fusion.2", "optimizer update", "compute", "training/step.py:88", 1, 1.0)


def planned(*operations, used=8, policy=("minimal", 2 * GIB), torus=(), loops=()):
  """A plan of a device of 16 GiB, half of which are temporaries."""
  memory = Memory(GIB, 2 * GIB, 0, used * GIB // 2, used * GIB, 16 * GIB)
  estimate = Estimate(operations, loops)
  return Plan("m", "v5e-4", 4, {"fsdp": 4}, 64, memory, 0, 1.0, 1.0, 1.0, estimate, True, torus, policy)


def test_each_sentence_is_of_a_share_and_the_largest_comes_first():
  found = planned(MATMUL, AGAIN, GATHER, UPDATE).advice()
  assert [sentence.split("%")[0] for sentence in found] == ["22", "10", "10"]
  assert "8 GiB are free: remat_policy=minimal would keep about 2 GiB more in memory" in found[0]
  (waiting,) = (s for s in found if "collectives over fsdp" in s)
  assert "all-gather, MLP down: a larger per_device_batch_size (twice fits)" in waiting
  assert any("optimizer update" in sentence and "gradient_accumulation_steps" in sentence for sentence in found)


def test_what_the_numbers_do_not_support_is_not_said():
  assert planned(MATMUL, policy=None).advice() == []
  assert planned(MATMUL, AGAIN, policy=None).advice() == [], "no policy that saves more fits"
  assert planned(MATMUL, AGAIN, GATHER, UPDATE, used=17).advice() == [], "it does not fit"
  assert planned(replace(MATMUL, seconds=600.0), AGAIN, GATHER, UPDATE).advice() == [], "too little to mention"
  (waiting,) = planned(MATMUL, GATHER, used=12).advice()
  assert "twice fits" not in waiting
  (waiting,) = planned(MATMUL, replace(GATHER, axes=("tensor",))).advice()
  assert "fewer devices along tensor" in waiting
  (waiting,) = planned(MATMUL, replace(GATHER, axes=("fsdp", "expert"))).advice()
  assert waiting.endswith("most for all-gather, MLP down"), "weights or tokens: the axes do not say"


def test_advice_is_in_the_text_and_on_the_page_beside_a_layer_and_the_torus():
  backward = [AGAIN, replace(MATMUL, label="MLP gate and up, backward")]
  found = planned(
    MATMUL, GATHER, *backward, UPDATE, torus=[TorusSide(2, False, ("fsdp",)), TorusSide(16, True, ("fsdp",))],
    loops=[Loop(4, [MATMUL, GATHER]), Loop(4, backward), Loop(2, [MATMUL, GATHER, *backward])],
  )  # fmt: skip
  text, page = as_text(found), as_html(found)
  assert "--search tries such changes" in text
  assert all(f"  {sentence}" in text and f"<li>{html.escape(sentence)}</li>" in page for sentence in found.advice())
  forward, back = re.findall(r'<div class="stack timeline">(.*?)</div><p class="note">(.*?)</p>', page)
  assert re.findall('title="(.*?): ', forward[0]) == ["MLP gate and up", "MLP down"]
  assert forward[1] == "forward: 1.75 s, 4 times a step"
  assert re.findall('title="(.*?): ', back[0]) == ["MLP gate and up, again", "MLP gate and up, backward"]
  assert back[1].startswith("backward")
  assert page.count("<circle") == 2 * 16
  assert page.count("<path") == 16 + 2 * 15
  assert "fsdp=4 along 2 chips and 16 chips in a ring" in page
  assert "longer sides" not in page
  long = replace(found, axes={"data": 2, "fsdp": 64}, torus=[TorusSide(size, True, ("fsdp",)) for size in (2, 2, 16)])
  page = as_html(long)
  assert page.count("<circle") == 2 * 2 * 4
  assert "data=2 between slices, or within chips; longer sides are drawn with 4 chips" in page


def test_a_mesh_axis_runs_along_the_sides_where_its_devices_are():
  pytest.importorskip("libtpu")
  topology = Topology.named("v5p-128")
  mesh = Mesh(mesh_utils.create_device_mesh((1, 4, 16), topology.devices()), ("data", "expert", "fsdp"))
  sides = torus_sides(mesh, topology)
  assert sorted(side.axes for side in sides) == [("expert",), ("fsdp",), ("fsdp",)]
  assert all((side.size, side.ring) == (4, True) for side in sides)
  flat = Topology.named("v5p-8")
  sides = torus_sides(Mesh(mesh_utils.create_device_mesh((4,), flat.devices()), ("fsdp",)), flat)
  assert sides == [TorusSide(2, False, ("fsdp",))] * 2, "the third is of a single chip"


def test_the_policy_that_fits_saves_most_of_those_that_do():
  pytest.importorskip("libtpu")
  config = load_config(**TINY, attention="dot_product", compile_topology="v5e-4", remat_policy="full")
  program, _ = program_for(config)
  name, size = policy_that_fits(program, 10**9)
  costs, _ = forward_costs(program)
  every = sum(cost.bytes for tensor, cost in costs.items() if tensor.endswith("_proj") or tensor.startswith("mlpw"))
  assert (name, size) == ("minimal", every // 4)
  fewer, less = policy_that_fits(program, size - 1)
  assert fewer != "minimal"
  assert 0 < less < size
  assert policy_that_fits(program, 0) is None
  minimal, _ = program_for(config.model_copy(update={"remat_policy": "minimal"}))
  assert saved_bytes(costs, minimal.model.execution.remat) == every
  assert policy_that_fits(minimal, 10**9) is None
