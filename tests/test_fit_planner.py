"""Constants of the planner: fitted to runs, tried on runs of other models, and told with every plan."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.accuracy_picture import picture
from benchmarks.fit_planner import START, calibration_of, constants_table, fit, predictions, table
from benchmarks.planned_run import LAYERS, CompiledPart, PlannedRun, compiled_parts
from benchmarks.published_runs import plan
from maxtext import ConfigError, load_config
from maxtext.planner.calibration import CALIBRATION, FITTED, Accuracy, predicted_runs, run_kind
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.published_runs import published_run, published_runs
from maxtext.planner.schedule import Schedule, Work
from tests.support import TINY

REACHED = Calibration(compute=0.8, kernel=0.5, grouped=0.7, link=0.85)
# Models of one chip with what their steps do: seconds of matmuls, attention, experts and gathers at the peak.
MODELS = {
  "v6e-8-llama3.1-8b-8k-bf16-20250717": (3, 1, 0, 1),
  "v6e-16-llama3.1-8b-8k-bf16-20250717": (3, 1.1, 0, 1.2),
  "v6e-8-mistral-7b-8k-bf16-20250321": (2, 0.2, 0, 1.5),
  "v6e-256-gpt3-175b-bf16-20250321": (9, 0.1, 0, 1),
  "v6e-256-gemma3-12b-32k-bf16-20251018": (3, 3, 0, 1),
  "v6e-256-mixtral-8x7b-4k-bf16-20250321": (1, 0.5, 2, 1),
  "v6e-256-mixtral-8x22b-4k-bf16-20250212": (2, 0.5, 5, 3),
}


def ran(name, seconds=(), times=1.0):
  """A run on a chip that reaches `REACHED`."""
  works = [
    Work(resource, resource, "compute", "", resource, took)
    for resource, took in zip(("compute", "kernel", "grouped"), seconds, strict=False)
  ]
  gather = Work("all-gather", "", "collective", "", "link", seconds[3], transfer="1", starts=True, ends=True)
  loop = Schedule(10, [replace(work, seconds=work.seconds / 10) for work in (*works, gather)])
  planned = PlannedRun(published_run(name), [CompiledPart(1.0, 1, 2**34, 60.0, Schedule(1, [loop]))])
  return replace(planned, run=replace(planned.run, step_seconds=times * planned.seconds(REACHED)))


def test_what_a_chip_reaches_is_found_from_its_runs():
  runs = [ran(*item) for item in MODELS.items()]
  off = [run.seconds(START) / run.run.step_seconds - 1 for run in runs]
  assert max(map(abs, off)) > 0.08, "without the fit"
  calibration = calibration_of("v6e", runs)
  assert (calibration.matmul, calibration.memory) == (1, 1), "no quick plan is among them"
  found = list(predictions(runs, calibration))
  assert max(abs(run.planned / run.seconds - 1) for run in found) < 0.02
  assert max(abs(run.error) for run in found) < 0.06, "models that the fit has not seen"


def test_a_run_has_no_part_in_its_own_error():
  """One that took twice as long is reported as far off, and its model's other run with it."""
  name = "v6e-8-llama3.1-8b-8k-bf16-20250717"
  plain, odd = (
    {run.id: run for run in predictions(runs, fit(runs))}
    for times in (1.0, 2.0)
    for runs in [[ran(run, work, times if run == name else 1.0) for run, work in MODELS.items()]]
  )
  assert odd[name].held_out == plain[name].held_out
  assert odd[name].error == pytest.approx(plain[name].held_out / plain[name].seconds / 2 - 1, abs=1e-3)
  same_model = "v6e-16-llama3.1-8b-8k-bf16-20250717"
  assert odd[same_model].held_out == plain[same_model].held_out
  other = "v6e-8-mistral-7b-8k-bf16-20250321"
  assert odd[other].held_out != plain[other].held_out


def test_the_picture_has_a_mark_for_every_run():
  runs = list(predictions([ran(*item) for item in MODELS.items()], REACHED))
  drawn = ElementTree.fromstring(picture(runs))
  titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
  assert titles[1:] == [f"{run.id}: {run.error:+.1%}" for run in runs]
  assert "nan" not in picture(runs)
  ElementTree.fromstring(picture([]))


