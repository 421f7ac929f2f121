"""SIGKILL at every call by which a target changes files: before the call, and in the middle of a write."""

import hashlib
import shutil
from pathlib import Path

from benchmarks.campaign.child import KILL_BEFORE, KILL_WITHIN, imported_by, in_child, library
from benchmarks.campaign.results import Count
from benchmarks.campaign.targets import WRITERS, Target

TARGETS, INPUTS = WRITERS, True
_ACTIONS = (KILL_BEFORE, KILL_WITHIN)
_TOGETHER = 16  # whose next starts are in one process: what it compiles serves all of them


class Campaign:
  """Sweeps over the calls of one target: each point begins with the same files and is struck one call later."""

  def __init__(self, target: Target, folder: Path) -> None:
    self._target, self._before, self._folder = target, folder / "before", folder
    imported_by(lambda: target.before(self._before))
    self._good = set[str]()  # contents of the folder that were found to be right

  def portion(self, count: Count) -> None:
    """Some points. `following` is the sweep, and the call that is struck next."""
    struck: dict[Path, str] = {}
    for _ in range(_TOGETHER):
      sweep, call = count.following or [0, 1]
      work = self._folder / f"sweep {sweep} call {call}"
      shutil.copytree(self._before, work)
      ended = in_child(lambda work=work, call=call, sweep=sweep: self._struck(work, call, _ACTIONS[sweep % 2]))
      if ended.killed:
        struck[work], count.following = digest(work), [sweep, call + 1]
        continue
      ended.expect_success(f"what was not struck at call {call}")
      count.following = [sweep + 1, 1]
      shutil.rmtree(work)
      break
    fresh = {state: work for work, state in struck.items() if state not in self._good}
    in_child(lambda: self._recover(list(fresh.values())), 600).expect_success("the next start")
    self._good |= fresh.keys()
    for work in struck:
      count.add("right")
      shutil.rmtree(work)

  def _struck(self, work: Path, call: int, action: int) -> int:
    library().campaign_arm(str(work).encode(), call, action, 0)
    return self._target.run(work)

  def _recover(self, works: list[Path]) -> None:
    for work in works:
      print(work, flush=True)
      self._target.recover(work)


def digest(folder: Path) -> str:
  """Of all names and contents below a folder."""
  found = hashlib.sha256()
  for path in sorted(folder.rglob("*")):
    found.update(f"{path.relative_to(folder)}\0{path.is_dir()}\0".encode())
    if path.is_file():
      found.update(path.read_bytes())
  return found.hexdigest()
