"""Forked processes in which a fault is armed. JAX is imported before the fork, and begins to compute after it."""

import ctypes
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("faults.c")
_LIBRARY = "CAMPAIGN_LIBRARY"
_WRONG = 99
KILL_BEFORE, KILL_WITHIN = -1, -2


class WrongError(AssertionError):
  """What a fault must never lead to."""


@dataclass(frozen=True)
class Ended:
  """How a child ended, and what it printed."""

  code: int  # below 0: the signal
  text: str
  seconds: float

  @property
  def killed(self) -> bool:
    return self.code == -signal.SIGKILL

  def expect_success(self, what: str) -> None:
    if self.code:
      raise WrongError(f"{what} ended with {self.code}: {self.text[-3000:]}")


def preload() -> None:
  """Compiles the library and starts this command again with it, once."""
  if _LIBRARY in os.environ:
    return
  library = Path(tempfile.gettempdir(), f"campaign-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so")
  if not library.exists():
    unfinished = library.with_suffix(f".{os.getpid()}")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", unfinished, _SOURCE, "-ldl", "-lpthread"], check=True)
    unfinished.rename(library)
  environment = os.environ | {"LD_PRELOAD": str(library), _LIBRARY: str(library), "JAX_PLATFORMS": "cpu"}
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def cache_compiled() -> None:
  """Children compile once what all of them compute."""
  import jax

  jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "campaign-compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def imported_by(work: Callable[[], None]) -> None:
  """Runs a function in a child, and imports here what it imported, so that later children find it."""
  with tempfile.NamedTemporaryFile("r") as names:

    def noted() -> None:
      work()
      Path(names.name).write_text("\n".join(sys.modules))

    in_child(noted, 600).expect_success("what is there before")
    for name in names.read().splitlines():
      with suppress(Exception):  # a module that only its package may import
        importlib.import_module(name)


def library() -> ctypes.CDLL:
  """The preloaded library."""
  found = ctypes.CDLL(os.environ[_LIBRARY])
  found.campaign_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
  found.campaign_record.argtypes = [ctypes.c_char_p, ctypes.c_int]
  found.campaign_calls.restype = ctypes.c_long
  return found


def in_child(work: Callable[[], int | None], seconds: float = 120) -> Ended:
  """Runs a function in a forked process; its return value is the exit code. One that hangs is ended, which is wrong."""
  with tempfile.TemporaryFile() as output:
    started = time.monotonic()
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it runs yet
      pid = os.fork()
    if not pid:
      _be_child(work, output.fileno())
    status = _wait(pid, seconds)
    took = time.monotonic() - started
    output.seek(0)
    text = output.read().decode(errors="replace")
  if status is None:
    raise WrongError(f"it hung for {seconds} s: {text[-3000:]}")
  ended = Ended(os.waitstatus_to_exitcode(status), text, took)
  if ended.code == _WRONG:
    raise WrongError(text[-3000:])
  return ended


def _be_child(work: Callable[[], int | None], output: int) -> None:
  code = _WRONG
  try:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = work() or 0
  except BaseException:
    traceback.print_exc()
  finally:
    library().campaign_disarm()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
      return status
    time.sleep(0.002)
  os.killpg(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  return None
