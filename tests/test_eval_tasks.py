"""Evaluation tasks while training: the figures of `maxtext eval`, what a run keeps of them, and what it refuses."""

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.evaluation.scoring import Scorer
from maxtext.evaluation.while_training import open_scores
from maxtext.observe.evaluation_records import (
  EVALUATIONS,
  EvaluationRecord,
  append_evaluations,
  forget_after,
  read_evaluations,
)
from maxtext.observe.goodput_journal import read_goodput
from maxtext.observe.report import write_report
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.score_tasks import OpenedTasks
from tests.support import TINY, History, program, tiny
from tests.test_samples import Compilations, prepared

CHOICES = [
  {"prompt": "the quick", "choices": ["brown fox", "lazy"], "answer": 0},
  {"prompt": "a lazy", "choices": ["dog jumps", "over", "the"], "answer": 1},
  {"prompt": "the fox\n", "choices": ["jumps", "quick quick"], "answer": 1},
]
ANSWERS = [
  {"prompt": "the", "answer": "quick brown", "max_tokens": 4},
  {"prompt": "a dog", "answer": ["jumps", "over"], "max_tokens": 4},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return prepared(tmp_path_factory.mktemp("tasks"), 2000, held_out=0.02)


@pytest.fixture
def files(here):
  for name, rows in (("choices", CHOICES), ("answers", ANSWERS)):
    (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (here / "night.txt").write_text("the quick brown fox jumps over a lazy dog. " * 4)
  return ["choices.jsonl", "answers.jsonl", "night.txt"]


@pytest.fixture
def configured(corpus, files):
  def make(**changes):
    keys = {
      "dataset_type": "grain", "grain_train_files": corpus, "vocab_size": 512, "grain_worker_count": 0,
      "per_device_batch_size": 2, "steps": 4, "learning_rate": 1e-2, "base_output_directory": "runs", "run_name": "run",
      "enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": 2,
      "max_num_checkpoints_to_keep": 9, "eval_tasks": files, "eval_tasks_interval": 2, "enable_tensorboard": False,
    }  # fmt: skip
    return tiny(**keys | changes)

  return make


def kept(name="run", while_training=True):
  """What a run's folder has, without dates."""
  records = read_evaluations(Path("runs") / name)
  return [
    (record.step, record.task, dict(record.metrics), dict(record.stderr), record.samples)
    for record in records
    if record.while_training == while_training
  ]


def metrics_of(name="run"):
  return {row["step"]: row for row in map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())}


STACKED = {"scan_layers": False, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("changes", [{}, pytest.param(STACKED, marks=pytest.mark.nightly)])
def test_figures_are_those_of_maxtext_eval(configured, files, corpus, changes):
  """On eight devices, to the last digit, in the records and in the metrics; and the report shows them."""
  tasks = [*files, corpus]
  assert len(jax.devices()) == 8
  maxtext.train(configured(eval_tasks=tasks, steps=2, eval_tasks_interval=1, **changes))
  assert main(["eval", "runs/run", "--tasks", ",".join(tasks)]) == 0
  found, rows = kept(), metrics_of()
  assert [record[:2] for record in found] == [
    (step, task) for step in (1, 2) for task in ("choices", "answers", "night", Path(corpus).name)
  ]
  assert found[4:] == kept(while_training=False)
  for step, task, metrics, _, _ in found:
    own = {f"eval_{task}_{name}": value for name, value in metrics.items() if name not in ("tokens", "bytes")}
    assert own.items() <= rows[step].items()
    assert f"eval_{task}_tokens" not in rows[step]
  assert rows[2]["eval_tasks_seconds"] > 0
  assert read_goodput(Path("runs/run"), None).seconds["evaluation"] > 0
  page = write_report([Path("runs/run")], Path("report.html")).read_text()
  assert "<h2>Evaluations</h2>" in page
  assert '<th scope="row">choices</th><td>acc_norm</td>' in page


class At(Callback):
  """Does something when a step has finished."""

  def __init__(self, step, act):
    self.step, self.act = step, act

  def on_step(self, step, metrics):
    if step == self.step:
      self.act()


class Memory(Callback):
  """The bytes of all arrays when each step ended."""

  def __init__(self):
    self.at = []

  def on_step(self, step, metrics):
    gc.collect()
    self.at.append(sum(array.nbytes for array in jax.live_arrays()))


def test_a_run_is_as_without_tasks_and_a_task_that_fails_is_left_out(configured, files, capsys):
  """No bit of the run differs, nothing is compiled twice, and no memory is kept."""
  histories, counts, memories = ([kind(), kind()] for kind in (History, Compilations, Memory))
  Path("other").mkdir()
  Path("other/owls.txt").write_text("the lazy dog")
  for i, tasks in enumerate(([], [*files, "other"])):
    delete = At(1, lambda: Path("other/owls.txt").unlink(missing_ok=True))
    keys = {"run_name": f"run{i}", "eval_tasks": tasks, "eval_tasks_interval": 1, "enable_checkpointing": False}
    callbacks = [histories[i], counts[i], memories[i], *([delete] if i else [])]
    maxtext.train(configured(**keys, steps=3), callbacks=callbacks, devices=jax.devices()[:1])
  np.testing.assert_array_equal(histories[0].losses, histories[1].losses)
  assert counts[1].at[0] > counts[0].at[0], "the engine is compiled with the first evaluation"
  assert counts[1].at[0] == counts[1].at[-1], "and not again"
  assert max(memories[1].at) - max(memories[0].at) < 20_000, "the weights alone have 320,000 bytes, the cache 65,000"
  assert [record[:2] for record in kept("run1")] == [
    (1, "choices"), (1, "answers"), (1, "night"), (1, "other"), *((i, name) for i in (2, 3) for name in
    ("choices", "answers", "night")),
  ]  # fmt: skip
  said = "".join(capsys.readouterr())
  assert "eval_tasks: step 2 has no score of other, which the next evaluation tries: " in said
  assert "step 3: choices acc " in said


def test_a_run_that_was_killed_or_stopped_finds_each_evaluation_once(configured, monkeypatch):
  """What a killed run found after its checkpoint is found again, and what a signal ended is made up for; records of
  `maxtext eval` stay."""
  one = {"devices": jax.devices()[:1]}
  tasks = ["choices.jsonl", "answers.jsonl"]
  maxtext.train(configured(run_name="whole", eval_tasks=tasks), **one)
  config = configured(run_name="parts", eval_tasks=tasks)

  def fail():
    raise RuntimeError("as if killed")

  with pytest.raises(RuntimeError, match="as if killed"):
    maxtext.train(config, callbacks=[At(3, fail)], **one)
  assert [record[0] for record in kept("parts")] == [2, 2]
  folder = Path("runs/parts")
  append_evaluations(folder, [EvaluationRecord("choices", {"acc": 9.0}, step=4, while_training=True)])
  append_evaluations(folder, [EvaluationRecord("mine", {"acc": 1.0}, step=4)])
  with open(folder / EVALUATIONS, "a") as file:
    file.write('{"task": "to')

  answer = Scorer._answers

  def answer_and_stop(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return answer(*arguments)

  with monkeypatch.context() as patched:
    patched.setattr(Scorer, "_answers", answer_and_stop)
    with pytest.raises(SystemExit):
      maxtext.train(config, **one)
  assert "eval_choices_acc" not in metrics_of("parts")[4]
  assert [record[0] for record in kept("parts")] == [2, 2], "what it had found of step 4 is dropped"
  maxtext.train(config, **one)
  assert kept("parts") == kept("whole")
  maxtext.train(config, **one)
  assert kept("parts") == kept("whole"), "and not again"
  assert [record[1] for record in kept("parts", while_training=False)] == ["mine"]


def test_a_run_that_ends_early_is_scored_then(configured):
  keys = {"eval_tasks": ["choices.jsonl"], "eval_tasks_interval": 0, "steps": 9, "enable_checkpointing": False}
  keys |= {"eval_interval": 2, "eval_steps": 1, "target_eval_loss": 99.0, "grain_worker_count_eval": 0}
  maxtext.train(configured(**keys), devices=jax.devices()[:1])
  assert [record[:2] for record in kept()] == [(2, "choices")]


def test_a_loss_that_ends_the_run_is_not_scored(configured, capsys):
  """And where it does not end it, there is no figure of NaN."""
  keys = {"eval_tasks": ["choices.jsonl"], "eval_tasks_interval": 1, "steps": 2, "enable_checkpointing": False}
  keys |= {"learning_rate": 1e30, "warmup_steps_fraction": 0.0, "gradient_clipping_threshold": 0.0}
  with pytest.raises(RunError, match="at step 2"):
    maxtext.train(configured(**keys), devices=jax.devices()[:1])
  assert 2 not in [record[0] for record in kept()]
  assert "step 2 has no score" not in "".join(capsys.readouterr())


def write(name, text):
  Path(name).parent.mkdir(exist_ok=True)
  Path(name).write_text(text)


WRONG = [
  ("no/such.jsonl", None, "eval_tasks: no/such.jsonl: there is no such file or folder"),
  ("empty.txt", "", "eval_tasks: empty.txt has no text"),
  ("lines.jsonl", json.dumps(CHOICES[0]) + '\n{"prompt": 1}\n', "eval_tasks: lines.jsonl, line 2: "),
  (
    "long.jsonl",
    json.dumps({"prompt": "a", "answer": "b", "max_tokens": 32}),
    "eval_tasks: long: max_tokens=32 leaves",
  ),
  ("wide.jsonl", json.dumps({"prompt": "a", "choices": ["dog " * 40, "b"], "answer": 0}), "eval_tasks: wide: a contin"),
  ("column.jsonl", '{"story": "a"}', "eval_tasks: .*column.jsonl"),
  ("a/choices.jsonl", json.dumps(CHOICES[0]), "eval_tasks: two are called choices, after their files"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_wrong_task_is_named_before_the_run(configured, name, text, message):
  if text is not None:
    write(name, text)
  with pytest.raises(ConfigError, match=message):
    OpenedTasks.of(program(configured(eval_tasks=["choices.jsonl", name])), open_scores)


def test_tokenizers_that_do_not_fit(configured, corpus):
  with pytest.raises(ConfigError, match=r"eval_tasks=\['night.txt'\] needs the tokenizer of the model: tokenizer_path"):
    OpenedTasks.of(program(tiny(eval_tasks=["night.txt"])), open_scores)
  small = tiny(eval_tasks=["night.txt"], tokenizer_type="huggingface", tokenizer_path=f"{corpus}/../vocabulary")
  with pytest.raises(ConfigError, match=r"eval_tasks=.* has 294 tokens, 166 more than vocab_size=128"):
    OpenedTasks.of(program(small), open_scores)
  Path("other").mkdir()
  manifest = json.loads(Path(corpus, "manifest.json").read_text())
  manifest["tokenizer"]["sha256"] = "another"
  write("other/manifest.json", json.dumps(manifest))
  with pytest.raises(ConfigError, match="eval_tasks: other was prepared with another tokenizer"):
    OpenedTasks.of(program(configured(eval_tasks=["other"])), open_scores)


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"ici_context_parallelism": 2}, "they are for meshes of data, fsdp, tensor, and this one has {'context': 2}."),
    ({"shard_mode": "explicit"}, "they are not for shard_mode=explicit."),
  ],
)
def test_where_the_engine_cannot_run_the_run_is_refused(configured, changes, reason):
  with pytest.raises(ConfigError, match=r"eval_tasks=\[.*score checkpoints: maxtext eval RUN --tasks TASK") as error:
    OpenedTasks.of(program(configured(**changes), devices=8), open_scores)
  assert reason in str(error.value)


def test_several_processes_are_refused(configured, monkeypatch):
  one = program(configured())
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ConfigError, match="they are for runs of one process, and this one has 2"):
    OpenedTasks.of(one, open_scores)