def test_a_kept_run_takes_as_long_as_the_compiled_one(tmp_path):
  """Transfers that pass beside operations and kernels, in two loops, and a part that does not fit."""
  matmul = Work("fusion", "a matmul", "compute", "model.py:3", "compute", 2.0)
  kernel = Work("splash_mha_fwd", "", "kernel", "", "kernel", 1.0, memory_seconds=1.9)
  gather = Work("all-gather", "", "collective", "", "link", 5.0, transfer="a", starts=True, bytes=70, axes=("fsdp",))
  host = Work("host transfer", "", "host", "", "host", 3.2e10, transfer="b", starts=True)
  done = [replace(work, starts=False, ends=True, seconds=0.0) for work in (gather, host)]
  body = [matmul, gather, matmul, matmul, host, kernel, done[0], matmul, done[1]]
  whole = Schedule(
    1, [matmul, Schedule(7, body), Schedule(3, [gather, matmul, Schedule(2, [matmul]), done[0]]), matmul]
  )
  run = published_run("v6e-8-mistral-7b-8k-bf16-20250321")
  parts = [CompiledPart(-1.0, 4, 5, 6.5, whole), CompiledPart(2.0, 6, 2**40, 7.0, replace(whole, times=2))]
  PlannedRun(run, parts).write(tmp_path)
  kept = PlannedRun.read(run, tmp_path)
  assert [replace(part, schedule=None) for part in kept.parts] == [replace(part, schedule=None) for part in parts]
  for calibration in (REACHED, START, Calibration(link=0.1, host=1e9)):
    ours, theirs = estimate(whole, calibration), estimate(kept.parts[0].schedule, calibration)
    assert theirs.seconds == pytest.approx(ours.seconds, rel=1e-4)
    assert theirs.seconds_by_kind() == pytest.approx(ours.seconds_by_kind(), rel=1e-4)
  assert sum(o.bytes for o in theirs.operations) == sum(o.bytes for o in ours.operations)
  assert kept.timed
  assert not kept.fits
  PlannedRun(run, [replace(parts[0], schedule=None)]).write(tmp_path)
  assert PlannedRun.read(run, tmp_path).seconds(REACHED) == 0
  assert PlannedRun.read(published_run("v6e-32-llama2-7b-4k-bf16-20250731"), tmp_path) is None


def test_a_run_that_takes_too_long_is_given_up(tmp_path):
  run = published_run("v5p-1x128-64b-bf16-20231215")
  assert plan(run, tmp_path, 1, []) == "not compiled in 1 s of processor time"


def test_the_page_has_the_runs_and_constants_that_plans_use():
  page = Path("docs/planner-accuracy.md").read_text()
  assert table(predicted_runs()) in page
  assert constants_table(FITTED) in page
  assert all(run.seconds == published_runs()[run.id].step_seconds for run in predicted_runs())


@pytest.mark.parametrize(
  ("errors", "says"),
  [
    ((), "no published run of this kind (dense) was planned for v9: use the time to compare, only"),
    ((-0.041,), "one published run of this kind (dense) on v9: 4% off, at most 4%"),
    ((0.02, -0.2, 0.06), "3 published runs of this kind (dense) on v9: 6% off, at most 20%"),
  ],
)
def test_a_plan_says_how_far_plans_like_it_were_off(errors, says):
  found = Accuracy("v9", "dense", errors)
  assert found.as_text() == says
  assert found.as_json()["runs"] == len(errors)


@pytest.mark.parametrize(
  ("keys", "kind"),
  [
    ({}, "dense"),
    ({"remat_policy": "custom", "decoder_layer_input": "offload"}, "offloading"),
    ({"num_experts": 4, "num_experts_per_tok": 2, "decoder_block": "mixtral"}, "experts"),
    ({"quantization": "int8"}, "8-bit"),
  ],
)
def test_kinds_of_runs(keys, kind):
  assert run_kind(load_config(**TINY, **keys)) == kind


@pytest.mark.nightly
@pytest.mark.aot
def test_models_of_fewer_layers_stand_for_the_whole_one(tmp_path):
  """Time and memory of 12 layers from 4 and 6, within 2 %."""
  pytest.importorskip("libtpu")
  keys = TINY | {"compile_topology": "v6e-4", "attention": "dot_product", "max_target_length": 512, LAYERS: 12}

  def total(parts: list[CompiledPart]) -> tuple[float, float]:
    times = [part.weight * estimate(part.schedule, CALIBRATION["v6e"]).seconds for part in parts]
    return sum(times), sum(part.weight * part.peak for part in parts)

  with pytest.raises(ConfigError, match="--depths 2 6: two numbers of layers"):
    compiled_parts(keys, tmp_path, (6, 2))
  whole, scaled = (compiled_parts(keys, tmp_path, depths) for depths in ((), (4, 6)))
  assert [(part.layers, part.weight) for part in scaled] == [(4, -3.0), (6, 4.0)]
  assert total(scaled) == pytest.approx(total(whole), rel=0.02)
