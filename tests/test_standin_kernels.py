"""Stand-ins for kernels: the rest of a step is compiled as it is beside the kernels."""

from collections import Counter

import pytest

from maxtext import load_config
from maxtext.planner.compile import program_for
from maxtext.planner.compiled_step import compiled_step
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.plan import step_schedule
from tests.support import TINY

KEYS = TINY | {
  "compile_topology": "v6e-4",
  "attention": "flash",
  "base_emb_dim": 256,
  "head_dim": 128,
  "max_target_length": 512,
  "dtype": "bfloat16",
  "per_device_batch_size": 1,
}


@pytest.mark.aot
@pytest.mark.slow
def test_a_step_with_stand_ins_is_the_step_beside_its_kernels():
  """The same collectives, kernels and arrays between them; memory and cycles within a fiftieth."""
  pytest.importorskip("libtpu")
  own, stands = ({}, {})
  for found, stand_ins in ((own, False), (stands, True)):
    program, topology = program_for(load_config(**KEYS))
    step = compiled_step(program, topology, stand_ins=stand_ins)
    parsed = CompiledProgram.parse(step.text)
    found["bodies"] = {i.rest for i, _ in parsed.walk() if "tpu_custom_call" in i.rest}
    found["collectives"] = Counter((t.collective.collective, t.collective.bytes, n) for t, n in parsed.collectives())
    kernels = [
      o for o in estimate(step_schedule(program, topology, step), Calibration()).operations if o.kind == "kernel"
    ]
    found["kernels"] = [(o.name, o.times, o.seconds) for o in kernels]
    found["close"] = [step.peak, step.temporaries, parsed.cycles]
  assert own["bodies"].isdisjoint(stands["bodies"])
  assert len(own["kernels"]) == 3
  assert stands["kernels"] == own["kernels"]
  assert stands["collectives"] == own["collectives"]
  assert stands["close"] == pytest.approx(own["close"], rel=0.02)
