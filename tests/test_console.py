"""The console of `maxtext train`: what a run is called, what it says at its end, and what a failed start leaves."""

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import maxtext
from maxtext.cli.main import main
from maxtext.cli.platform import FATAL, leave_out_absent_accelerators, quiet_libraries
from maxtext.configs import ConfigError
from maxtext.configs.loader import resolve
from maxtext.logs import readable_duration
from maxtext.observe.run_directory import RunDirectory
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.weights.resolve import resolve_source
from tests import vocabularies
from tests.flags import flags
from tests.short_run import KEYS, words
from tests.support import tiny

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))


def test_a_folder_does_not_hide_a_recipe(here):
  Path("small-llama").mkdir()
  assert resolve_source("small-llama", {}).config.base_emb_dim == 192
  with pytest.raises(ConfigError, match="small-llama"):
    resolve_source("./small-llama", {})


def test_a_configuration_is_called_by_its_recipe_its_file_or_its_model(here):
  Path("mine.yml").write_text("base_config: small-llama\n")
  assert resolve("small-llama").name == "small-llama"
  assert resolve("mine.yml").name == "mine"
  assert resolve("llama2-7b").name == "llama2-7b"
  assert resolve("base.yml", values={"model_name": "llama2-7b"}).name == "llama2-7b"
  assert resolve().name == "default"


def test_a_run_from_a_file_has_its_name(here, capsys):
  Path("mine.yml").write_text("\n".join(word.replace("=", ": ", 1) for word in words(jax_cache_dir="''")))
  assert main(["train", "mine.yml"]) == 0
  (run,) = Path("runs").iterdir()
  assert re.fullmatch(r"mine-\d{8}-\d{6}", run.name)
  out = capsys.readouterr().out.splitlines()
  assert out[0].startswith("mine: ")
  assert re.fullmatch(r"maxtext: finished 2 steps in \d+ s\.", out[-2]), "there is no checkpoint to go on from"
  assert out[-1] == f"report: {run}/report.html"


@pytest.mark.slow
def test_the_end_of_a_run_says_what_works(here, capsys):
  """The keys that train further do, the command that tries it does, and a run without steps left says so."""
  Path("text").mkdir()
  for number in range(20):
    Path("text", f"{number}.txt").write_text("the cat sat on the mat. " * 8)
  vocabularies.sentence_piece(here / "vocabulary")
  prepare = ["--from", "text", "--to", "corpus", "--workers", "1", "tokenizer_path=vocabulary", "vocab_size=400"]
  assert main(["data", "prepare", *prepare]) == 0
  keys = words(
    vocab_size=400, max_target_length=64, dataset_type="grain", grain_train_files="corpus", grain_worker_count=0,
    tokenizer_path="vocabulary", enable_checkpointing=True,
  )  # fmt: skip
  capsys.readouterr()
  assert main(["train", *keys, "run_name=cat"]) == 0
  out = capsys.readouterr().out
  further = re.search(r"^maxtext: finished 2 steps in \d+ s; (run_name=cat steps=4) trains further\.$", out, re.M)[1]
  decode = re.search(
    r"^maxtext: try it: maxtext (decode runs/cat max_prefill_predict_length=32) prompt=\.\.\.$", out, re.M
  )[1]
  assert main([*decode.split(), "prompt=the cat", "--max-tokens", "2"]) == 0
  before = Path("runs/cat/run.json").read_text()
  assert main(["train", *keys, "run_name=cat"]) == 0
  out = capsys.readouterr().out
  assert "run_name=cat is at step 2 of 2: nothing is left to do. Set steps above 2 to train further" in out
  assert "finished" not in out
  assert Path("runs/cat/run.json").read_text() == before
  assert main(["train", *keys, *further.split()]) == 0
  out = capsys.readouterr().out
  assert re.search(r"^step 4/4  loss", out, re.M)
  assert "maxtext: finished 2 steps in" in out


class FailingObjective(LanguageModeling):
  """Fails while the step is traced, when the run's folder has its first files."""

  def __call__(self, *arguments, **named):
    raise RuntimeError("no memory")


@pytest.mark.parametrize("above", [False, True])
def test_a_start_that_fails_leaves_what_was_there(here, above):
  if above:
    Path("runs/other").mkdir(parents=True)
  config = tiny(**(KEYS | {"enable_checkpointing": True}))
  with pytest.raises(RuntimeError, match="no memory"):
    maxtext.train(config, objective=FailingObjective())
  assert list(here.rglob("*")) == ([Path(here / "runs"), Path(here / "runs/other")] if above else [])


