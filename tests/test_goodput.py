"""The journal: every second of a run belongs to one kind, whatever ended its starts and whatever the clock did."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxtext
from maxtext.data.batch import BatchWithState
from maxtext.observe.goodput_journal import read_goodput
from maxtext.observe.phases import PHASES, PhaseClock
from maxtext.observe.report import write_report
from maxtext.training.loop import run_loop
from tests.support import History, tiny


def write_starts(folder: Path, starts) -> None:
  (folder / "journal").mkdir(parents=True, exist_ok=True)
  for number, start in enumerate(starts, 1):
    (folder / "journal" / f"{number}.json").write_text(json.dumps(start))


def start(began, marks, *, boot="a", wall_ahead=0.0, **seconds):
  return {"boot": boot, "began": began, "began_wall": began + wall_ahead, "seconds": seconds, "marks": marks}


def test_steps_that_are_repeated_are_lost_in_every_start_that_did_them(tmp_path):
  write_starts(
    tmp_path,
    [
      start(0.0, [(0, 0.0), (100, 50.0)], compile=10.0, step=50.0),  # to step 100
      start(70.0, [(80, 0.0), (120, 20.0)], restore=5.0, step=20.0),  # went back to 80
      start(100.0, [(60, 0.0), (160, 50.0)], restore=5.0, step=50.0),  # went back to 60, since 80 was corrupt
    ],
  )
  found = read_goodput(tmp_path)
  assert found.seconds["between_starts"] == 10 + 5
  assert found.seconds["lost_steps"] == 20 + 20  # steps 60 to 100 of the first, all of the second
  assert found.seconds["step"] == 80
  assert found.total == 155
  assert found.goodput == 80 / 155


@given(
  st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 50), st.floats(0, 100), st.floats(0, 30), st.booleans()),
    min_size=1, max_size=6,
  )
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_second_is_counted_once(tmp_path_factory, history):
  folder, began, starts = tmp_path_factory.mktemp("run"), 5.0, []
  for first, steps, spent, gap, another_boot in history:
    seconds = dict.fromkeys(PHASES, 0.25) | {"step": spent}
    boot = f"boot {len(starts)}" if another_boot else "a"
    starts.append(start(began, [(first, 0.0), (first + steps, spent)], boot=boot, **seconds))
    began += sum(seconds.values()) + gap
  write_starts(folder, starts)
  found, last_gap = read_goodput(folder), history[-1][3]
  assert found.total == pytest.approx(began - 5.0 - last_gap)
  assert found.seconds["step"] >= -1e-9
  kept = sum(spent for first, steps, spent, *_ in history[-1:])
  assert found.seconds["step"] >= kept - 1e-9, "the last start lost nothing"


def test_a_clock_that_is_set_back_takes_no_time_away(tmp_path):
  same_boot = start(20.0, [(10, 0.0), (20, 5.0)], step=5.0, wall_ahead=-86400.0)
  write_starts(tmp_path, [start(0.0, [(0, 0.0), (10, 5.0)], step=5.0), same_boot])
  assert read_goodput(tmp_path).seconds["between_starts"] == 15
  write_starts(tmp_path, [start(0.0, [(0, 0.0), (10, 5.0)], step=5.0), same_boot | {"boot": "b"}])
  assert read_goodput(tmp_path).seconds["between_starts"] == 0, "no clock says more"


@pytest.mark.parametrize(
  "content",
  ["", "[]", "{", '{"seconds": 3}', "[" * 100_000,
   '{"boot": "", "began": 1e999, "began_wall": 0, "seconds": {}, "marks": []}',
   json.dumps(start(0.0, [(0, float("nan"))], step=1.0)), json.dumps(start(0.0, [(0, 0.0)], step=-1.0)), "1" * 5000],
)  # fmt: skip
def test_files_that_are_no_starts_are_passed_over(tmp_path, content):
  write_starts(tmp_path, [start(0.0, [(0, 0.0), (10, 5.0)], step=5.0)])
  (tmp_path / "journal" / "2.json").write_text(content)
  (tmp_path / "journal" / "notes.txt").write_text("3")
  assert read_goodput(tmp_path).starts == 1


def batches(count, seconds):
  for _ in range(count):
    time.sleep(seconds)
    yield BatchWithState(np.float32(1), dict)


@pytest.mark.parametrize("products", [0, 800])
def test_waiting_for_data_counts_where_the_device_is_idle(products):
  """A step of 800 products takes longer than the 0.5 s of a batch, and hides that, but for the first batch."""

  @jax.jit
  def step(x, batch):
    product = jax.lax.fori_loop(0, products, lambda _, x: x @ x, x)
    return x, {"tokens": batch, "loss": product[0, 0]}

  x, clock = np.eye(512, dtype=np.float32), PhaseClock()
  step(x, np.float32(1))
  run_loop(step, x, batches(4, 0.5), range(4), [], clock=clock)
  waited = clock.seconds()["data_wait"]
  assert 0.5 <= waited < 1 if products else 1.5 < waited < 2.5


def test_a_run_accounts_for_its_time(tmp_path):
  history = History()
  began = time.time()
  config = tiny(
    steps=4, eval_interval=2, eval_steps=1, run_name="run", base_output_directory=str(tmp_path),
    enable_goodput_recording=True, monitor_goodput=True, goodput_upload_interval_seconds=0,
    step_deviation_interval_seconds=0,
  )  # fmt: skip
  maxtext.train(config, callbacks=[history])
  found = read_goodput(tmp_path / "run")
  assert 0.8 < found.total / (time.time() - began) <= 1
  assert found.seconds["compile"] > found.seconds["step"] > 0
  assert found.seconds["evaluation"] > 0
  assert found.starts == 1
  shares = [value for name, value in history.figures[-1].items() if name.startswith(("goodput", "badput_"))]
  assert len(shares) == len(PHASES) + 2
  assert sum(shares) == pytest.approx(1)
  assert "step_time_deviation_seconds" in history.figures[-1]
  page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
  assert f"Goodput {found.goodput:.1%} of" in page
  maxtext.train(config)
  assert read_goodput(tmp_path / "run").starts == 1, "without checkpoints a run begins anew"


def test_monitoring_needs_the_journal():
  with pytest.raises(maxtext.ConfigError, match=r"monitor_goodput=True is not supported: .* enable_goodput_recording"):
    tiny(monitor_goodput=True)
