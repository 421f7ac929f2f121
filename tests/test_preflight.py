"""What is checked before step 1, and the dry run: a mistake is one line that names the key, its value and the fix."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from maxtext.cli.main import main
from maxtext.configs import ConfigError
from maxtext.training import preflight
from tests.short_run import words
from tests.support import tiny


@pytest.mark.parametrize(
  ("changes", "line"),
  [
    ({"dataset_type": "hf", "hf_path": "json"}, "dataset_type=hf needs datasets, which is not installed: {}hf]'."),
    ({"dataset_type": "tfds"}, "dataset_type=tfds needs tensorflow_datasets, which is not installed: {}tfds]'."),
    (
      {"dataset_type": "grain", "grain_file_type": "parquet", "grain_train_files": "*.parquet"},
      "grain_file_type=parquet needs pyarrow, which is not installed: {}hf]'.",
    ),
    (
      {"base_output_directory": "gs://bucket/runs"},
      "base_output_directory=gs://bucket/runs needs gcsfs, which is not installed: {}gcs]'.",
    ),
    (
      {"load_parameters_path": "gs://bucket/parameters"},
      "load_parameters_path=gs://bucket/parameters needs gcsfs, which is not installed: {}gcs]'.",
    ),
    (
      {
        "use_grpo": True,
        "reward_functions": '["math_verify"]',
        "use_chat_template": False,
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "grain_train_files": "tasks.jsonl",
        "batch_size": 2,
        "max_prefill_predict_length": 4,
      },
      "reward_functions=['math_verify'] needs math_verify, which is not installed: {}rl]'.",
    ),
    (
      {"hardware": "tpu"},
      "hardware=tpu, but JAX finds cpu devices: leave hardware out to take them, or {}tpu]'.",
    ),
  ],
)
def test_a_missing_extra_is_answered_with_its_pip_line(here, changes, line, monkeypatch, capsys):
  monkeypatch.setattr(preflight, "find_spec", lambda module: None)
  assert main(["train", *words(**changes)]) == 2
  assert capsys.readouterr().err.splitlines()[-1] == "maxtext: " + line.format("pip install 'maxtext[")
  assert not list(here.iterdir())


def test_a_configuration_without_extras_needs_none(monkeypatch):
  monkeypatch.setattr(preflight, "find_spec", lambda module: None)
  preflight.check_extras(tiny())


def read_only(folder: Path) -> bool:
  """Whether a folder could be made read-only: a mount is needed where the tests run as root."""
  folder.mkdir()
  if os.geteuid():
    folder.chmod(0o555)
    return True
  return subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], check=False).returncode == 0


def test_an_output_folder_that_cannot_be_written(here, capsys):
  Path("file").write_text("")
  assert main(["train", *words(base_output_directory="file/runs")]) == 2
  assert capsys.readouterr().err.startswith("maxtext: base_output_directory=file/runs cannot be written: Not a direc")
  assert main(["train", *words(base_output_directory="file")]) == 2
  assert capsys.readouterr().err == (
    "maxtext: base_output_directory=file cannot be written: Not a directory. Name one that you can write to.\n"
  )
  folder = here / "sealed"
  if not read_only(folder):
    pytest.skip("a read-only folder needs the right to mount one")
  try:
    for flags in ([], ["--dry-run"]):
      assert main(["train", *words(base_output_directory=folder / "runs"), *flags]) == 2
      assert re.search(r"sealed/runs cannot be written: (Read-only|Permission)", capsys.readouterr().err)
  finally:
    if not os.geteuid():
      subprocess.run(["umount", str(folder)], check=True)


def test_the_disk_must_hold_one_checkpoint_and_should_hold_all(here, monkeypatch, capsys):
  monkeypatch.setattr(preflight, "_free", lambda run: 400_000)
  keys = words(enable_checkpointing=True)
  assert main(["train", *keys, "--dry-run"]) == 2
  assert re.fullmatch(
    r"maxtext: base_output_directory=runs: a checkpoint takes about \d+ kB, and its disk has 400 kB free\. Choose a "
    r"folder on a larger disk, or write enable_checkpointing=false\.\n",
    capsys.readouterr().err,
  )
  monkeypatch.setattr(preflight, "_free", lambda run: 1_500_000)
  assert main(["train", *keys, "--dry-run", "steps=100", "checkpoint_period=10"]) == 0
  out = capsys.readouterr().out
  assert re.match(
    r"maxtext: base_output_directory=runs: 10 checkpoints of about \d+ kB do not fit on its disk, which has 1.5 MB",
    out,
  )
  assert "Lower max_num_checkpoints_to_keep (it is null) or raise checkpoint_period (it is 10)." in out
  assert main(["train", *keys, "--dry-run"]) == 0
  assert "do not fit" not in capsys.readouterr().out
  assert main(["train", *words(enable_checkpointing=False), "--dry-run"]) == 0
  assert not list(here.iterdir())


EVALUATES = {"eval_interval": 10, "eval_steps": 1}  # and keeps its best checkpoint, too


@pytest.mark.parametrize(
  ("changes", "count"),
  [
    ({"steps": 100, "checkpoint_period": 10}, 10),
    ({"steps": 101, "checkpoint_period": 10}, 11),
    ({"steps": 101, "checkpoint_period": 10, "save_checkpoint_on_completion": False}, 10),
    ({"steps": 100, "checkpoint_period": 10, "max_num_checkpoints_to_keep": 1}, 3),
    ({"steps": 100, "max_num_checkpoints_to_keep": 1, "checkpoint_period": 10, **EVALUATES}, 4),
    ({"steps": 10, "checkpoint_period": 10, "max_num_checkpoints_to_keep": 5}, 1),
    ({"enable_continuous_checkpointing": True}, None),
    ({"enable_continuous_checkpointing": True, "max_num_checkpoints_to_keep": 4}, 5),
  ],
)
def test_how_many_checkpoints_the_disk_will_hold(changes, count):
  assert preflight._checkpoints_to_write(tiny(**({"enable_checkpointing": True} | changes))) == count


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(here, monkeypatch, capsys):
  monkeypatch.setattr("maxtext.training.program.Program.lower", lambda program: pytest.fail("it traces the step"))
  assert main(["train", *words(enable_checkpointing=True, run_name="a"), "--dry-run"]) == 0
  out = capsys.readouterr().out
  lines = out.splitlines()
  assert re.fullmatch(r"default: [\d,]+ parameters on 8 cpu \(.*\), 8 x 32 tokens a step, in runs/a", lines[0])
  assert lines[1] == "steps        2, 256 tokens each, 512 together"
  assert re.match(r"memory       [\d.]+ [kM]B of this host for parameters and optimizer state, of [\d.]+ GB", lines[2])
  assert lines[3] == "data         synthetic tokens, without end"
  assert re.match(rf"checkpoints  [\d.]+ kB each, every [\d,]+ steps and at the end; .* free in {here}$", lines[4])
  assert lines[5] == "dry run: all checks passed; nothing was compiled or written."
  assert not list(here.iterdir())
  assert main(["train", "--dry-run", "small-llama", "stepps=3"]) == 2


def test_a_tolerated_full_disk_is_no_mistake(here, monkeypatch):
  """A disk that is full now may have space later, as for the metrics of a run."""

  def full(**kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr("tempfile.TemporaryFile", full)
  run = preflight.RunDirectory.of("runs", "a")
  run.check_writable()
  monkeypatch.setattr("tempfile.TemporaryFile", lambda **kwargs: (_ for _ in ()).throw(OSError(30, "Read-only")))
  with pytest.raises(ConfigError, match="base_output_directory=runs cannot be written: Read-only"):
    run.check_writable()