@pytest.mark.slow
def test_a_task_of_lm_eval_has_the_figures_of_maxtext_eval_and_leaves_random_numbers_alone(configured, here):
  pytest.importorskip("lm_eval")
  task = {
    "task": "foxes", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
    "dataset_kwargs": {"data_files": {"test": str(here / "choices.jsonl")}, "cache_dir": str(here / "datasets")},
    "doc_to_text": "{{prompt}}", "doc_to_choice": "choices", "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
  }  # fmt: skip
  (here / "foxes.yaml").write_text(json.dumps(task))  # JSON is YAML
  states = random.getstate(), np.random.get_state()[1].tolist()
  maxtext.train(configured(eval_tasks=["foxes.yaml"], steps=2))
  assert (random.getstate(), np.random.get_state()[1].tolist()) == states
  assert main(["eval", "runs/run", "--tasks", "foxes.yaml"]) == 0
  [found] = kept()
  assert found[:2] == (2, "foxes")
  assert [found] == kept(while_training=False)


def test_lm_eval_is_an_extra(configured, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "maxtext.evaluation.harness", raising=False)
  with pytest.raises(ConfigError, match=r"eval_tasks: .*lm_eval: pip install 'maxtext\[eval\]'"):
    OpenedTasks.of(program(configured(eval_tasks=["hellaswag"])), open_scores)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_the_command_says_so_and_begins_no_run(here, flags, capsys):
  words = [f"{key}={value}" for key, value in (TINY | {"base_output_directory": "runs"}).items()]
  assert main(["train", *words, "eval_tasks=[no/such.jsonl]", *flags]) == 2
  assert "eval_tasks=['no/such.jsonl'] needs the tokenizer of the model: " in capsys.readouterr().err
  assert not Path("runs").exists()


def test_records_after_a_torn_line_and_those_of_a_later_step(tmp_path):
  own = [EvaluationRecord("a", {"acc": 1.0}, step=step, while_training=True) for step in (2, 4)]
  (tmp_path / EVALUATIONS).write_text("torn")
  append_evaluations(tmp_path, [*own, EvaluationRecord("b", {}, step=4)])
  assert [(one.task, one.step) for one in read_evaluations(tmp_path)] == [("a", 2), ("a", 4), ("b", 4)]
  forget_after(tmp_path, 2)
  assert [(one.task, one.step) for one in read_evaluations(tmp_path)] == [("a", 2), ("b", 4)]
  forget_after(tmp_path / "none", 2)
