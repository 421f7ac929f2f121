"""The best checkpoint, by evaluation loss or pass rate, is kept beside the latest ones."""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest
from etils import epath

import maxtext
from maxtext.checkpoint import writer as writer_module
from maxtext.checkpoint.best import best_step, scores_in
from maxtext.checkpoint.location import locate, steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata, Criterion
from maxtext.checkpoint.options import checkpoint_options
from maxtext.checkpoint.storage import StorageError
from maxtext.checkpoint.writer import Writer
from maxtext.cli.main import main
from maxtext.distributed.interrupt import Interrupt
from maxtext.distributed.supervisor import supervise
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.callbacks.save import Save
from tests.flags import flags
from tests.support import tiny

NAN, INF = float("nan"), float("inf")
LOSS, PASS_RATE = Criterion(), Criterion("eval_pass_rate", highest=True)


def state(value=1.0):
  return {"params": {"a": jnp.full(4, value)}}


def open_writer(folder, keep=1, fence=lambda: None, **changes):
  config = tiny(enable_checkpointing=True, max_num_checkpoints_to_keep=keep, **changes)
  return Writer(checkpoint_options(config), epath.Path(folder), {}, fence=fence)


def values(folder):
  """What the steps under a folder were evaluated to."""
  return {step: score.value for step, score in scores_in(epath.Path(folder)).items()}


def save(writer, folder, step, found, value=1.0, criterion=LOSS, check=lambda step, state: None):
  """The steps that are there after a save."""
  writer.save(step, state(value), {}, criterion.score(found))
  writer.wait()
  return steps_in(epath.Path(folder))


@pytest.mark.parametrize("in_background", [True, False])
def test_the_best_is_kept_beside_the_latest(tmp_path, in_background):
  writer = open_writer(tmp_path, async_checkpointing=in_background)
  losses = [3.0, 2.0, NAN, 2.5, None, -INF, 2.6]
  found = [save(writer, tmp_path, step, loss) for step, loss in enumerate(losses, 1)]
  # Two of the latest are there while a run goes on. A step without a finite loss is never the best.
  assert found == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [2, 6, 7]]
  writer.trim()
  writer.close()
  assert steps_in(epath.Path(tmp_path)) == [2, 7]
  assert values(tmp_path) == {2: 2.0, 7: 2.6}
  assert best_step({step: LOSS.score(loss) for step, loss in {7: 2.0, 2: 2.0, 3: 4.0}.items()}) == 2
  assert best_step({}) is None


def test_of_pass_rates_the_highest_is_the_best(tmp_path):
  """Also after a restart."""
  for step, rate, expected in (
    (1, 0.2, [1]),
    (2, 0.9, [1, 2]),
    (3, 0.4, [2, 3]),
    (4, NAN, [2, 3, 4]),
    (5, 0.95, [4, 5]),
  ):
    writer = open_writer(tmp_path)
    assert save(writer, tmp_path, step, rate, criterion=PASS_RATE) == expected
    writer.close()
  assert scores_in(epath.Path(tmp_path)) == {5: PASS_RATE.score(0.95)}


def test_more_of_the_latest_are_kept_as_asked(tmp_path):
  writer = open_writer(tmp_path, keep=3)
  found = [save(writer, tmp_path, step, float(step)) for step in range(1, 7)]
  assert found[-2:] == [[1, 3, 4, 5], [1, 4, 5, 6]]
  writer.close()


def test_a_run_that_keeps_all_removes_none(tmp_path):
  writer = open_writer(tmp_path, keep=None)
  assert [save(writer, tmp_path, step, 1.0) for step in (1, 2, 3, 4)][-1] == [1, 2, 3, 4]
  writer.trim()
  writer.close()
  assert steps_in(epath.Path(tmp_path)) == [1, 2, 3, 4]


def test_a_restart_knows_the_best(tmp_path):
  for step, loss, expected in (
    (1, 5.0, [1]),
    (2, 2.0, [1, 2]),
    (3, 4.0, [2, 3]),
    (4, NAN, [2, 3, 4]),
    (5, None, [2, 4, 5]),
    (6, 1.0, [5, 6]),
    (7, 3.0, [6, 7]),
    (8, None, [6, 7, 8]),
  ):
    writer = open_writer(tmp_path)
    assert save(writer, tmp_path, step, loss) == expected
    writer.close()


def test_the_best_is_there_until_a_better_one_is(tmp_path, capsys):
  """Also where the better one fails: the fence is asked right before a step counts."""
  seen = []
  writer = open_writer(tmp_path, fence=lambda: seen.append(steps_in(epath.Path(tmp_path))))
  for step, loss in ((1, 2.0), (2, 3.0), (3, 3.0)):
    save(writer, tmp_path, step, loss)
  seen.clear()
  assert save(writer, tmp_path, 4, 1.0, value=NAN) == [1, 2, 3]
  assert "step 4 failed" in capsys.readouterr().out
  assert save(writer, tmp_path, 5, 3.0) == [1, 3, 5]
  assert save(writer, tmp_path, 6, 1.0) == [5, 6]
  assert seen
  assert all(1 in steps for steps in seen)
  writer.close()


