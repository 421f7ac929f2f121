"""What happens when a device is found to be wrong: it is named, no later checkpoint is trusted, and the run ends."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax

from maxtext.configs.errors import RunError
from maxtext.distributed.heartbeat import report_suspect
from maxtext.distributed.hosts import host_index
from maxtext.distributed.multihost import gather_problems, unique_name

Distrust = Callable[[int, str, int], None]
"""Notes at which step something was found, what, and the last step that was proven right."""

_PATIENCE = 60.0  # seconds for the slowest process to find the same
_HEARD_SECONDS = 1.0  # in which an agent has noted that its host is suspected
_NAMED = 8


def end_run(
  step: int,
  devices: Sequence[jax.Device],
  what: str,
  proven: int,
  distrust: Distrust,
  is_certain: bool,
) -> NoReturn:
  """Ends the run on every process; all of them call it with the same values.

  Args:
    step: at which it was found.
    devices: those that may be wrong.
    what: the rest of the sentence that they begin.
    proven: the last step at which it was not so.
    distrust: leaves a note for the next start.
    is_certain: whether nothing but these devices can be wrong. Then an elastic run leaves their hosts out.
  """
  own = f"host {host_index(jax.process_index())} ({socket.gethostname()})"
  hosts = gather_problems(unique_name("corruption/hosts"), own, _PATIENCE)
  what = f"{_listed([f'device {d.id} of {hosts[d.process_index]}' for d in devices])} {what}"
  suspects = {device.process_index for device in devices}
  leaves_out = is_certain and len(suspects) < jax.process_count()
  distrust(step, what, proven)
  if leaves_out and jax.process_index() in suspects:
    report_suspect()
  gather_problems(unique_name("corruption/noted"), "", _PATIENCE)
  if leaves_out:
    time.sleep(_HEARD_SECONDS)
  raise RunError(
    f"{what} at step {step}. The last step that was proven right is {proven}, and the next start takes no later "
    f"checkpoint."
  )


def _listed(names: Sequence[str]) -> str:
  more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
  *others, last = [*names[:_NAMED], *more]
  return f"{', '.join(others)} and {last}" if others else last
