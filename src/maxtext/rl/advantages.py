"""Advantages of the answers of a group, and the share of each token in the loss."""

from collections.abc import Callable, Mapping

import numpy as np

_SMALL = 1e-4


def _grpo(rewards: np.ndarray) -> np.ndarray:
  return _dr_grpo(rewards) / (rewards.std(axis=1, ddof=1, keepdims=True) + _SMALL)


def _dr_grpo(rewards: np.ndarray) -> np.ndarray:
  return rewards - rewards.mean(axis=1, keepdims=True)


def _rloo(rewards: np.ndarray) -> np.ndarray:
  others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
  return rewards - others


ADVANTAGE_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
  "grpo": _grpo,
  "dr_grpo": _dr_grpo,
  "rloo": _rloo,
}
"""Advantages [P,G] from the rewards of P groups of G answers, by the values of `rl_advantage`."""


def is_degenerate(rewards: np.ndarray) -> np.ndarray:
  """Groups [P] whose rewards [P,G] are all equal, from which nothing can be learnt."""
  return (rewards == rewards[:, :1]).all(axis=1)


def _sequence(lengths: np.ndarray, longest: int) -> np.ndarray:
  return 1.0 / (np.maximum(lengths, 1) * len(lengths))


def _token(lengths: np.ndarray, longest: int) -> np.ndarray:
  return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))


def _fixed(lengths: np.ndarray, longest: int) -> np.ndarray:
  return np.full(len(lengths), 1.0 / (longest * len(lengths)))


SHARE_FUNCTIONS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
  "sequence": _sequence,
  "token": _token,
  "fixed": _fixed,
}
"""The share of every token of an answer in the loss, from the lengths of the answers that count and the longest that an
answer may be, by the values of `rl_aggregation`."""


def overlong_penalties(lengths: np.ndarray, longest: np.ndarray, buffer: int, penalty: float) -> np.ndarray:
  """What is subtracted from rewards of long answers: from 0 at `longest - buffer` tokens to `penalty` at the end."""
  if not buffer:
    return np.zeros(len(lengths))
  return penalty * np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)
