"""A check that all hosts share a folder: process 0 decides for all by what it finds there."""

import socket
import time
import uuid
from contextlib import suppress

import jax
from etils import epath

from maxtext.configs.errors import RunError
from maxtext.distributed.multihost import coordinator_client, gather_problems, unique_name

_SECONDS = 10.0  # for a file to appear on another host; shared file systems cache names for a few seconds
_PATIENCE = 120.0  # for the slowest process to reach this check


def check_shared_folder(key: str, folder: epath.Path, seconds: float = _SECONDS) -> None:
  """Raises `RunError` on all processes unless each of them sees a file that process 0 writes there now.

  A run of one process returns at once.

  Args:
    key: the configuration key that names the folder.
    folder: on a disk or in a bucket; created if it is missing.
    seconds: the time limit for a host to see the file.
  """
  if jax.process_count() == 1:
    return
  client, where, host, problem = coordinator_client(), unique_name(f"shared/{key}"), socket.gethostname(), ""
  nonce = uuid.uuid4().hex
  if jax.process_index() == 0:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      _file(folder, nonce).write_text(host)
    except Exception as error:  # also the errors of a bucket's client
      problem = f"{host}, which cannot write there: {error}"
    client.key_value_set(where, nonce)
  else:
    nonce = client.blocking_key_value_get(where, int(_PATIENCE * 1000))
    problem = "" if _appears(_file(folder, nonce), seconds) else host
  problems = gather_problems(f"{where}/problems", problem, seconds + _PATIENCE)
  if jax.process_index() == 0:
    _file(folder, nonce).unlink(missing_ok=True)
  if problems:
    who = ", ".join(f"process {process} ({host})" for process, host in sorted(problems.items()))
    raise RunError(
      f"{key}: {folder} is not one folder for all hosts of this run. What process 0 writes there is not seen within "
      f"{seconds:g} s by {who}. Name a folder on storage that all hosts mount, or a bucket."
    )


def _file(folder: epath.Path, nonce: str) -> epath.Path:
  return folder / f".shared-{nonce}"


def _appears(file: epath.Path, seconds: float) -> bool:
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    with suppress(Exception):  # storage that fails does not show the file
      if file.exists():
        return True
    time.sleep(0.1)
  return False
