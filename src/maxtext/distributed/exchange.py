"""What the processes of a run tell each other in turns, through the coordinator and not through the devices.

Devices run collectives in the order in which they were started, which a thread beside the training loop would disturb.
Turns may be taken in such a thread. They are for what is small: all of it passes through process 0.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.distributed.multihost import coordinator_client, unique_name

_PATIENCE = 24 * 3600.0  # seconds for the slowest process; one that has ended is found by its heartbeat
_SLICE = 5.0  # seconds of one wait: Python handles signals in between
_VALUE, _FAILURE, _MISTAKE = b"v", b"f", b"m"


class Exchange:
  """Turns in which every process tells all others something. What fails on one process fails on all.

  All processes make it at the same place of their main thread, and take the same turns, in one thread at a time. A run
  of one process only talks to itself.

  Args:
    name: of what is told.
  """

  def __init__(self, name: str) -> None:
    self._several = jax.process_count() > 1
    self._name, self._turn = unique_name(name) if self._several else "", 0

  def __call__(self, make: Callable[[], bytes]) -> list[bytes]:
    """What every process has made, in the order of the processes.

    Raises:
      ConfigError: it was raised on a process.
      RunError: a process raised something else, or has ended its turns.
    """
    if not self._several:
      return [make()]
    own: Exception | None = None
    try:
      told = _VALUE + make()
    except Exception as error:
      own, told = error, _failure(error)
    self._tell(told)
    found = [self._heard(process) for process in range(jax.process_count())]
    if self._turn:  # all have told this turn, so all have read the one before
      coordinator_client().key_value_delete(self._key(self._turn - 1, jax.process_index()))
    self._turn += 1
    if own is not None:
      raise own
    _raise_failures(found)
    return [value[1:] for value in found]

  def end(self, why: str) -> None:
    """This process takes no further turn. Processes that wait for one raise a `RunError` with the reason."""
    if self._several:
      self._several = False
      with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone, and the others with it
        self._tell(_FAILURE + f"it has ended: {why}".encode())

  def _tell(self, value: bytes) -> None:
    coordinator_client().key_value_set_bytes(self._key(self._turn, jax.process_index()), value, allow_overwrite=True)

  def _heard(self, process: int) -> bytes:
    deadline, key = time.monotonic() + _PATIENCE, self._key(self._turn, process)
    while True:
      try:
        return coordinator_client().blocking_key_value_get_bytes(key, int(_SLICE * 1000))
      except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
          raise RunError(f"process {process} is not heard of: {str(error).splitlines()[0]}") from error

  def _key(self, turn: int, process: int) -> str:
    return f"{self._name}/{turn}/{process}"


def _failure(error: Exception) -> bytes:
  known = isinstance(error, ConfigError | RunError)
  text = str(error) if known else f"{type(error).__name__}: {error}".splitlines()[0]
  return (_MISTAKE if isinstance(error, ConfigError) else _FAILURE) + text.encode()


def _raise_failures(told: Sequence[bytes]) -> None:
  failed = {process: value for process, value in enumerate(told) if value[:1] != _VALUE}
  if failed:
    is_mistake = any(value[:1] == _MISTAKE for value in failed.values())
    texts = [f"process {process}: {value[1:].decode()}" for process, value in failed.items()]
    raise (ConfigError if is_mistake else RunError)("; ".join(texts))
