"""Runs of any method, for `maxtext.train` and the commands. Policy optimization is imported where it is chosen."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.tokenizers import TextTokenizer
from maxtext.training import run
from maxtext.training.arguments import check_arguments
from maxtext.training.callbacks.score_tasks import Score
from maxtext.training.state import TrainState

P = ParamSpec("P")
R = TypeVar("R")


def _like(function: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
  """Gives a function the arguments and the documentation of another, as editors and type checkers see them."""
  return wraps(function)


@_like(run.train)
def train(config: MaxTextConfig, **arguments: Any) -> TrainState:
  check_arguments(config)
  if not config.use_grpo:
    return run.train(config, open_tasks=_open_tasks, **arguments)
  from maxtext.rl.train_policy import train_policy

  if taken := [name for name in ("objective", "data", "devices") if arguments.pop(name, None) is not None]:
    raise ConfigError(f"use_grpo=true has {taken[0]} of its own: leave that argument out.")
  return train_policy(config, **arguments)


def dry_run(config: MaxTextConfig, *, config_name: str = "") -> list[str]:
  """As `maxtext.training.run.dry_run`, for any method."""
  if not config.use_grpo:
    return run.dry_run(config, config_name=config_name, open_tasks=_open_tasks)
  from maxtext.rl.train_policy import dry_run_policy

  return dry_run_policy(config, config_name=config_name)


def _open_tasks(config: MaxTextConfig, tokenizer: TextTokenizer, max_length: int) -> Mapping[str, Score]:
  from maxtext.evaluation.while_training import open_scores

  return open_scores(config, tokenizer, max_length)
