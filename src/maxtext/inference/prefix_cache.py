"""Prefix caching: the KV cache of prompt prefixes that were prefilled before, with least-recently-used eviction.

An entry stays in device memory while it fits its budget, then moves to host memory, and is then dropped. Any kind of
cache (KV, ring, latent, recurrent state) can be continued from an entry; prefill continues on a copy. The checksum of
an adapter is part of the key, so no adapter continues from what another computed, even one of the same name.
"""

from collections import OrderedDict
from collections.abc import Sequence

import jax

from maxtext.inference.decode_state import Caches

_Key = tuple[str, tuple[int, ...]]  # the checksum of the adapter, and the tokens


class PrefixCache:
  """Cache rows by the tokens of a prefix and the adapter, within a budget of device bytes and one of host bytes."""

  def __init__(self, device_bytes: int, host_bytes: int) -> None:
    self._device, self._host = _MemoryTier(device_bytes), _MemoryTier(host_bytes)

  def lookup(self, prompt: Sequence[int], adapter: str = "") -> tuple[int, Caches | None]:
    """The longest cached prefix that leaves at least one token to feed: its length and its row, or (0, None)."""
    most = len(prompt) - 1
    for length in sorted(self._device.lengths | self._host.lengths, reverse=True):
      if length <= most and (row := self._get((adapter, tuple(prompt[:length])))) is not None:
        return length, row
    return 0, None

  def store(self, prompt: Sequence[int], count: int, row: Caches, adapter: str = "") -> None:
    """Stores the row of the first `count` tokens of a prompt. Entries evicted from the device move to the host."""
    self._store((adapter, tuple(prompt[:count])), row)

  def clear(self) -> None:
    """Drops all entries, for example because the model's parameters have changed."""
    for tier in (self._device, self._host):
      for key in list(tier.rows):
        tier.remove(key)

  def _store(self, key: _Key, row: Caches) -> None:
    self._host.remove(key)
    for evicted_key, evicted_row in self._device.store(key, row):
      self._host.store(evicted_key, jax.device_get(evicted_row))

  def _get(self, key: _Key) -> Caches | None:
    row = self._device.rows.get(key) or self._host.rows.get(key)
    if row is not None:
      self._store(key, row)
    return row


class _MemoryTier:
  """Rows in one memory, the least recently used first."""

  def __init__(self, budget: int) -> None:
    self.rows: OrderedDict[_Key, Caches] = OrderedDict()
    self._budget, self._used = budget, 0

  @property
  def lengths(self) -> set[int]:
    """Lengths of the stored prefixes."""
    return {len(tokens) for _, tokens in self.rows}

  def store(self, key: _Key, row: Caches) -> list[tuple[_Key, Caches]]:
    """Stores a row. Returns the evicted entries, which may include the row itself."""
    self.remove(key)
    self.rows[key] = row
    self._used += _bytes(row)
    evicted = []
    while self._used > self._budget:
      oldest = next(iter(self.rows))
      evicted.append((oldest, self.rows[oldest]))
      self.remove(oldest)
    return evicted

  def remove(self, key: _Key) -> None:
    if (row := self.rows.pop(key, None)) is not None:
      self._used -= _bytes(row)


def _bytes(row: Caches) -> int:
  return sum(array.nbytes for array in jax.tree.leaves(row))
