"""`maxtext eval`: perplexity, tasks from files, and tasks of lm-eval, for a trained model."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli.decode import add_model_arguments, key_overrides, load_model, resolve_model_config
from maxtext.cli.interrupt import interrupt_exits, prompt_interrupt
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.status_line import status_line

if TYPE_CHECKING:
  from maxtext.observe.evaluation_records import EvaluationRecord

_GRACE_SECONDS = 3.0  # for a step to end after Ctrl-C, and the table of what was found to be printed


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "eval",
    help="score a trained model on texts and tasks",
    description="Score a trained model: perplexity and bits per byte of texts and prepared corpora, multiple choice "
    "and exact match from .jsonl files, and the tasks of lm-eval by name. A run keeps the results, and its report "
    "shows them. use_chat_template=true asks as a chat.",
  )
  add_model_arguments(parser, sampling=False)
  parser.add_argument(
    "--tasks", action="append", required=True, metavar="TASK,...",
    help="files and folders, and names or YAML files of lm-eval's tasks, separated by commas; may be repeated",
  )  # fmt: skip
  parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples or documents of each task")
  parser.add_argument("--column", default="text", metavar="NAME", help="what holds the text of .jsonl (default text)")
  parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples in each prompt of lm-eval's tasks")
  parser.add_argument("--include-path", default="", metavar="FOLDER", help="further tasks for lm-eval, as YAML files")
  parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
  parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
  for flag, least in (("limit", 1), ("num_fewshot", 0)):
    if (value := getattr(arguments, flag)) is not None and value < least:
      raise ConfigError(f"--{flag.replace('_', '-')} {value}: it must be at least {least}.")
  words = [word.strip() for listed in arguments.tasks for word in listed.split(",") if word.strip()]
  if not words:
    raise ConfigError("--tasks names none: write --tasks FILE, or the name of a task of lm-eval.")
  config = _with_long_prompts(resolve_model_config(key_overrides(arguments), arguments.strict), arguments.overrides)
  with status_line() as status, prompt_interrupt(_GRACE_SECONDS):
    status.phase("loading tasks")
    with interrupt_exits():
      from maxtext.evaluation.scoring import Scorer
      from maxtext.evaluation.tasks import TaskOptions, open_tasks
      from maxtext.inference.llm import LLM

    options = TaskOptions(arguments.limit, arguments.column, arguments.num_fewshot, arguments.include_path)
    tasks = open_tasks(words, options)
    status.phase("loading the model")
    scorer = Scorer(LLM.of(load_model(arguments, config)))
    date, step = time.strftime("%Y-%m-%d %H:%M:%S %z"), _step(config.load_parameters_path)
    found: list[EvaluationRecord] = []
    try:
      for task in tasks:
        records = [replace(record, step=step, date=date) for record in task.evaluate(scorer)]
        found += records
        _keep(config.load_parameters_path, records)
    finally:  # a task that fails takes nothing from those before it, which may have taken hours
      _print(found, scorer.num_truncated, arguments.json)
  return 0


def _print(found: "Sequence[EvaluationRecord]", num_truncated: int, as_json: bool) -> None:
  if found and as_json:
    print(json.dumps([asdict(record) for record in found]))
  elif found:
    _print_table(found)
  if num_truncated:
    count = f"{num_truncated:,} prompts"
    print(f"maxtext: {count} were longer than fits, and lost their beginning: set max_target_length.", file=sys.stderr)


def _with_long_prompts(config: MaxTextConfig, words: Sequence[str]) -> MaxTextConfig:
  """The configuration with room for prompts of the longest sequence, unless their length was given: what is scored is
  all prompt."""
  if any(word.startswith("max_prefill_predict_length=") for word in words):
    return config
  return config.model_copy(update={"max_prefill_predict_length": config.max_target_length - 1})


def _step(path: str) -> int | None:
  """The step of a checkpoint; None for weights of elsewhere."""
  from maxtext.checkpoint.inspect import read_metadata
  from maxtext.checkpoint.location import locate

  with suppress(ConfigError):
    return read_metadata(locate(path)).step
  return None


def _keep(path: str, found: "Sequence[EvaluationRecord]") -> None:
  """Writes the results into the folder of the run, if the model is of one."""
  from maxtext.checkpoint.location import FOLDER
  from maxtext.observe.evaluation_records import EVALUATIONS, append_evaluations

  given = Path(path).expanduser()
  folder = next((one for one in (given, *given.parents[:2]) if (one / FOLDER).is_dir()), None)
  if folder is None:
    return
  try:
    append_evaluations(folder, found)
  except OSError as error:
    print(f"maxtext: {folder / EVALUATIONS} cannot be written: {error.strerror}.", file=sys.stderr)


def _print_table(found: "Sequence[EvaluationRecord]") -> None:
  rows = [["task", "metric", "value", "stderr", "samples"]]
  for record in found:
    for metric, value in record.metrics.items():
      stderr = f"{record.stderr[metric]:.4f}" if metric in record.stderr else ""
      shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
      rows.append([record.task, metric, shown, stderr, f"{record.samples:,}"])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  first, second, *others = widths
  for row in rows:
    cells = [row[0].ljust(first), row[1].ljust(second), *map(str.rjust, row[2:], others)]
    print("  ".join(cells))
