"""Beginnings of prompts that were prefilled before: rows of cache by their tokens, the least recently used go first.

A row stays on the devices while it fits there, then in the host's memory, and then it is forgotten. One can go on from
any family's row, whatever it keeps; what goes on from a row is a copy.
"""

from collections import OrderedDict
from collections.abc import Sequence

import jax

from maxtext.inference.state import Caches

_Key = tuple[int, ...]


class Prefixes:
  """Rows within two budgets, in bytes."""

  def __init__(self, device_bytes: int, host_bytes: int) -> None:
    self._device, self._host = _Tier(device_bytes), _Tier(host_bytes)

  def find(self, prompt: Sequence[int]) -> tuple[int, Caches | None]:
    """The longest beginning that is known and leaves a token to be fed: its length, and its row."""
    most = len(prompt) - 1
    for length in sorted(self._device.lengths | self._host.lengths, reverse=True):
      if length <= most and (row := self._take(tuple(prompt[:length]))) is not None:
        return length, row
    return 0, None

  def keep(self, prompt: Sequence[int], count: int, row: Caches) -> None:
    """Remembers the row of the first `count` tokens of a prompt; what it displaces goes on to the host."""
    self._remember(tuple(prompt[:count]), row)

  def clear(self) -> None:
    """Forgets all rows; they are of no use to other parameters."""
    for tier in (self._device, self._host):
      for key in list(tier.rows):
        tier.forget(key)

  def _remember(self, key: _Key, row: Caches) -> None:
    self._host.forget(key)
    for displaced, its_row in self._device.keep(key, row):
      self._host.keep(displaced, jax.device_get(its_row))

  def _take(self, key: _Key) -> Caches | None:
    row = self._device.rows.get(key) or self._host.rows.get(key)
    if row is not None:
      self._remember(key, row)
    return row


class _Tier:
  """Rows of one memory, the least recently used first."""

  def __init__(self, budget: int) -> None:
    self.rows: OrderedDict[_Key, Caches] = OrderedDict()
    self._budget, self._used = budget, 0

  @property
  def lengths(self) -> set[int]:
    """Of the beginnings that it holds."""
    return {len(key) for key in self.rows}

  def keep(self, key: _Key, row: Caches) -> list[tuple[_Key, Caches]]:
    """Takes a row; returns what has no room any more, which may be that row itself."""
    self.forget(key)
    self.rows[key] = row
    self._used += _bytes(row)
    displaced = []
    while self._used > self._budget:
      oldest = next(iter(self.rows))
      displaced.append((oldest, self.rows[oldest]))
      self.forget(oldest)
    return displaced

  def forget(self, key: _Key) -> None:
    if (row := self.rows.pop(key, None)) is not None:
      self._used -= _bytes(row)


def _bytes(row: Caches) -> int:
  return sum(array.nbytes for array in jax.tree.leaves(row))
