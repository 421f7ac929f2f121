"""A hash of numbers, for randomness that is a function of seed and position."""

import numpy as np


def splitmix64(x: np.ndarray) -> np.ndarray:
  """The finaliser of SplitMix64, on uint64."""
  with np.errstate(over="ignore"):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
