"""How much memory a device has."""

import os
from typing import Any


def host_memory() -> int:
  """Bytes of this host's physical memory."""
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(device: Any) -> int | None:
  """Bytes of a device's own memory. None for a CPU, which uses the host's, and where it is not known."""
  stats = None if device.platform == "cpu" else device.memory_stats()
  return (stats or {}).get("bytes_limit")


def memory_in_use(device: Any) -> tuple[int, int] | None:
  """The most bytes of a device's own memory that were in use, and those that it has; None where that is not known."""
  stats = None if device.platform == "cpu" else device.memory_stats()
  used, limit = (stats or {}).get("peak_bytes_in_use"), (stats or {}).get("bytes_limit")
  return (used, limit) if used and limit else None
