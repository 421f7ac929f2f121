"""Rewards of answers: by format, by the answer they give, and by functions of the user's own."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import did_you_mean
from maxtext.rl.code_answers import CodeRunner
from maxtext.rl.reward_process import MOST_PROCESSES, RewardProcesses

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)(?:/(\d+\.?\d*|\.\d+))?(%?)")
_LONGEST_NUMBER = 1000  # characters

MATH = "math_verify"  # a name of `reward_functions`, and the module that it needs
CODE = "code"

RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]
"""Rewards from prompts, completions and answers, which are as many."""


@dataclass(frozen=True)
class Rewards:
  """The rewards of a run.

  Attributes:
    functions: by the names of `reward_functions`.
    weights: of each.
  """

  functions: Mapping[str, RewardFunction]
  weights: Sequence[float]

  @staticmethod
  def of(config: MaxTextConfig) -> "Rewards":
    """As configured; raises `ConfigError` for a function that is not there."""
    functions: dict[str, RewardFunction] = {}
    try:
      for name in config.reward_functions:
        functions[name] = _function(config, name)
    except ConfigError:
      Rewards(functions, ()).close()
      raise
    return Rewards(functions, config.reward_weights or [1.0] * len(functions))

  def __call__(
    self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
  ) -> dict[str, np.ndarray]:
    """The rewards of each function, before weights."""
    return {name: np.asarray(f(prompts, completions, answers), float) for name, f in self.functions.items()}

  def total(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
    """The weighted sum."""
    return sum((w * rewards[name] for name, w in zip(self.functions, self.weights, strict=True)), np.zeros(()))

  def is_correct(self, config: MaxTextConfig, completion: str, answer: str, rewards: Mapping[str, float]) -> bool:
    """Whether an answer counts as right in an evaluation: by its text with `answer`, else if the first function that is
    not of its format, or else the environment, gives more than 0."""
    if "answer" in self.functions:
      found = extract_answer(config, completion)
      return found is not None and is_equal(found, answer)
    deciding = [name for name in rewards if name not in ("format", "format_tags")] or list(rewards)
    return rewards[deciding[0]] > 0

  @property
  def failures(self) -> int:
    """How often a function failed, and its answers got 0."""
    return sum(getattr(function, "failures", 0) for function in self.functions.values())

  def close(self) -> None:
    """Ends the processes of functions."""
    for process in self._processes:
      process.close()

  @property
  def _processes(self) -> list[RewardProcesses]:
    return [function for function in self.functions.values() if isinstance(function, RewardProcesses)]


def extract_answer(config: MaxTextConfig, completion: str) -> str | None:
  """What is between the last two marks of a solution; None where there are none."""
  begin, end = config.solution_start_token, config.solution_end_token
  _, found, rest = completion.rpartition(begin)
  return rest.partition(end)[0] if found and end in rest else None


def is_equal(guess: str, answer: str) -> bool:
  """Whether two texts say the same, as texts or as numbers."""
  ours, theirs = parse_number(guess), parse_number(answer)
  return guess.strip() == answer.strip() or (ours is not None and ours == theirs)


def parse_number(text: str) -> Fraction | None:
  """The number that a text is, such as 1,234.5 or $3/4 or 50%, exactly; None if it is none."""
  plain = text.strip().removeprefix("$").replace(",", "").removesuffix(".")
  found = _NUMBER.fullmatch(plain) if len(plain) <= _LONGEST_NUMBER else None
  if not found:
    return None
  number, divisor, percent = found.groups()
  below = Fraction(divisor or 1)
  return Fraction(number) / below / (100 if percent else 1) if below else None


def _format(config: MaxTextConfig, completion: str) -> float:
  text, marks = completion.strip(), _marks(config)
  place = 0
  for mark in marks:
    found = text.find(mark, place)
    if found < 0 or (mark == marks[0] and found):
      return 0.0
    place = found + len(mark)
  return config.reward_exact_format_match if text.endswith(marks[-1]) else 0.0


def _format_tags(config: MaxTextConfig, completion: str) -> float:
  once = [completion.count(mark) == 1 for mark in _marks(config)]
  return sum(config.reward_partial_format_match if is_once else config.penalty_incorrect_format for is_once in once)


def _answer(config: MaxTextConfig, completion: str, answer: str) -> float:
  guess = extract_answer(config, completion)
  if guess is None:
    return config.penalty_incorrect_format
  if guess == answer:
    return config.reward_exact_answer
  if guess.strip() == answer.strip():
    return config.reward_white_space_format_match
  ours, theirs = parse_number(guess), parse_number(answer)
  if ours is None or theirs is None:
    return config.penalty_incorrect_answer
  if ours == theirs:
    return config.reward_exact_answer
  far = abs(ours / theirs - 1) if theirs else 1
  near = ((10, config.reward_ratio_guess_to_answer_high), (5, config.reward_ratio_guess_to_answer_low))
  return next((reward for part, reward in near if far * part <= 1), config.penalty_incorrect_answer)


def _marks(config: MaxTextConfig) -> tuple[str, str, str, str]:
  c = config
  return c.reasoning_start_token, c.reasoning_end_token, c.solution_start_token, c.solution_end_token


_BUILT_IN: Mapping[str, Callable[[MaxTextConfig, str, str], float]] = {
  "format": lambda config, completion, _: _format(config, completion),
  "format_tags": lambda config, completion, _: _format_tags(config, completion),
  "answer": _answer,
  "exact_match": lambda _, completion, answer: float(completion.strip() == answer.strip()),
}


def _function(config: MaxTextConfig, name: str) -> RewardFunction:
  if name in _BUILT_IN:
    return partial(_each, partial(_BUILT_IN[name], config))
  if name == MATH:
    return _math(config)
  if name == CODE:
    return CodeRunner(config.code_timeout, int(config.code_memory_gb * 2**30), partial(extract_answer, config))
  if ":" not in name:
    known = [*_BUILT_IN, MATH, CODE]
    raise ConfigError(
      f"reward_functions: '{name}' is none of {', '.join(known)}, and no module:function.{did_you_mean(name, known)}"
    )
  return RewardProcesses(name, config.math_verify_timeout)


def _math(config: MaxTextConfig) -> RewardFunction:
  """Of what the marks of a solution hold, or of the whole text where there are none."""
  answers = config.batch_size * config.num_generations
  count = config.math_verify_num_procs or min(answers, os.cpu_count() or 1, MOST_PROCESSES)

  def taken(completion: str) -> str:
    found = extract_answer(config, completion)
    return completion if found is None else found

  return RewardProcesses("maxtext.rl.math_answers:verify_answers", config.math_verify_timeout, count, taken)


def _each(
  one: Callable[[str, str], float], prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
) -> list[float]:
  return [one(completion, answer) for completion, answer in zip(completions, answers, strict=True)]