def test_a_best_step_that_cannot_be_read_is_not_the_best(tmp_path):
  writer = open_writer(tmp_path)
  for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
    save(writer, tmp_path, step, loss)
  writer.close()
  record = tmp_path / "1" / "record" / "record.json"
  record.write_text(record.read_text().replace("1.0", "0.5"))
  assert values(tmp_path) == {2: 2.0, 3: 3.0}
  writer = open_writer(tmp_path)
  assert save(writer, tmp_path, 4, None) == [2, 3, 4]
  writer.close()


def test_nothing_is_removed_where_the_best_is_not_known(tmp_path, monkeypatch, capsys):
  writer = open_writer(tmp_path)
  for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
    save(writer, tmp_path, step, loss)
  writer.close()

  def fails(folder):
    raise StorageError("no answer")

  monkeypatch.setattr(writer_module, "scores_in", fails)
  writer = open_writer(tmp_path)
  assert save(writer, tmp_path, 4, 0.5) == [1, 2, 3, 4]
  writer.trim()
  writer.close()
  assert steps_in(epath.Path(tmp_path)) == [1, 2, 3, 4]
  assert "no checkpoint is removed, since evaluations cannot be read: no answer." in capsys.readouterr().out


def test_metadata_of_older_releases_has_a_loss_or_none(tmp_path):
  body = CheckpointMetadata(1, {}, None, {}, 1, score=PASS_RATE.score(0.5)).to_json()["body"]
  assert written(tmp_path, body).score == PASS_RATE.score(0.5)
  del body["score"]
  assert written(tmp_path, body).score is None
  for loss, expected in ((2.0, LOSS.score(2.0)), (None, None), ("low", None), (NAN, None)):
    assert written(tmp_path, body | {"eval_loss": loss}).score == expected


def written(folder, body):
  from maxtext.checkpoint.metadata import _digest

  (folder / "record").mkdir(exist_ok=True)
  (folder / "record" / "record.json").write_text(json.dumps({"digest": _digest(body), "body": body}))
  return CheckpointMetadata.read(epath.Path(folder))


def test_the_loss_of_a_step_is_saved_with_that_step_alone(tmp_path):
  """Also with the last step, which is saved at the end, and never with a later step."""
  writer = open_writer(tmp_path, keep=None, checkpoint_period=2)
  callback = Save(
    writer,
    Interrupt(),
    LossGuard(on_nan=True, on_inf=True),
    on_completion=True,
    criterion=LOSS,
    check=lambda step, state: None,
  )
  for step, loss in enumerate((5.0, 4.0, 3.0, None, 2.0), 1):
    metrics = {"loss": 1.0} | ({} if loss is None else {"eval_loss": loss})
    if callback.due(step):
      callback.on_update(step, state(), dict, metrics)
    callback.on_step(step, metrics)
  callback.on_end(5, state(), dict)
  callback.close()
  assert steps_in(epath.Path(tmp_path)) == [2, 4, 5]
  assert values(tmp_path) == {2: 4.0, 5: 2.0}


def test_a_run_keeps_its_best_and_lists_it(tmp_path, capsys):
  """A learning rate that is too high makes every step worse than the first."""
  keys = {"steps": 4, "eval_interval": 1, "eval_steps": 1, "checkpoint_period": 1, "learning_rate": 0.3}
  keys |= {
    "learning_rate_schedule_steps": 100,
    "max_num_checkpoints_to_keep": 1,
    "enable_checkpointing": True,
    "warmup_steps_fraction": 0.0,
  }
  maxtext.train(tiny(base_output_directory=str(tmp_path), run_name="run", **keys))
  lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
  measured = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
  best = min(measured, key=lambda step: measured[step])
  assert best != 4, "the test shows nothing"
  checkpoints = epath.Path(tmp_path / "run" / "checkpoints")
  assert steps_in(checkpoints) == [best, 4]
  assert values(checkpoints) == pytest.approx({step: measured[step] for step in (best, 4)})
  assert locate(str(tmp_path / "run")).name == "4", "the latest is what a run's folder means"
  capsys.readouterr()
  assert main(["runs", "--folder", str(tmp_path)]) == 0
  assert f"  {best} ({measured[best]:.4f})  " in capsys.readouterr().out
  assert main(["checkpoint", "inspect", str(tmp_path / "run")]) == 0
  text = f"steps: {best} (eval loss {measured[best]:.4f}, the best), 4 (eval loss {measured[4]:.4f})\n"
  assert capsys.readouterr().out.endswith(text)


@pytest.mark.slow
@pytest.mark.mesh
def test_several_processes_keep_the_same_best(tmp_path):
  """Step 2 would be the best and fails; another writer, as after a restart, saves steps 4 to 6."""
  heard = io.StringIO()
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    losses = ["2.0", "1.0", "3.0", "0", "nan", "2.5"]
    command = [sys.executable, "-m", "tests.save_worker", str(tmp_path / "steps"), *losses]
    code = thread.submit(supervise, command, 2, environment=flags(devices=1), out=heard).result()
  assert code == 0, heard.getvalue()[-3000:]
  assert steps_in(epath.Path(tmp_path / "steps")) == [1, 5, 6]
  assert values(tmp_path / "steps") == {1: 2.0, 6: 2.5}
