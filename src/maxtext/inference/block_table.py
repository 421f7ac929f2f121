"""Block table of the paged KV cache: which pages each slot holds. Host bookkeeping that only the scheduler changes.

A KV cache without pages is described as one page per slot that holds the longest sequence.
"""

import numpy as np


class BlockTable:
  """Allocates the pages of a KV cache to slots.

  Args:
    num_pages: pages in the pool.
    page_size: tokens that a page holds.
    slots: number of slots.
    max_pages_per_slot: most pages of one slot.

  Attributes:
    entries: [slots, max_pages_per_slot] the pages of each slot in the order of its tokens. `num_pages` marks an unused
      entry. This array is passed to the device.
  """

  def __init__(self, num_pages: int, page_size: int, slots: int, max_pages_per_slot: int) -> None:
    assert num_pages >= max_pages_per_slot, "make_engine checks this: the longest sequence must fit"
    self.num_pages, self._page_size = num_pages, page_size
    self.entries = np.empty((slots, max_pages_per_slot), np.int32)
    self.clear()

  def clear(self) -> None:
    """Frees all pages."""
    self._free, self._allocated = list(range(self.num_pages)), dict[int, list[int]]()
    self.entries[:] = self.num_pages

  @property
  def num_free_pages(self) -> int:
    """Pages that no slot holds."""
    return len(self._free)

  @property
  def allocated_slots(self) -> list[int]:
    """Slots that hold pages, ordered by their first allocation."""
    return list(self._allocated)

  def allocate(self, slot: int, num_tokens: int) -> bool:
    """Makes sure that a slot has pages for `num_tokens`, or all that a slot may have.

    Returns:
      False, without any change, where not enough pages are free.
    """
    pages, most = self._allocated.get(slot, []), self.entries.shape[1]
    missing = min(-(-num_tokens // self._page_size), most) - len(pages)
    if missing > self.num_free_pages:
      return False
    if missing > 0:
      pages = [*pages, *(self._free.pop() for _ in range(missing))]
      self._allocated[slot] = pages
      self.entries[slot, : len(pages)] = pages
    return True

  def free(self, slot: int) -> None:
    """Frees the pages of a slot."""
    self._free += self._allocated.pop(slot)
    self.entries[slot] = self.num_pages
