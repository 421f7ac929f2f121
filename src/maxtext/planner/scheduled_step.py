"""A step as far as its schedule and its memory: what the compiler has before it writes code, which takes it longest.

What it has then it writes into files only, and it cannot be stopped: it runs in a process that is ended.
"""

import multiprocessing
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax

from maxtext.configs import MaxTextConfig
from maxtext.planner.compile import program_for
from maxtext.planner.compiled_step import CompiledStep, needed_bytes
from maxtext.status_line import show_phase
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device

_FILES = ("_after_buffer_assignment", "-memory-usage-report")  # the schedule is the last file before code
_ERROR = "error"
_END = b"}\n\n"
_POLL = 0.2  # seconds


def scheduled_step(program: Program) -> CompiledStep:
  """The step without the compiler's estimates, which it makes while it writes code."""
  show_phase(f"scheduling for {program.config.compile_topology}")
  start = time.perf_counter()
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
    folder = Path(name)
    compiler = multiprocessing.get_context("spawn").Process(target=_compile, args=(program.config, name), daemon=True)
    compiler.start()
    try:
      while not (ended := compiler.exitcode is not None) and not _is_scheduled(folder):
        time.sleep(_POLL)
    finally:
      compiler.kill()
      compiler.join()
    seconds = time.perf_counter() - start
    if _is_scheduled(folder):
      text, peak = _read(folder)
      return CompiledStep(text, peak, peak - bytes_per_device((program.state, program.batch)), seconds)
    assert ended
    error = folder / _ERROR
    if not error.exists():
      raise RuntimeError(f"the compiler ended with exit code {compiler.exitcode}")
    needed = needed_bytes(error.read_text())
    return CompiledStep(None, needed, needed, seconds)


def _end_with_parent() -> None:
  """Ends this process when its parent has ended, in whatever way."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _compile(config: MaxTextConfig, folder: str) -> None:
  threading.Thread(target=_end_with_parent, daemon=True).start()
  options: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}
  jax.config.update("jax_enable_compilation_cache", False)  # what is found there is not compiled, and writes no files
  try:
    program_for(config)[0].lower().compile(options)
  except jax.errors.JaxRuntimeError as error:
    (Path(folder) / _ERROR).write_text(str(error))


def _file(folder: Path, kind: str) -> Path | None:
  return next(folder.glob(f"*.after_optimizations{kind}.txt"), None)


def _is_scheduled(folder: Path) -> bool:
  """Whether the last file is there as a whole: its last computation is the entry."""
  file = _file(folder, _FILES[0])
  if file is None or file.stat().st_size < len(_END):
    return False
  with file.open("rb") as text:
    text.seek(-len(_END), os.SEEK_END)
    return text.read() == _END and b"\nENTRY " in file.read_bytes()


def _read(folder: Path) -> tuple[str, int]:
  """The scheduled program, and the bytes of the HBM that it needs."""
  text, report = (file.read_text() for kind in _FILES if (file := _file(folder, kind)))
  found = re.search(r"Memory Space: default.*\nTotal bytes: (\d+)", report)
  assert found, "a report names what the default memory space holds"
  return text, int(found[1])
