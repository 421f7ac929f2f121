"""What groups of answers came to, without their tokens: all that a decision over the groups of a batch needs.

Each process asks a share of the tasks, and all of them know the outcomes of all.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from maxtext.rl.advantages import is_degenerate
from maxtext.rl.answers import AnswerGroup

_PART = "part/"


@dataclass(frozen=True)
class Outcomes:
  """Arrays [groups, answers].

  Attributes:
    rewards: in all.
    lengths: tokens that the policy wrote.
    is_cut: whether the longest length was reached.
    turns: answers of a conversation.
    tool_errors: what failed in an environment.
    parts: rewards by function.
  """

  rewards: np.ndarray
  lengths: np.ndarray
  is_cut: np.ndarray
  turns: np.ndarray
  tool_errors: np.ndarray
  parts: Mapping[str, np.ndarray]

  @staticmethod
  def of(groups: Sequence[AnswerGroup]) -> "Outcomes":
    """Of at least one group."""
    answers = [group.answers for group in groups]
    return Outcomes(
      np.array([group.rewards for group in groups]),
      np.array([group.lengths for group in groups]),
      np.array([[answer.finish_reason == "length" for answer in own] for own in answers]),
      np.array([[answer.turns for answer in own] for own in answers]),
      np.array([[answer.tool_errors for answer in own] for own in answers]),
      {name: np.array([group.parts[name] for group in groups]) for name in groups[0].parts},
    )

  @staticmethod
  def join(parts: "Sequence[Outcomes]") -> "Outcomes":
    """Of all groups, in their order."""
    arrays = [part.arrays for part in parts]
    return Outcomes.from_arrays({name: np.concatenate([own[name] for own in arrays]) for name in arrays[0]})

  @staticmethod
  def from_arrays(arrays: Mapping[str, np.ndarray]) -> "Outcomes":
    """From `arrays`."""
    plain = {name: array for name, array in arrays.items() if not name.startswith(_PART)}
    parts = {name.removeprefix(_PART): array for name, array in arrays.items() if name.startswith(_PART)}
    return Outcomes(**plain, parts=parts)

  @property
  def arrays(self) -> dict[str, np.ndarray]:
    """All arrays by name."""
    plain = {name: array for name, array in vars(self).items() if name != "parts"}
    return plain | {f"{_PART}{name}": array for name, array in self.parts.items()}

  @property
  def is_degenerate(self) -> np.ndarray:
    """Groups [groups] whose rewards are all equal."""
    return is_degenerate(self.rewards)

  def take(self, groups: np.ndarray) -> "Outcomes":
    """Those of some groups, in that order."""
    return Outcomes.from_arrays({name: array[groups] for name, array in self.arrays.items()})


def share_of(count: int, process: int | None = None) -> range:
  """Which of so many tasks a process asks; None is this one."""
  index, processes = jax.process_index() if process is None else process, jax.process_count()
  return range(index * count // processes, (index + 1) * count // processes)


def owners_of(count: int) -> np.ndarray:
  """The process that asks each of so many tasks."""
  return np.repeat(np.arange(jax.process_count()), [len(share_of(count, p)) for p in range(jax.process_count())])


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Arrays by name, for another process."""
  file = io.BytesIO()
  np.savez(file, allow_pickle=False, **dict(arrays))
  return file.getvalue()


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
  """What `to_bytes` was given."""
  with np.load(io.BytesIO(data), allow_pickle=False) as file:
    return dict(file)
