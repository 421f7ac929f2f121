"""A step that looks at every value it computes, and names the operation that made the first one that is not a number.

It is several times slower than the step, and waits for the devices after each.
"""

from functools import partial
from pathlib import Path
from typing import Any

from jax.experimental import checkify

from maxtext.configs.errors import RunError
from maxtext.training.program import Program
from maxtext.training.state import TrainState
from maxtext.training.synchronized_compile import SynchronizedCompile

# JAX 0.10 fails to trace checks of indices in gathers with batch dimensions, which experts have.
_CHECKS = checkify.float_checks | checkify.user_checks
_PACKAGE = Path(__file__).parents[1]


class CheckedStep:
  """The step of a program with run-time checks: a value that is not a number, or a division by zero, ends the run."""

  def __init__(self, program: Program) -> None:
    self._step = SynchronizedCompile(program.jit_step(partial(checkify.checkify, errors=_CHECKS)), batch=1)

  def __call__(self, state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
    number = int(state.step) + 1
    error, result = self._step(state, *arguments)
    if (found := error.get_exception()) is not None:
      raise RunError(f"step {number}: {str(found).rstrip('.')}{_place(found.traceback_info)} (max_checkify=true)")
    return result


def _place(traceback: Any) -> str:
  """Where in the package or in its caller's files an operation is written."""
  frames = [
    (Path(frame.file_name), frame.line_num, frame.function_name)
    for frame in getattr(traceback, "frames", ())
    if "site-packages" not in frame.file_name or Path(frame.file_name).is_relative_to(_PACKAGE)
  ]
  if not frames:
    return ""
  file, line, function = frames[0]
  shown = file.relative_to(_PACKAGE.parent) if file.is_relative_to(_PACKAGE) else file
  return f" at {shown}:{line}, in {function}"
