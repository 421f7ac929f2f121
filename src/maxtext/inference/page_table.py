"""Which pages of the cache each slot has; bookkeeping on the host, which the scheduler alone changes.

A cache without pages is one that has a page for every slot, as long as a text can be.
"""

import numpy as np


class PageTable:
  """Pages that are free, and those of each slot.

  Args:
    count: pages there are.
    size: tokens that a page holds.
    slots: who may have pages.
    most: pages that a slot may have.

  Attributes:
    rows: [slots, most] the pages of each slot in the order of its text, as the devices are told; `count` is none.
  """

  def __init__(self, count: int, size: int, slots: int, most: int) -> None:
    assert count >= most, "refused before: the longest text would never have its pages"
    self.count, self._size = count, size
    self.rows = np.empty((slots, most), np.int32)
    self.clear()

  def clear(self) -> None:
    """Takes all pages back."""
    self._free, self._held = list(range(self.count)), dict[int, list[int]]()
    self.rows[:] = self.count

  @property
  def free(self) -> int:
    """Pages that nobody has."""
    return len(self._free)

  @property
  def holders(self) -> list[int]:
    """Slots that have pages, who took theirs first first."""
    return list(self._held)

  def take(self, slot: int, tokens: int) -> bool:
    """Sees to it that a slot has pages for so many tokens, or all that it may have; False changes nothing."""
    held, most = self._held.get(slot, []), self.rows.shape[1]
    missing = min(-(-tokens // self._size), most) - len(held)
    if missing > self.free:
      return False
    if missing > 0:
      held = [*held, *(self._free.pop() for _ in range(missing))]
      self._held[slot] = held
      self.rows[slot, : len(held)] = held
    return True

  def give_back(self, slot: int) -> None:
    """Frees the pages of a slot."""
    self._free += self._held.pop(slot)
    self.rows[slot] = self.count
