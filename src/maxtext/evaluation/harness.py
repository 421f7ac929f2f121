"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval), in process, through its `LM` interface.

Tokens, prefixes and windows are those of its `hf` model, so that scores can be compared.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.evaluation.scoring import Loglikelihood, Scorer
from maxtext.inference.sampling import SamplingParams
from maxtext.observe.evaluation_records import EvaluationRecord

try:
  from lm_eval import simple_evaluate
  from lm_eval.api.instance import Instance
  from lm_eval.api.model import LM
  from lm_eval.tasks import TaskManager
except ImportError as missing:
  raise ConfigError(f"Tasks of lm-eval need {missing.name}: pip install 'maxtext[eval]'.") from None

_BOOTSTRAP = 1000  # resamples for the standard errors of metrics that are no means
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessLM(LM):
  """A `Scorer` as a model of lm-eval, for `lm_eval.simple_evaluate(HarnessLM(Scorer(llm)), tasks=[...])`."""

  def __init__(self, scorer: Scorer) -> None:
    super().__init__()
    self._scorer = scorer

  def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Loglikelihood]:
    texts = (request.args for request in requests)
    pairs = (self._scorer.encode_pair(context, continuation, special=True) for context, continuation in texts)
    return list(self._scorer.loglikelihoods(pairs))

  def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
    documents = [self._scorer.encode(request.args[0], special=True) for request in requests]
    windows = [list(self._scorer.rolling(document)) for document in documents]
    scores = self._scorer.loglikelihoods(pair for document in windows for pair in document)
    return [sum(next(scores).value for _ in document) for document in windows]

  def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
    prompts = [self._scorer.encode(request.args[0], special=True) for request in requests]
    return list(
      self._scorer.generate(prompts, [_sampling_params(request.args[1]) for request in requests], "generating")
    )

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    if not add_generation_prompt:
      raise ConfigError("A task begins the assistant's answer itself (gen_prefix): write use_chat_template=false.")
    return self._scorer.tokenizer.render(chat_history, answer=True)

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    return self._scorer.tokenizer.chat_template

  @property
  def tokenizer_name(self) -> str:
    return self._scorer.tokenizer.sha256


@dataclass(frozen=True)
class HarnessTasks:
  """Tasks of lm-eval, by their names or the paths of YAML files."""

  names: Sequence[str]
  num_fewshot: int | None
  limit: int | None
  manager: TaskManager

  @staticmethod
  def of(names: Sequence[str], num_fewshot: int | None, limit: int | None, include_path: str) -> "HarnessTasks":
    """Raises `ConfigError` if there is no task of a name. Its own tasks are listed only where one is named: they are
    thousands."""
    if include_path and not Path(include_path).expanduser().is_dir():
      raise ConfigError(f"--include-path {include_path}: there is no such folder.")
    files = {name for name in names if Path(name).expanduser().is_file()}
    folder = str(Path(include_path).expanduser()) if include_path else None
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not {*names} <= files | {*manager.all_tasks}:
      manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if name not in files and not manager.match_tasks([name])]:
      raise ConfigError(
        f"--tasks {unknown[0]}: there is no such file, and no such task of lm-eval: `lm-eval ls tasks` lists them."
      )
    return HarnessTasks(names, num_fewshot, limit, manager)

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics of all tasks, then of their groups."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork this process, which has threads
    with _own_random_state():
      found = simple_evaluate(
        HarnessLM(scorer),
        tasks=[str(Path(name).expanduser()) if name.startswith("~") else name for name in self.names],
        num_fewshot=self.num_fewshot,
        limit=self.limit,
        task_manager=self.manager,
        bootstrap_iters=_BOOTSTRAP,
        log_samples=False,
        apply_chat_template=scorer.chat,
      )
    results = found["results"] | found.get("groups", {})
    counts = found.get("n-samples", {})
    return [_record(name, metrics, counts.get(name, {}).get("effective", 0)) for name, metrics in results.items()]


@contextmanager
def _own_random_state() -> Iterator[None]:
  """lm-eval seeds the generators of Python and NumPy, which belong to the process: a training run may use them."""
  python, numpy = random.getstate(), np.random.get_state()
  try:
    yield
  finally:
    random.setstate(python)
    np.random.set_state(numpy)


def _record(name: str, metrics: Mapping[str, Any], count: int) -> EvaluationRecord:
  """lm-eval's metrics have names such as `acc,none`, with the filter of the answers, and `acc_stderr,none`."""
  numbers = {key.removesuffix(",none"): value for key, value in metrics.items() if "," in key and _is_number(value)}
  stderr = {key.replace("_stderr", "", 1): value for key, value in numbers.items() if "_stderr" in key}
  return EvaluationRecord(name, {k: v for k, v in numbers.items() if "_stderr" not in k}, stderr, count)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float)


def _sampling_params(given: Mapping[str, Any]) -> SamplingParams:
  """The sampling parameters of a task's `generation_kwargs`: greedy unless it samples."""
  rest = dict(given)
  until = rest.pop("until", None) or []
  most = [value for name in _MAX_TOKENS if (value := rest.pop(name, None)) is not None]
  temperature = float(rest.pop("temperature", None) or 0.0)
  if not rest.pop("do_sample", temperature > 0):
    temperature = 0.0
  stop = [until] if isinstance(until, str) else until
  try:
    return SamplingParams(
      temperature=temperature, stop=[one for one in stop if one], max_tokens=int(most[0]) if most else None, **rest
    )
  except TypeError:
    raise ConfigError(f"generation_kwargs of a task: {', '.join(rest)} cannot be set here.") from None
