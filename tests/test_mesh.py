"""Meshes, the table of logical axes, and topologies; no step is run."""

from math import prod

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from maxtext import ConfigError, load_config
from maxtext.configs.derived import parallelism
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.reduce_scatter import first_stage
from maxtext.mesh.rules import LOGICAL_AXES, Rules, num_shards_of
from maxtext.mesh.topology import Topology
from maxtext.models.build import abstract_model
from maxtext.planner.published_runs import published_run
from tests.support import tiny

AXES = tiny().mesh_axes
TABLE = [[name, axes] for name, axes in tiny().logical_axis_rules]


def mesh(**axes):
  sizes = {f"ici_{name}_parallelism": size for name, size in axes.items()}
  return make_mesh(tiny(**({"ici_fsdp_parallelism": 1} | sizes)), jax.devices()[:8])


def changed(name, axes):
  return [[n, axes if n == name else a] for n, a in TABLE]


def test_minus_one_takes_what_is_left():
  config = tiny(ici_tensor_parallelism=2)
  assert dict(zip(AXES, parallelism(config, "ici", 8), strict=True))["fsdp"] == 4
  assert dict(zip(AXES, parallelism(config, "dcn", 3), strict=True))["data"] == 3


def test_a_dimension_takes_the_axes_that_divide_it():
  rules, m = Rules.parse(TABLE, AXES), mesh(fsdp=2, tensor=4)
  assert rules.partition(m, ("embed", "heads", "head_dim"), (48, 4, 8)) == P("fsdp", "tensor", None)
  assert rules.partition(m, ("embed", "kv_heads", "head_dim"), (48, 2, 8)) == P("fsdp", None, None)
  m = mesh(tensor=2, tensor_sequence=2, fsdp_transpose=2)
  assert rules.partition(m, ("mlp",), (8,)) == P(("tensor", "tensor_sequence", "fsdp_transpose"))
  assert rules.partition(m, ("mlp",), (4,)) == P(("tensor", "tensor_sequence"))


REFUSED = {
  "unknown dimension": ([*TABLE, ["hed", []]], "'hed' is not a logical axis. Did you mean 'heads'?"),
  "unknown axis": (changed("mlp", ["tensr"]), "mlp: 'tensr' is not a mesh axis. Did you mean 'tensor'?"),
  "axis twice": (changed("mlp", ["tensor", "tensor"]), "names a mesh axis twice"),
  "dimension twice": ([*TABLE, ["mlp", []]], "'mlp' occurs twice"),
  "missing": (TABLE[1:], "lacks layers"),
  "no pair": ([*TABLE, "mlp"], "'mlp' is not a pair"),
}


