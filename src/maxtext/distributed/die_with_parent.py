"""Replaces itself by another command that is killed when its parent ends for whatever reason. Imports no other module.

python die_with_parent.py PARENT PIPE COMMAND...     PIPE: its other end is held by the parent alone; - on Linux

Linux sends a signal when a parent dies, and `exec` keeps that setting. Elsewhere a forked child waits for the end of a
pipe that the parent holds open.
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, pipe: str, command: list[str]) -> None:
  """Does not return."""
  if pipe == "-":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
      os._exit(1)
  else:
    _watch(int(pipe))
  try:
    os.execvp(command[0], command)
  except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _watch(pipe: int) -> None:
  worker = os.getpid()
  if os.fork():
    os.close(pipe)
    return
  os.setsid()  # signals of the terminal are for the command only
  os.closerange(0, pipe)
  while os.getppid() == worker:
    if select.select([pipe], [], [], 1.0)[0]:
      os.kill(worker, signal.SIGKILL)
      break
  os._exit(0)


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
