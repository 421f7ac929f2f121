"""Calls that fail once: ENOSPC, EIO, EINTR and ETIMEDOUT at each call that reads or changes a file of a command.

A command may go on, or end with one line and exit code 1 or 2: never with a traceback, never with damage. Started again
it does its work.
"""

import errno
import shutil
from pathlib import Path

from benchmarks.campaign.child import WrongError, imported_by, in_child, library
from benchmarks.campaign.results import Count
from benchmarks.campaign.targets import COMMANDS, Target

TARGETS, INPUTS = COMMANDS, True
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.ETIMEDOUT)
_TOGETHER = 8


class Campaign:
  """Sweeps over the calls of one target. `following` is the sweep, and the call that fails next."""

  def __init__(self, target: Target, folder: Path) -> None:
    self._target, self._before, self._folder = target, folder / "before", folder
    imported_by(lambda: target.before(self._before))

  def portion(self, count: Count) -> None:
    """Some calls, and the next starts after them."""
    failed: dict[Path, str] = {}
    wrong = ""
    while len(failed) < _TOGETHER and not wrong:
      sweep, call = count.following or [0, 1]
      error = _ERRORS[sweep % len(_ERRORS)]
      work, calls = self._folder / f"{errno.errorcode[error]} at call {call}", self._folder / "calls"
      shutil.copytree(self._before, work)
      calls.write_text("0")  # where it never says how many there were
      ended = in_child(lambda work=work, call=call, error=error: self._struck(work, call, error))
      if ended.code in (0, 1, 2) and int(calls.read_text()) < call:
        count.following = [sweep + 1, 1]
        shutil.rmtree(work)
        break
      count.following = [sweep, call + 1]
      if "Traceback" in ended.text or ended.code not in (0, 1, 2):
        wrong = f"{work}: {ended.code} {ended.text[-3000:]}"
        shutil.rmtree(work)
      else:
        failed[work] = "went on" if ended.code == 0 else "ended with a line"
    in_child(lambda: self._recover(list(failed)), 600).expect_success("the next start")
    for work, outcome in failed.items():
      count.add(outcome)
      shutil.rmtree(work)
    if wrong:
      raise WrongError(wrong)

  def _struck(self, work: Path, call: int, error: int) -> int:
    library().campaign_arm(str(work).encode(), call, error, 1)
    code = self._target.run(work)
    (self._folder / "calls").write_text(str(library().campaign_calls()))
    return code

  def _recover(self, works: list[Path]) -> None:
    for work in works:
      print(work, flush=True)
      self._target.recover(work)
