"""Whether the other processes of a run are still there: one that is silent is named, and the run ends on all of them.

JAX ends a run whose process is silent by a signal, with a number and no host. Here each process tells the coordinator,
process 0, that it is there, and learns from it who is not, before JAX acts. That process 0 was killed, which closes its
connections, JAX finds at once.
"""

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jax._src import distributed  # JAX has no other way to its coordinator

from maxtext.logs import ON_STDERR

_LOG = logging.getLogger(__name__)

LOST_SECONDS = 60.0
"""Without a sign of life, after which a process is lost."""
JAX_LOST_SECONDS = 200
"""The same for JAX, which hears a process once in half of that time, so that it finds one after half of it or later."""
_BEAT_SECONDS = 5.0
_POLL_SECONDS = 0.5
_LISTENED_SECONDS = 3.0  # at most, from one poll to the next: what takes longer is a machine that was suspended
_NAMED = 5  # how many processes a message names
_LEAVE_SECONDS = 5.0  # at most, until the coordinator knows that this process leaves
_ALIVE, _LOST, _LEFT = "maxtext/alive", "maxtext/lost", "left"

_before_end: list[Callable[[str], None]] = []


def before_end(tell: Callable[[str], None]) -> Callable[[], None]:
  """Calls a function with the reason before this process ends because another one is lost; returns what undoes it."""
  _before_end.append(tell)
  return lambda: _before_end.remove(tell)


def watch_peers() -> None:
  """Begins to watch, in threads of its own, once JAX has joined the processes and until it parts them."""
  state = distributed.global_state
  if state.client is None or state.num_processes == 1:
    return
  watch = _Watch(state.client, state.process_id, state.coordinator_address or "")
  beats = threading.Thread(target=watch.beat, name="peer beats", daemon=True)
  beats.start()
  threading.Thread(target=watch.judge, name="peers", daemon=True).start()
  # Before JAX leaves the run and Python ends: a thread that is within JAX's client then would abort the process.
  atexit.register(watch.leave, beats)


@dataclass
class Silence:
  """How long others have said nothing new, while this process listened.

  Attributes:
    said: by process, the last that it said and for how many seconds that is so.
  """

  said: dict[str, tuple[str, float]] = field(default_factory=dict)

  def hear(self, said: dict[str, str]) -> None:
    """What all have said last; those that have left are missed no more."""
    for who, text in said.items():
      if text.startswith(_LEFT):
        self.said.pop(who, None)
      elif self.said.get(who, ("",))[0] != text:
        self.said[who] = text, 0.0

  def pass_by(self, seconds: float) -> None:
    self.said = {who: (text, silent + seconds) for who, (text, silent) in self.said.items()}

  def lost(self) -> dict[str, str]:
    """Those that have been silent for too long, and their last words."""
    return {who: text for who, (text, silent) in self.said.items() if silent > LOST_SECONDS}


class _Watch:
  """See `watch_peers`. Requests may hang as long as the network does, so one thread makes them and another judges."""

  def __init__(self, client: Any, index: int, address: str) -> None:
    self._client, self._index, self._address = client, index, address
    self._silence, self._beat, self._lock = Silence(), 0, threading.Lock()
    self._notice, self._leaving = "", threading.Event()

  @property
  def _parted(self) -> bool:
    """Whether this program leaves the run or has left it: nobody is missed then."""
    return self._leaving.is_set() or distributed.global_state.client is not self._client

  def leave(self, beats: threading.Thread) -> None:
    """Ends the threads, and tells that this process leaves, which others may do much later."""
    self._leaving.set()
    beats.join(_LEAVE_SECONDS)

  def beat(self) -> None:
    """Tells that this process is there, and asks for the others."""
    host = socket.gethostname()
    while not self._parted:
      self._beat += 1
      with suppress(Exception):  # of the coordinator's client; that nothing is heard says enough
        self._client.key_value_set(f"{_ALIVE}/{self._index}", f"{self._beat} {host}", allow_overwrite=True)
        said = self._heard()
        with self._lock:
          self._silence.hear(said)
      self._leaving.wait(_BEAT_SECONDS)
    with suppress(Exception):  # where JAX has left the run already, nobody listens
      self._client.key_value_set(f"{_ALIVE}/{self._index}", f"{_LEFT} {host}", allow_overwrite=True)

  def _heard(self) -> dict[str, str]:
    """What process 0 knows of all, and the others of it."""
    if self._index == 0:
      found = self._client.key_value_dir_get(f"{_ALIVE}/")
      return {who: text for key, text in found if (who := key.rpartition("/")[2]) != "0"}
    with suppress(Exception):  # nobody is lost
      self._notice = self._client.key_value_try_get(_LOST)
    return {"0": f"{self._beat} coordinator"}

  def judge(self) -> None:
    """Ends this process when another one is lost."""
    polled = time.monotonic()
    while not self._parted:
      time.sleep(_POLL_SECONDS)
      before, polled = polled, time.monotonic()
      with self._lock:
        self._silence.pass_by(min(polled - before, _LISTENED_SECONDS))
        lost = self._silence.lost()
      if self._notice:
        _end(self._notice)
      if lost and not self._parted:
        _end(self._tell(lost) if self._index == 0 else self._without_coordinator())

  def _tell(self, lost: dict[str, str]) -> str:
    """Tells the others who is lost, and waits until they have heard it."""
    found = [f"process {who} on {text.partition(' ')[2]}" for who, text in sorted(lost.items())]
    named = ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
    notice = f"nothing was heard from {named} for {LOST_SECONDS:g} s, and this run ends."
    with suppress(Exception):
      self._client.key_value_set(_LOST, notice, allow_overwrite=True)
    time.sleep(2 * _BEAT_SECONDS)
    return notice

  def _without_coordinator(self) -> str:
    return (
      f"process 0 at {self._address}, which coordinates this run, has not answered process {self._index} on "
      f"{socket.gethostname()} for {LOST_SECONDS:g} s, and this process ends."
    )


def _end(notice: str) -> None:
  """Ends this process, whose other threads wait for what does not come."""
  _LOG.error(f"maxtext: {notice}", extra=ON_STDERR)
  for tell in _before_end:
    with suppress(Exception):
      tell(notice)
  os._exit(1)
