"""The tasks of `eval_tasks`, opened for a run that scores them while it trains."""

from collections.abc import Callable
from functools import partial

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.tokenizers import TextTokenizer
from maxtext.evaluation.scoring import Rehearsal, Scorer
from maxtext.evaluation.tasks import EvaluationTask, TaskOptions, open_tasks
from maxtext.inference.llm import LLM
from maxtext.observe.evaluation_records import EvaluationRecord, metric_name
from maxtext.observe.metric_writers import reason, warn

Score = Callable[[LLM, Callable[[], None]], list[EvaluationRecord]]


def open_scores(config: MaxTextConfig, tokenizer: TextTokenizer, max_length: int) -> dict[str, Score]:
  """What scores each of `eval_tasks`, by the name of its first record.

  All of them are read and encoded once, so that a run does not learn at its first evaluation what cannot be scored.

  Raises:
    ConfigError: there is no such task, or something in it cannot be read or scored.
  """
  rehearsal, found, taken = Rehearsal(config, tokenizer, max_length), dict[str, Score](), set[str]()
  try:
    for task in open_tasks(config.eval_tasks, TaskOptions(config.eval_tasks_limit)):
      own = [record.task for record in task.evaluate(rehearsal)]
      if twice := [name for name in own if metric_name(name) in taken]:
        raise ConfigError(
          f"two are called {twice[0]}, after their files or but for signs: rename one, so that metrics tell them apart."
        )
      taken.update(map(metric_name, own))
      found[own[0]] = partial(_score, task)
  except (ConfigError, RunError) as error:
    raise ConfigError(f"eval_tasks: {str(error).removeprefix('--tasks ')}") from None
  except OSError as error:
    raise ConfigError(f"eval_tasks: {error.filename or 'one'} cannot be read: {error.strerror or error}.") from None
  except Exception as error:  # lm-eval, its packages and its data raise anything
    raise ConfigError(f"eval_tasks={config.eval_tasks} cannot be scored: {reason(error)}") from error
  if rehearsal.num_truncated:
    warn(
      f"eval_tasks: {rehearsal.num_truncated:,} prompts are longer than fits, and lose their beginning: set a larger "
      f"max_target_length."
    )
  return found


def _score(task: EvaluationTask, llm: LLM, between: Callable[[], None]) -> list[EvaluationRecord]:
  return task.evaluate(Scorer(llm, between))