@pytest.mark.parametrize(("table", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_tables_with_mistakes_are_refused(table, message):
  with pytest.raises(ConfigError) as error:
    Rules.parse(table, AXES)
  assert message in str(error.value)


def test_an_axis_that_two_dimensions_name_splits_the_first_of_the_table_that_it_can():
  rules, m = Rules.parse(TABLE, AXES), mesh(fsdp_transpose=8)
  assert rules.partition(m, ("embed", "mlp"), (48, 80)) == P(None, "fsdp_transpose")
  assert rules.partition(m, ("embed", "heads", "head_dim"), (48, 4, 8)) == P("fsdp_transpose", None, None)
  assert rules.partition(m, ("heads", "head_dim", "embed"), (4, 8, 48)) == P(None, None, "fsdp_transpose")
  assert rules.partition(m, ("embed", "embed"), (48, 48)) == P("fsdp_transpose", None)
  own = Rules.parse(changed("mlp", ["fsdp"]), AXES)
  assert own.partition(mesh(fsdp=8), ("embed", "mlp"), (48, 80)) == P(None, "fsdp")


def test_no_weight_of_a_published_run_stays_whole():
  run = published_run("v6e-256-llama2-70b-4k-bf16-20250321")  # its 256 devices divide no number of heads
  config = load_config(**run.planned_keys | {"gcs_metrics": False})
  sizes = dict(zip(config.mesh_axes, parallelism(config, "ici", run.chips), strict=True))
  model, m = abstract_model(config), AbstractMesh(tuple(sizes.values()), tuple(sizes))
  rules = Rules.parse(config.logical_axis_rules, config.mesh_axes)
  for path, weight in model.params.items():
    parts = rules.partition(m, model.logical_axes[path], weight.shape)
    assert weight.size < 1e6 or prod(num_shards_of(m, part) for part in parts) == m.size, path


def test_every_logical_axis_has_a_rule():
  assert {name for name, _ in Rules.parse(TABLE, AXES).pairs} == set(LOGICAL_AXES)


def test_topologies_know_their_shape_and_wrap():
  assert Topology.named("v5p-128") == Topology("v5p", (4, 4, 4))
  assert Topology.named("v5p-128").wrap == (True, True, True)
  assert Topology.named("v5p-16").wrap == (False, False, False)
  assert Topology.named("v5e-256", 199).wrap == (True, True, False)
  assert Topology.named("v6e-128").wrap == (False, True, False)
  assert Topology.named("h100-16") == Topology("h100", (16,))
  with pytest.raises(ConfigError, match="compile_topology=h100-many: write the number of GPUs, as in h100-8"):
    Topology.named("h100-many")
  with pytest.raises(ConfigError, match="compile_topology=v5p-129: v5p comes in sizes 8, 16, 32"):
    Topology.named("v5p-129")
  with pytest.raises(ConfigError, match="compile_topology=v9-8: the chip is one of v4, v5e, v5p, v6e"):
    Topology.named("v9-8")


@pytest.mark.aot
def test_a_mesh_that_would_split_the_torus_is_refused_unless_allowed():
  pytest.importorskip("libtpu")
  devices, sizes = Topology.named("v6e-256").devices(), {"ici_fsdp_parallelism": 64, "ici_expert_parallelism": 4}
  with pytest.raises(ConfigError, match=r"fsdp=64 x expert=4 .* allow_split_physical_axes=true"):
    make_mesh(tiny(**sizes), devices)
  allowed = make_mesh(tiny(**sizes, allow_split_physical_axes=True), devices)
  assert (allowed.shape["fsdp"], allowed.shape["expert"]) == (64, 4)


RING = {"custom_mesh": "hybrid_ring_64x4", "ici_fsdp_parallelism": 64, "ici_tensor_parallelism": 4}


@pytest.mark.aot
@pytest.mark.parametrize(("name", "outer", "inner"), [("hybrid_ring_64x4", 64, 4), ("hybrid_ring_32x8", 32, 8)])
def test_both_axes_of_a_hybrid_ring_are_rings_of_neighbours(name, outer, inner):
  pytest.importorskip("libtpu")
  keys = {"custom_mesh": name, "ici_fsdp_parallelism": outer, "ici_tensor_parallelism": inner}
  devices = Topology.named("v6e-256", 2).devices()
  config = tiny(**keys, dcn_data_parallelism=2)
  grid = make_mesh(config, devices).devices.reshape(2, outer, inner)
  assert {d.id for d in grid.flat} == {d.id for d in devices}
  for one in grid:
    assert len({d.slice_index for d in one.flat}) == 1
    for ring in one:  # the last is next to the first
      assert all(_distance(a, b) == 1 for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
    across = one[:, 0]  # corners of rectangles that touch
    assert all(_distance(a, b) <= inner // 2 for a, b in zip(across, [*across[1:], across[0]], strict=True))


def _distance(a, b):
  return sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True))


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"custom_mesh": "hybrid_ring_64x5"}, "is not a layout. Did you mean 'hybrid_ring_64x4'"),
    ({"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, "for two mesh axes of 64 and 4 devices"),
    ({}, "for slices of 16 x 16 chips"),
  ],
)
def test_a_hybrid_ring_that_cannot_be_is_named(changes, says):
  devices = jax.devices()[:8] if "ici_fsdp_parallelism" in changes else jax.devices()[:1] * 256
  with pytest.raises(ConfigError, match=says):
    make_mesh(tiny(**RING | changes), devices)


@pytest.mark.aot
@pytest.mark.parametrize(
  ("topology", "axes", "spec", "first"),
  [
    ("v6e-256", {"fsdp": 256}, P("fsdp"), 16),
    ("v5p-128", {"fsdp": 64}, P("fsdp"), 16),
    ("v5p-128", {"fsdp": 16, "expert": 4}, P(("fsdp", "expert")), 16),
    ("v5p-128", {"fsdp": 16, "tensor": 4}, P("fsdp", "tensor"), 4 * 4),
    ("v5p-128", {"fsdp": 4, "tensor": 16}, P("fsdp", "tensor"), None),
    ("v5p-128", {"fsdp": 16, "tensor_sequence": 4}, P("fsdp", "tensor_sequence"), 4 * 4),
    ("tpu7x-4x4x4", {"fsdp": 128}, P("fsdp"), 16),
  ],
)
def test_gradients_are_scattered_over_all_torus_axes_but_one_first(topology, axes, spec, first):
  pytest.importorskip("libtpu")
  sizes = {f"ici_{name}_parallelism": size for name, size in axes.items()}
  config = tiny(**{"ici_fsdp_parallelism": 1} | sizes, allow_split_physical_axes=True)
  m = make_mesh(config, Topology.named(topology).devices())
  found = first_stage(m, spec, {"data", "fsdp", "expert"})
  if first is None:
    assert found is None
    return
  shape = (1024, 1024)
  assert shape[0] * shape[1] // (found.shard_shape(shape)[0] * found.shard_shape(shape)[1]) == first
  assert list(found.mesh.devices.flat) == list(m.devices.flat), "the same order: one program"


@pytest.mark.aot
def test_gradients_are_scattered_over_slices_first():
  pytest.importorskip("libtpu")
  config = tiny(ici_fsdp_parallelism=16, dcn_fsdp_parallelism=2, allow_split_physical_axes=True)
  m = make_mesh(config, Topology.named("v6e-16", 2).devices())
  found = first_stage(m, P("fsdp"), {"data", "fsdp"})
  assert [size for size in found.mesh.devices.shape if size > 1] == [2, 4, 4]
  assert found.shard_shape((1024,)) == (1024 // 8,)
