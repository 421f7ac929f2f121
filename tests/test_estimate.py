"""The planner's clock, on schedules that are short enough to reckon by hand."""

import re

import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxtext.mesh.topology import Topology
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.schedule import schedule as schedule_of

pytest.importorskip("libtpu")

# A gather of 8 MiB over all chips, fused with products as the TPU compiler writes it: three places of one channel.
GATHER = (
  "all-gather(%part), channel_id=7, replica_groups=[1,CHIPS]<=[CHIPS], dimensions={0}, "
  'metadata={op_name="jit(train_step)/dot_general"}'
)
FUSED = f"""
%begin (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  %gather.1 = bf16[4096,1024]{{1,0}} {GATHER}
  ROOT %mark.1 = bf16[4096,1024]{{1,0}} custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%beside (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  ROOT %gather.2 = bf16[4096,1024]{{1,0}} {GATHER}
}}, execution_thread="sparsecore"

%end (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  %gather.3 = bf16[4096,1024]{{1,0}} {GATHER}
  ROOT %mark.2 = bf16[4096,1024]{{1,0}} custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  %started = bf16[4096,1024]{{1,0}} fusion(%part), kind=kCustom, calls=%begin
  %product = bf16[4096,1024]{{1,0}} fusion(%started), kind=kOutput, calls=%beside, \
backend_config={{"estimated_cycles":"CYCLES"}}
  ROOT %ended = bf16[4096,1024]{{1,0}} fusion(%product), kind=kCustom, calls=%end
}}
"""
CALLED = f"""
%elsewhere (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  ROOT %gather = bf16[4096,1024]{{1,0}} {GATHER}
}}, execution_thread="sparsecore"

ENTRY %main (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  %call-start = ((bf16[512,1024]{{1,0}}), bf16[4096,1024]{{1,0}}) call-start(%part), to_apply=%elsewhere
  %product = bf16[4096,1024]{{1,0}} fusion(%part), kind=kOutput, backend_config={{"estimated_cycles":"CYCLES"}}
  ROOT %call-done = bf16[4096,1024]{{1,0}} call-done(%call-start)
}}
"""
WAITED_FOR = f"""
ENTRY %main (part: bf16[512,1024]) -> bf16[4096,1024] {{
  %part = bf16[512,1024]{{1,0}} parameter(0)
  %gather = bf16[4096,1024]{{1,0}} {GATHER}
  ROOT %product = bf16[4096,1024]{{1,0}} fusion(%gather), kind=kOutput, calls=%elsewhere, \
backend_config={{"estimated_cycles":"CYCLES"}}
}}

%elsewhere (whole: bf16[4096,1024]) -> bf16[4096,1024] {{
  ROOT %whole = bf16[4096,1024]{{1,0}} parameter(0)
}}
"""


@pytest.mark.parametrize("cycles", [1_000, 100_000])
@pytest.mark.parametrize("schedule", [FUSED, CALLED, WAITED_FOR])
@pytest.mark.parametrize(("name", "chips", "links"), [("v5p-16", 8, 3), ("v5p-128", 64, 6), ("v6e-8", 8, 2)])
def test_a_gather_costs_what_its_products_do_not_hide(schedule, cycles, name, chips, links):
  topology = Topology.named(name)
  mesh = Mesh(mesh_utils.create_device_mesh((chips,), topology.devices()), ("fsdp",))
  program = CompiledProgram.parse(schedule.replace("CYCLES", str(cycles)).replace("CHIPS", str(chips)))
  ((gather, times),) = program.collectives()
  assert (gather.asynchronous, times) == (schedule is not WAITED_FOR, 1)
  assert gather.collective.op_name == "jit(train_step)/dot_general"
  found = estimate(schedule_of(program, topology, mesh), Calibration(compute=0.5, link=1.0)).seconds_by_kind()
  product = 0.5 * cycles / topology.chip.clock
  travel = (chips - 1) / chips * 4096 * 1024 * 2 / (links * topology.chip.link_bandwidth)
  assert found["compute"] == pytest.approx(product)
  assert found["collective"] == pytest.approx(travel if schedule is WAITED_FOR else max(travel - product, 0))


GROUPED = """
ENTRY %main (rows: bf16[8192,4096], weights: bf16[8,4096,2048], grads: bf16[8192,2048]) -> bf16[8,4096,2048] {
  %rows = bf16[8192,4096]{1,0} parameter(0)
  %weights = bf16[8,4096,2048]{2,1,0} parameter(1)
  %grads = bf16[8192,2048]{1,0} parameter(2)
  %gmm.1 = bf16[8192,2048]{1,0} custom-call(%sizes, %rows, %weights), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[16]{0}, bf16[8192,4096]{1,0}, bf16[8,4096,2048]{2,1,0}}
  ROOT %tgmm.1 = bf16[8,4096,2048]{2,1,0} custom-call(%sizes, %rows, %grads), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[16]{0}, bf16[4096,8192]{1,0}, bf16[8192,2048]{1,0}}
}
"""


