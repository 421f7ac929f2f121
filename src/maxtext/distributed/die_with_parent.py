"""Becomes another command that ends when its parent does, however that ended. It imports nothing but what is here.

python die_with_parent.py PARENT PIPE COMMAND...     PIPE, whose other end only the parent has, or - on Linux

Linux sends a signal when a parent dies, and a command keeps that over `exec`. Elsewhere a child that stays behind waits
for the end of a pipe that the parent holds open.
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
    if os.getppid() != parent:  # it died before this
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
  os.setsid()  # what a terminal sends to the command is not for this
  os.closerange(0, pipe)
  while os.getppid() == worker:
    if select.select([pipe], [], [], 1.0)[0]:
      os.kill(worker, signal.SIGKILL)
      break
  os._exit(0)


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
