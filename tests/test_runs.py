"""`maxtext runs`: real runs in a folder, and folders that are none."""

import json
import os
import time

from etils import epath

import maxtext
from maxtext.cli.main import main
from maxtext.distributed.lease import Lease
from maxtext.observe.runs import list_runs
from tests.support import tiny


def aged(path, seconds):
  for file in (*path.rglob("*"), path):
    os.utime(file, (time.time() - seconds,) * 2)


def failed(folder, name):
  """A start that ended before its first step."""
  (folder / name).mkdir()
  (folder / name / "run.json").write_text(json.dumps({"started": "2026-01-01 10:00:00 +0000"}))
  return folder / name


def test_states_of_runs(tmp_path):
  done = maxtext.train(tiny(steps=2, base_output_directory=str(tmp_path), run_name="done"))
  assert int(done.step) == 2
  stopped = failed(tmp_path, "stopped")
  stopped.joinpath("config.json").write_text(json.dumps({"steps": {"value": 9, "from": "user"}}))
  stopped.joinpath("metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n{"step": 4, "lo')  # it is being written
  failed(tmp_path, "failed")
  running = failed(tmp_path, "running")
  lease = Lease(epath.Path(running), "running")
  lease.acquire()
  failed(tmp_path, "hostile").joinpath("metrics.jsonl").write_text('{"step": 1, "loss": "high"}\n[]\n\x00')
  (tmp_path / "hostile" / "config.json").write_text('{"steps": 7}')
  (tmp_path / "no run").mkdir()
  (tmp_path / "file").write_text("")
  runs = {run.path.name: run for run in list_runs(tmp_path)}
  assert {name: run.state for name, run in runs.items()} == {
    "done": "finished", "stopped": "stopped", "failed": "failed", "running": "running", "hostile": "stopped",
  }  # fmt: skip
  assert (runs["done"].step, runs["done"].steps) == (2, 2)
  assert 0 < runs["done"].loss < 10
  assert runs["done"].bytes > 1000
  assert (runs["stopped"].step, runs["stopped"].steps, runs["stopped"].loss) == (3, 9, 1.5)
  assert runs["hostile"].loss is None
  assert next(iter(runs)) == "done", "the latest start comes first"
  lease.release()
  assert {run.path.name: run.state for run in list_runs(tmp_path)}["running"] == "failed"


def test_only_runs_that_came_to_nothing_are_removed(tmp_path, capsys):
  old, new, saved = (failed(tmp_path, name) for name in ("old", "new", "saved"))
  (saved / "checkpoints" / "5").mkdir(parents=True)
  for path in (old, saved):
    aged(path, 7200)
  assert main(["runs", "clean", "--folder", str(tmp_path)]) == 0
  said = capsys.readouterr().out
  assert f"would remove {old}" in said
  assert f"left {new}: it changed in the last hour" in said
  assert old.exists(), "nothing is removed without --yes"
  assert main(["runs", "clean", "--yes", "--folder", str(tmp_path)]) == 0
  assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "saved"]


def test_a_link_to_a_run_is_removed_and_not_what_it_points_to(tmp_path):
  (tmp_path / "runs").mkdir()
  elsewhere = failed(tmp_path, "elsewhere")
  (tmp_path / "runs" / "link").symlink_to(elsewhere)
  aged(elsewhere, 7200)
  assert main(["runs", "clean", "--yes", "--folder", str(tmp_path / "runs")]) == 0
  assert not list((tmp_path / "runs").iterdir())
  assert (elsewhere / "run.json").exists()


def test_a_list_has_a_line_for_each(tmp_path, capsys):
  failed(tmp_path, "a")
  assert main(["runs", "--folder", str(tmp_path)]) == 0
  header, line = capsys.readouterr().out.splitlines()
  assert header.split() == ["run", "state", "steps", "loss", "best", "size", "started"]
  assert line.split()[:3] == ["a", "failed", "0"]
  assert main(["runs", "--folder", str(tmp_path / "none")]) == 2
  assert "is not a folder" in capsys.readouterr().err