@pytest.mark.parametrize(
  ("name", "dtype", "faster"),
  [
    ("v5p-8", "bf16", 1),
    ("v5p-8", "s8", 2),
    ("v6e-8", "f8e4m3fn", 1),  # its matrix units take no such operands
    ("tpu7x-8", "bf16", 1),
    ("tpu7x-8", "f8e4m3fn", 2),
  ],
)
def test_grouped_products_cost_what_their_rows_do(name, dtype, faster):
  """Each row meets the weights of one expert, forward and for the gradient of the weights."""
  topology = Topology.named(name)
  devices, chip = topology.devices(), topology.chip
  mesh = Mesh(mesh_utils.create_device_mesh((len(devices),), devices), ("fsdp",))
  program = CompiledProgram.parse(GROUPED.replace("bf16[", f"{dtype}["))
  found = estimate(schedule_of(program, topology, mesh, filled_rows=0.75), Calibration(grouped=0.5))
  operations = 2 * 2 * 8192 * 4096 * 2048 / faster
  assert found.seconds_by_kind()["kernel"] == pytest.approx(
    0.75 * operations / (0.5 * chip.flops / chip.devices), rel=1e-3
  )


IN_PLACE = """
ENTRY %main (q: bf16[32,12,128], keys: bf16[28,32,2,1536,128]) -> bf16[28,32,2,1536,128] {
  %q = bf16[32,12,128]{2,1,0} parameter(0)
  %keys = bf16[28,32,2,1536,128]{4,3,2,1,0} parameter(1)
  ROOT %attend.1 = bf16[28,32,2,1536,128]{4,3,2,1,0} custom-call(%q, %keys), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[32,12,128]{2,1,0}, bf16[28,32,2,1536,128]{4,3,2,1,0}}ESTIMATE
}
"""
IN_PLACE_ESTIMATE = ', backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"25165824"}}}'


@pytest.mark.parametrize(
  ("stated", "moved"), [(IN_PLACE_ESTIMATE, 25165824), ("", 2 * (32 * 12 * 128 + 2 * 28 * 32 * 2 * 1536 * 128))]
)
def test_a_kernel_that_works_in_place_moves_what_it_says(stated, moved):
  """One layer of a stack; without its word, all operands and results."""
  topology = Topology.named("v5p-8")
  mesh = Mesh(mesh_utils.create_device_mesh((4,), topology.devices()), ("data",))
  program = CompiledProgram.parse(IN_PLACE.replace("ESTIMATE", stated))
  found = estimate(schedule_of(program, topology, mesh), Calibration())
  assert found.seconds_by_kind()["kernel"] == pytest.approx(moved / topology.chip.hbm_bandwidth)


BETWEEN_SLICES = """
ENTRY %main (grads: bf16[4096,1024]) -> bf16[4096,1024] {
  %grads = bf16[4096,1024]{1,0} parameter(0)
  %token = token[] after-all()
  %recv.1 = (bf16[4096,1024]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.1 = (bf16[4096,1024]{1,0}, u32[], token[]) send(%grads, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %product = bf16[4096,1024]{1,0} fusion(%grads), kind=kOutput, backend_config={"estimated_cycles":"100000"}
  %recv-done.1 = (bf16[4096,1024]{1,0}, token[]) recv-done(%recv.1), channel_id=1
  ROOT %sum = bf16[4096,1024]{1,0} get-tuple-element(%recv-done.1), index=0
}
"""


def test_a_sum_between_slices_goes_over_their_network_beside_products():
  topology = Topology.named("v5e-4", 2)
  mesh = Mesh(mesh_utils.create_hybrid_device_mesh((1, 4), (2, 1), topology.devices()), ("data", "fsdp"))
  found = estimate(
    schedule_of(CompiledProgram.parse(BETWEEN_SLICES), topology, mesh), Calibration(link=1.0, between_slices=1e9)
  )
  (waited,) = [o for o in found.operations if o.kind == "collective"]
  assert (waited.name, waited.axes) == ("all-reduce", ("data",))
  assert waited.bytes == pytest.approx(4096 * 1024 * 2, rel=1e-5)
  there_and_back = 2 * 1 / 2 * waited.bytes / 1e9
  assert waited.seconds == pytest.approx(there_and_back - 100_000 / topology.chip.clock)


