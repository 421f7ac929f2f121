"""Programs that all processes of a run compile before any of them runs one.

The collectives of CPUs (Gloo) wait only 30 seconds for the other processes to connect when a program runs for the first
time, and on a busy machine compile times differ by more than that.
"""

from typing import Any

import jax

from maxtext.distributed.multihost import coordinator_client, unique_name

_TIMEOUT_SECONDS = 3600  # for the slowest process to compile; a process that has ended is found by its heartbeat


class SynchronizedCompile:
  """A jitted function whose processes wait for each other after they have compiled it.

  Args:
    function: a `jax.jit`.
    batch: the index of its argument that may come in several shapes; all else keeps its shape.
  """

  def __init__(self, function: Any, batch: int) -> None:
    self._function, self._batch = function, batch
    self._compiled: dict[tuple[Any, ...], Any] = {}

  def __call__(self, *args: Any) -> Any:
    if jax.process_count() == 1:
      return self._function(*args)
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(args[self._batch]))
    if shapes not in self._compiled:
      self._compiled[shapes] = self._function.lower(*args).compile()
      coordinator_client().wait_at_barrier(unique_name("compiled"), timeout_in_ms=_TIMEOUT_SECONDS * 1000)
    return self._compiled[shapes](*args)
