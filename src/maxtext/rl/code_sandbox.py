"""Runs one program of a model in a process with limits. It is a script for `code_answers.py`, without other modules.

Where Linux permits namespaces: no network, no other processes in sight, files read only but for a folder in memory that
is thrown away. Where it does not, and the run is root's: a user of its own, who owns nothing. Otherwise no program is
run, since one that sends a signal to all processes of its user, or starts ever more of them, would end the run. With
limits of time, memory, processes and sizes of files. This is against accidents of one's own models, and no jail for
attackers.

Three processes: the guard, which has the time limit and ends the others; the first one of the namespace, with which all
others of it end; and the one that runs the program.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

ISOLATED, OTHER_USER, NOT_RUN = b"I", b"U", b"N"
"""What the guard says first: the program has namespaces of its own, or a user of its own, or is not run."""

_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000  # user, mount, net, pid, ipc
_READ_ONLY, _NO_SUID, _PRIVATE = 1, 2, 1 << 18
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000
_DIE_WITH_PARENT, _ADOPT_ORPHANS, _NO_NEW_PRIVILEGES, _CAPABILITIES = 1, 36, 38, 0x20080522
_NOBODY, _INNER_ID, _FIRST_USER = 65534, 1000, 1 << 30
_PROCESSES = 8  # threads count too, and with namespaces ours
_FILE_BYTES = 64 << 20

_LIBC: Any = ctypes.CDLL(None, use_errno=True)


def main(status: int) -> NoReturn:
  """Reads code, tests, seconds, bytes of memory and a word from the standard input, as JSON. Writes to `status` how it
  is isolated, and the word if the tests pass."""
  given, folder = json.load(sys.stdin), os.getcwd()
  isolation = _isolate(folder)
  os.write(status, isolation)
  if isolation == NOT_RUN:
    os._exit(1)
  _LIBC.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
  children = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)  # as long as it is there to be seen
  signal.signal(signal.SIGALRM, lambda *_: _end(children))
  signal.setitimer(signal.ITIMER_REAL, given["seconds"])
  first = os.fork()
  if not first:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    program = os.fork()
    if not program:
      _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
      _run(given, status, isolation)
    os.waitpid(program, 0)
    os._exit(0)
  os.waitpid(first, 0)
  _end(children)


def _end(children: int) -> NoReturn:
  """Ends the guard, and before it all that descends from it: orphans become its children, which are in this file."""
  while found := os.pread(children, 1 << 16, 0).split():
    for child in map(int, found):
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
  os._exit(0)


def _isolate(folder: str) -> bytes:
  """Gives the processes from here on namespaces of their own, if that is permitted."""
  is_root = not os.geteuid()
  try:
    if is_root:  # whose processes are not limited
      os.setresuid(_NOBODY, 0, 0)
    user, group = os.geteuid(), os.getegid()
    _call(_LIBC.unshare, _NAMESPACES)
  except (AttributeError, OSError):  # not Linux, or not permitted
    return OTHER_USER if is_root and _own_folder(folder) else NOT_RUN
  try:
    maps = {"setgroups": "deny", "uid_map": f"{_INNER_ID} {user} 1", "gid_map": f"{_INNER_ID} {group} 1"}
    for name, text in maps.items():
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SUID, 0, _PRIVATE, 0)
    _call(_LIBC.syscall, _MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, attributes, ctypes.sizeof(attributes))
    _call(_LIBC.mount, b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"mode=0700,size=%d" % _FILE_BYTES)
    os.chdir(folder)
  except OSError:  # an old kernel
    return NOT_RUN
  return ISOLATED


def _own_folder(folder: str) -> bool:
  """Gives the folder to a user that no other process has; False if this process may not."""
  try:
    os.setresuid(0, 0, 0)
    os.chown(folder, _user(), _user())
  except OSError:
    return False
  return True


def _user() -> int:
  return _FIRST_USER + os.getpgrp()  # the guard's number, while it runs


def _run(given: dict[str, Any], status: int, isolation: bytes) -> NoReturn:
  """Runs the code and then the tests, with the same names. Whoever ends the process earlier has not passed."""
  try:
    if isolation == ISOLATED:  # processes of others are out of sight
      with contextlib.suppress(OSError):
        _call(_LIBC.mount, b"proc", b"/proc", b"proc", 0, None)
    else:
      user = _user()
      os.setgroups([])
      os.setresgid(user, user, user)
      os.setresuid(user, user, user)
      _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)  # which a change of users has undone
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    _limit(given["seconds"], given["bytes"])
    _call(_LIBC.prctl, _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(_LIBC.capset, (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
      os.dup2(nothing, stream)
    names = {"__name__": "answer"}
    for part in ("code", "tests"):
      exec(compile(given[part], part, "exec"), names)
    os.write(status, given["word"].encode())
  finally:
    os._exit(0)


def _limit(seconds: float, memory: int) -> None:
  for name, value in (
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_CPU, int(seconds) + 1),
    (resource.RLIMIT_FSIZE, _FILE_BYTES),
    (resource.RLIMIT_NPROC, _PROCESSES),
    (resource.RLIMIT_NOFILE, 256),
    (resource.RLIMIT_CORE, 0),
  ):
    most = resource.getrlimit(name)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(name, (value, value))


def _call(function: Any, *arguments: Any) -> None:
  if function(*arguments) < 0:
    raise OSError(ctypes.get_errno(), "not permitted")


if __name__ == "__main__":
  main(int(sys.argv[1]))
