"""From the words of `--tasks` to tasks: files of samples, texts and corpora for perplexity, and names of lm-eval."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from maxtext.configs import ConfigError
from maxtext.data.prepared_corpus import MANIFEST
from maxtext.evaluation.file_tasks import read_samples
from maxtext.evaluation.perplexity import CorpusPerplexity, TextPerplexity
from maxtext.evaluation.scoring import Scorer
from maxtext.observe.evaluation_records import EvaluationRecord

_HARNESS_FILES = (".yaml", ".yml")


class EvaluationTask(Protocol):
  """Something that a model is scored on."""

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics, in one record or, of a group of tasks, in several."""
    ...


@dataclass(frozen=True)
class TaskOptions:
  """How tasks are read.

  Attributes:
    limit: only so many samples or documents of each task; None is all.
    column: what holds the text in JSON lines and Parquet.
    num_fewshot: examples in front of each prompt of lm-eval's tasks; None is what each task says.
    include_path: a folder with further tasks of lm-eval; empty for none.
  """

  limit: int | None = None
  column: str = "text"
  num_fewshot: int | None = None
  include_path: str = ""


def open_tasks(words: Sequence[str], options: TaskOptions) -> list[EvaluationTask]:
  """The tasks of some words, each a file, a folder, or the name of a task of lm-eval, which come last.

  Raises:
    ConfigError: there is none of that name, or a file cannot be read.
  """
  tasks, names = list[EvaluationTask](), list[str]()
  for word in words:
    path = Path(word).expanduser()
    if path.exists() and path.suffix not in _HARNESS_FILES:
      tasks.append(_local_task(path, options))
    elif "/" in word and not path.exists():
      raise ConfigError(f"--tasks {word}: there is no such file or folder.")
    else:
      names.append(word)
  unused = {"--num-fewshot": options.num_fewshot is not None, "--include-path": bool(options.include_path)}
  if not names and any(unused.values()):
    flag = next(flag for flag, given in unused.items() if given)
    raise ConfigError(f"{flag} is for tasks of lm-eval, and --tasks names none: leave it out.")
  if names:
    from maxtext.evaluation.harness import HarnessTasks

    tasks.append(HarnessTasks.of(names, options.num_fewshot, options.limit, options.include_path))
  return tasks


def _local_task(path: Path, options: TaskOptions) -> EvaluationTask:
  if (path / MANIFEST).is_file():
    return CorpusPerplexity(path, options.limit)
  first = _first_object(path) if path.is_file() and path.suffix == ".jsonl" else {}
  if "answer" in first:
    return read_samples(path, options.limit, "choices" in first)
  return TextPerplexity.of(path, options.column, options.limit)


def _first_object(path: Path) -> dict[str, Any]:
  """The first line, if it is a JSON object."""
  with path.open("rb") as file:
    line = next((line for line in file if line.strip()), b"")
  try:
    found = json.loads(line)
  except (ValueError, RecursionError):
    return {}
  return found if isinstance(found, dict) else {}
