"""Whether a process of this machine is still the one that it was: process ids are used again."""

import os
import socket
import sys
import uuid
from pathlib import Path


def start_time(pid: int) -> str | None:
  """When a process of this machine started; None if it does not exist or is a zombie."""
  if not sys.platform.startswith("linux"):
    try:
      os.kill(pid, 0)
    except ProcessLookupError:
      return None
    except PermissionError:
      pass
    return "running"
  try:
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  return None if state in "ZX" else rest[18]


def machine() -> str:
  """The boot and the namespace in which process ids are valid."""
  if not sys.platform.startswith("linux"):
    return f"{socket.gethostname()}-{uuid.getnode()}"
  boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return f"{boot} {os.readlink('/proc/self/ns/pid')}"