SUMMED_AND_CUT = """
%all-reduce-scatter.1 (grads: bf16[4096,1024]) -> bf16[512,1024] {
  %grads = bf16[4096,1024]{1,0} parameter(0)
  %sum = bf16[4096,1024]{1,0} all-reduce(%grads), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %start = u32[] partition-id()
  ROOT %part = bf16[512,1024]{1,0} dynamic-slice(%sum, %start), dynamic_slice_sizes={512,1024}
}

ENTRY %main (grads: bf16[4096,1024]) -> bf16[512,1024] {
  %grads = bf16[4096,1024]{1,0} parameter(0)
  ROOT %part = bf16[512,1024]{1,0} fusion(%grads), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
SCATTERED = """
ENTRY %main (grads: bf16[4096,1024]) -> bf16[512,1024] {
  %grads = bf16[4096,1024]{1,0} parameter(0)
  ROOT %part = bf16[512,1024]{1,0} reduce-scatter(%grads), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}, to_apply=%add
}
"""


@pytest.mark.parametrize("schedule", [SUMMED_AND_CUT, SCATTERED])
def test_a_sum_of_which_each_keeps_its_part_passes_once(schedule):
  topology = Topology.named("v5p-16")
  mesh = Mesh(mesh_utils.create_device_mesh((8,), topology.devices()), ("fsdp",))
  found = estimate(schedule_of(CompiledProgram.parse(schedule), topology, mesh), Calibration(link=1.0))
  (waited,) = found.operations
  assert (waited.name, waited.axes) == ("reduce-scatter", ("fsdp",))
  assert waited.seconds == pytest.approx(7 / 8 * 4096 * 1024 * 2 / (3 * topology.chip.link_bandwidth))


# As the compiler for tpu7x gives a gather to a sparse core: a call within a call, beside a matmul.
ON_A_SPARSE_CORE = """
%gathered (shard: bf16[512,1024]) -> bf16[4096,1024] {
  %shard = bf16[512,1024]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[4096,1024]{1,0} all-gather(%shard), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}
}

%async_computation (shard: bf16[512,1024]) -> bf16[4096,1024] {
  %shard = bf16[512,1024]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[4096,1024]{1,0} call(%shard), to_apply=%gathered
}

ENTRY %main (shard: bf16[512,1024]) -> bf16[4096,1024] {
  %shard = bf16[512,1024]{1,0} parameter(0)
  %start = ((bf16[512,1024]{1,0}), bf16[4096,1024]{1,0}) async-start(%shard), async_execution_thread="sparsecore", \
calls=%async_computation
  %product = bf16[512,1024]{1,0} fusion(%shard), kind=kOutput, backend_config={"estimated_cycles":"1750"}
  ROOT %done = bf16[4096,1024]{1,0} async-done(%start)
}
"""


def test_a_gather_on_a_sparse_core_is_one():
  topology = Topology.named("v5p-16")
  mesh = Mesh(mesh_utils.create_device_mesh((8,), topology.devices()), ("fsdp",))
  found = estimate(schedule_of(CompiledProgram.parse(ON_A_SPARSE_CORE), topology, mesh), Calibration(link=1.0))
  product, waited = found.operations
  assert (waited.name, waited.axes) == ("all-gather", ("fsdp",))
  there = 7 / 8 * 4096 * 1024 * 2 / (3 * topology.chip.link_bandwidth)
  assert product.seconds + waited.seconds == pytest.approx(there)


# As the TPU compiler writes an activation that is kept on the host: a part of an array there is written, and read.
OFFLOADED = """
ENTRY %main (x: bf16[1,512,256], kept: bf16[8,512,256]) -> bf16[1,512,256] {
  %x = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %kept = bf16[8,512,256]{2,1,0:T(8,128)(2,1)S(5)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %near = (bf16[1,512,256]{2,1,0:S(1)}, bf16[1,512,256]{2,1,0}, u32[]{:S(2)}) copy-start(%x)
  %near-done = bf16[1,512,256]{2,1,0:S(1)} copy-done(%near)
  %write = ((bf16[8,512,256]{2,1,0:S(5)}, bf16[1,512,256]{2,1,0}, s32[]{:T(128)}), bf16[8,512,256]{2,1,0:S(5)}, \
u32[]{:S(2)}) dynamic-update-slice-start(%kept, %x, %zero, %zero, %zero)
  %product = bf16[1,512,256]{2,1,0} fusion(%x), kind=kOutput, backend_config={"estimated_cycles":"1750"}
  %write-done = bf16[8,512,256]{2,1,0:S(5)} dynamic-update-slice-done(%write)
  %read = ((bf16[8,512,256]{2,1,0:S(5)}, s32[]), bf16[1,512,256]{2,1,0}, u32[]{:S(2)}) \
dynamic-slice-start(%write-done, %zero, %zero, %zero), dynamic_slice_sizes={1,512,256}
  ROOT %read-done = bf16[1,512,256]{2,1,0} dynamic-slice-done(%read)
}
"""


@pytest.mark.parametrize("before_code", [False, True])
def test_what_the_host_keeps_goes_there_beside_products(before_code):
  """Also in a schedule before code, where such operations have no names of their own."""
  text = re.sub(r"dynamic-(update-)?slice-(start|done)", r"async-\2", OFFLOADED) if before_code else OFFLOADED
  topology = Topology.named("v6e-4")
  mesh = Mesh(mesh_utils.create_device_mesh((4,), topology.devices()), ("fsdp",))
  schedule = schedule_of(CompiledProgram.parse(text), topology, mesh)
  found = estimate(schedule, Calibration(host=1e10)).seconds_by_kind()
  one_way, product = 512 * 256 * 2 / 1e10, 1750 / topology.chip.clock
  assert found["compute"] == pytest.approx(product)
  assert found["host"] == pytest.approx(one_way - product + one_way)
