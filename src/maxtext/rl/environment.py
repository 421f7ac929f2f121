"""Environments: what answers a policy, turn by turn, and rewards it. A class of yours is chosen by `rl_environment`."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

LARGEST_REWARD = 1e6  # advantages of much larger ones are no numbers in float32


class EnvironmentTask(NamedTuple):
  """A row of the tasks: its prompt, as JSON where it is messages, and its answer."""

  prompt: str
  answer: str


class Observation(NamedTuple):
  """What follows an answer. A plain tuple will do.

  Attributes:
    text: what the policy reads next.
    reward: for this turn; those of all turns are added.
    done: whether the conversation is over; the text is then not read.
  """

  text: str
  reward: float
  done: bool


class Environment(Protocol):
  """One conversation: an object is made for each, without arguments, in a process of its own.

  What it raises is read by the policy as the text of an observation, and counted. `random` is seeded by the task.
  """

  def reset(self, task: EnvironmentTask) -> str | Sequence[Mapping[str, Any]] | None:
    """Begins, and returns the prompt: a text, or messages with `use_chat_template=true`; None is the task's own."""
    ...

  def step(self, text: str) -> Observation | tuple[str, float, bool]:
    """Takes an answer, without the stop string or the stop token that ended it."""
    ...


class GymnasiumEnvironment:
  """An environment with gymnasium's `reset` and `step`; a subclass gives it to `__init__`.

  Args:
    environment: such as `gymnasium.make("FrozenLake-v1")`.
    to_action: reads the action from an answer; what it raises, the policy reads.
    to_text: describes an observation.
  """

  def __init__(self, environment: Any, to_action: Callable[[str], Any], to_text: Callable[[Any], str] = str) -> None:
    self._environment, self._to_action, self._to_text = environment, to_action, to_text

  def reset(self, task: EnvironmentTask) -> str:
    """The prompt of the task, and the first observation. An answer that is a number is the seed."""
    seed = int(task.answer) if task.answer.isdecimal() else random.getrandbits(31)  # which the task has seeded
    observation, _ = self._environment.reset(seed=seed)
    return task.prompt + self._to_text(observation)

  def step(self, text: str) -> Observation:
    """One action."""
    observation, reward, terminated, truncated, _ = self._environment.step(self._to_action(text))
    return Observation(self._to_text(observation), float(reward), bool(terminated or truncated))
