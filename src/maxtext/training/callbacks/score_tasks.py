"""Evaluation tasks while training: what `maxtext eval` finds, with the current parameters."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.batch import IteratorState
from maxtext.data.tokenizers import TextTokenizer
from maxtext.observe.evaluation_records import (
  EVALUATIONS,
  EvaluationRecord,
  append_evaluations,
  forget_after,
  metric_name,
  read_evaluations,
)
from maxtext.observe.metric_writers import reason, warn
from maxtext.observe.run_directory import RunDirectory
from maxtext.observe.visible_text import visible
from maxtext.status_line import show_phase
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.live_engine import LiveLLM, engine_problem, longest_prompt
from maxtext.training.program import Program
from maxtext.training.state import TrainState

if TYPE_CHECKING:  # inference takes half a second to import, which runs without tasks do not wait for
  from maxtext.inference.llm import LLM

_LOG = logging.getLogger(__name__)

Score = Callable[["LLM", Callable[[], None]], list[EvaluationRecord]]
"""Scores a task with a model. What it is given besides is called between prompts, and raises to end the evaluation."""

OpenTasks = Callable[[MaxTextConfig, TextTokenizer, int], Mapping[str, Score]]
"""What scores each of `eval_tasks`, by name, with a tokenizer and the most tokens of a prompt; `ConfigError` where one
cannot be scored. Whoever puts a run together hands it in: training knows no tasks."""


@dataclass(frozen=True)
class OpenedTasks:
  """The tasks of a run, which can be scored."""

  program: Program
  tokenizer: TextTokenizer
  scores: Mapping[str, Score]

  @staticmethod
  def of(program: Program, open_tasks: OpenTasks | None) -> "OpenedTasks | None":
    """None for a run without tasks; raises `ConfigError` where its tasks or this run cannot be scored."""
    c = program.config
    if not c.eval_tasks:
      return None
    assert open_tasks is not None, "maxtext.train hands it in"
    problem = engine_problem(program) if program.mapped is None else "they are not for learn_to_init_mode=true."
    if problem:
      raise ConfigError(
        f"eval_tasks={c.eval_tasks}: {problem} Leave it out, and score checkpoints: maxtext eval RUN --tasks TASK."
      )
    from maxtext.inference.inference_model import load_run_tokenizer

    try:
      tokenizer = load_run_tokenizer(c)
    except ConfigError as error:
      raise ConfigError(f"eval_tasks={c.eval_tasks} needs the tokenizer of the model: {error}") from None
    show_phase("reading eval_tasks")
    return OpenedTasks(program, tokenizer, open_tasks(c, tokenizer, longest_prompt(c)))


class ScoreTasks(Callback):
  """Scores tasks every `eval_tasks_interval` steps and after the last, for metrics and for `evaluations.jsonl`.

  A task that fails is left out until the next evaluation. An evaluation that a signal ends is made up for when the run
  resumes.

  Args:
    tasks: to score.
    run: the folder of the run; what it found after step `after` is removed, since that is found again.
    after: the step that the run starts from.
    last: the last step.
    guard: ends the run with metrics whose parameters are not worth scoring.
    stop: whether the run is to end now.
  """

  evaluates = True
  phase = "evaluation"

  def __init__(
    self, tasks: OpenedTasks, run: RunDirectory, after: int, last: int, guard: LossGuard, stop: Callable[[], bool]
  ) -> None:
    program = tasks.program
    self._model = LiveLLM(program.config, program.model, tasks.tokenizer, str(run.store or run.path))
    self._scores, self._folder, self._guard, self._stop = tasks.scores, run.path, guard, stop
    self._interval, self._last, self._scored = program.config.eval_tasks_interval, last, 0
    self._unwritten: list[EvaluationRecord] = []
    try:
      forget_after(run.path, after)
    except OSError as error:
      self._say_unwritten(error)

  def due(self, step: int) -> bool:
    return step == self._last or (self._interval > 0 and step % self._interval == 0)

  def make_up(self, step: int, state: TrainState) -> None:
    """Scores the state that a run resumes with, if that was due and did not happen."""
    found = any(record.while_training and record.step == step for record in read_evaluations(self._folder))
    if self.due(step) and not found:
      self._score(step, state)

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    if self._guard.ends(metrics):
      return False
    began = time.perf_counter()
    found = self._score(step, state)
    if found is None:
      return True
    metrics |= {name: value for record in found for name, value in _metrics(record).items()}
    metrics["eval_tasks_seconds"] = time.perf_counter() - began
    return False

  def on_end(self, step: int, state: TrainState, position: Callable[[], IteratorState]) -> None:
    if step != self._scored and not self._stop():  # the data, or a target, ended the run before its last step
      self._score(step, state)

  def close(self) -> None:
    self._write([])

  def _score(self, step: int, state: TrainState) -> list[EvaluationRecord] | None:
    """What was found; None where a signal asks the run to end."""
    params, found = state.params | state.buffers, list[EvaluationRecord]()
    for name, score in self._scores.items():
      show_phase(f"scoring {name} at step {step}")
      try:
        with self._model.loaded(params, step) as llm:
          found += score(llm, self._go_on)
      except _StopError:
        return None
      except Exception as error:  # a file that is gone, memory that does not suffice
        warn(
          f"eval_tasks: step {step} has no score of {visible(name)}, which the next evaluation tries: {reason(error)}"
        )
    date = time.strftime("%Y-%m-%d %H:%M:%S %z")
    found = [replace(record, step=step, date=date, while_training=True) for record in found]
    self._scored = step
    self._write(found)
    for record in found:
      text = ", ".join(f"{metric} {value:.4f}" for metric, value in record.metrics.items() if isinstance(value, float))
      _LOG.info(f"step {step}: {visible(record.task)} {text}")
    return found

  def _go_on(self) -> None:
    if self._stop():
      raise _StopError

  def _write(self, found: Sequence[EvaluationRecord]) -> None:
    self._unwritten += found
    try:
      if self._unwritten:
        append_evaluations(self._folder, self._unwritten)
      self._unwritten = []
    except OSError as error:
      self._say_unwritten(error)

  def _say_unwritten(self, error: OSError) -> None:
    warn(f"{self._folder / EVALUATIONS} cannot be written: {error.strerror}. The run continues.")


class _StopError(Exception):
  """A signal asks the run to end."""


def _metrics(record: EvaluationRecord) -> dict[str, float]:
  """By names that every metric writer takes; numbers of tokens and the like stay in the record."""
  found = {
    f"eval_{record.task}_{metric}": value for metric, value in record.metrics.items() if isinstance(value, float)
  }
  return {metric_name(name): value for name, value in found.items()}