@pytest.mark.parametrize(
  "changes",
  [
    {"stepps": 3},
    {"load_parameters_path": "nowhere"},
    {"dataset_type": "grain", "grain_train_files": "nowhere"},
    {"base_emb_dim": 2**20, "base_mlp_dim": 2**22},
  ],
)
def test_a_mistake_leaves_nothing(here, changes, capsys):
  assert main(["train", *words(enable_checkpointing=True, **changes)]) == 2
  assert not list(here.iterdir())
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_failure_keeps_results_and_strange_files(here):
  run = RunDirectory.of("runs", "a")
  for name, kept in (("metrics.jsonl", True), ("notes.txt", True), ("run.json", False)):
    with contextlib.suppress(RuntimeError), run.removed_if_unused():
      run.make()
      (run.path / name).write_text("{}")
      raise RuntimeError
    assert run.path.exists() == kept, name
    if kept:
      (run.path / name).unlink()
      run.path.rmdir()
      run.path.parent.rmdir()
  run.make()
  with contextlib.suppress(RuntimeError), run.removed_if_unused():
    (run.path / "run.json").write_text("{}")
    raise RuntimeError
  assert (run.path / "run.json").exists(), "the folder was there before"


def test_durations():
  shown = [readable_duration(seconds) for seconds in (0.4, 59.6, 61, 3725, 90061)]
  assert shown == ["0 s", "1 min 0 s", "1 min 1 s", "1 h 2 min", "1 d 1 h"]


@pytest.mark.slow
def test_stderr_has_our_lines_alone_when_a_run_is_stopped_and_resumed(here):
  """As a user starts it: nothing in the environment says which platform JAX is to take, or how loud libraries are."""
  env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TF_", "TPU_", "GRPC_"))}
  env |= flags() | {"PYTHONUNBUFFERED": "1"}
  command = [MAXTEXT, "train", *words(enable_checkpointing=True, enable_tensorboard=True, run_name="a"),
             "checkpoint_period=5", "eval_interval=5", "eval_steps=1"]  # fmt: skip
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
  with subprocess.Popen([*command, "steps=1000000"], **pipes) as process:
    for line in process.stdout:
      if line.startswith("step       7"):
        break
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
  assert process.returncode == 130
  assert errors.splitlines() == [
    "maxtext: ending after this step, with a checkpoint; once more ends at once.",
    "maxtext: stopped.",
  ]
  assert out.splitlines()[-2:] == ["maxtext: run_name=a resumes it.", "report: runs/a/report.html"]
  step = int(re.search(r"step (\d+) was saved", out)[1])
  done = subprocess.run([*command, f"steps={step + 3}"], **pipes, check=True, timeout=120)
  assert done.stderr == ""
  kinds = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines()]
  assert set(kinds) == {"default:", "maxtext:", "step", "report:"}, done.stdout
  assert f"resuming from {here}/runs/a/checkpoints/{step}" in done.stdout


def test_libraries_are_quiet_unless_asked(monkeypatch):
  logger = logging.getLogger("gcsfs")
  monkeypatch.setattr(logger, "level", logging.NOTSET)
  environment = {"TF_CPP_MIN_LOG_LEVEL": "0", "GCSFS_DEBUG": "debug"}
  quiet_libraries(environment)
  assert environment["TF_CPP_MIN_LOG_LEVEL"] == "0"
  assert logger.level == logging.NOTSET
  environment = {}
  quiet_libraries(environment)
  assert environment["TF_CPP_MIN_LOG_LEVEL"] == environment["TPU_MIN_LOG_LEVEL"] == "2"
  compiling: dict[str, str] = {"TPU_MIN_LOG_LEVEL": "0"}
  quiet_libraries(compiling, FATAL)
  assert (compiling["TPU_MIN_LOG_LEVEL"], compiling["TPU_STDERR_LOG_LEVEL"]) == ("0", "3")
  assert not logger.isEnabledFor(logging.ERROR)
  leave_out_absent_accelerators(environment, Path("/nowhere"))
  assert ("JAX_PLATFORMS" in environment) == (importlib.util.find_spec("libtpu") is not None), "no sign of a TPU"
