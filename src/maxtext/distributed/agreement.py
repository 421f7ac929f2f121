"""Comparison of values between processes, before they start something that needs the same values everywhere.

Values go through the coordinator's key-value store and not through the devices, because processes that differ may not
run the same collectives.
"""

import hashlib
import json
import socket
from collections.abc import Mapping

import jax

from maxtext.configs import ConfigError
from maxtext.distributed.multihost import coordinator_client, gather_problems, unique_name

_NAMED = 5  # how many differences, and how many processes, a message names


def agree(name: str, own: Mapping[str, str], seconds: float) -> None:
  """Raises `ConfigError` on all processes, with what differs and where, unless all have the values of process 0.

  Process 0 publishes its values and their digest. The others read the digest, and the values only if their own digest
  differs. A run of one process returns at once.

  Args:
    name: of the comparison.
    own: the values of this process, by the names that the message uses.
    seconds: the time limit for the slowest process.
  """
  if jax.process_count() == 1:
    return
  client, where = coordinator_client(), unique_name(f"agreement/{name}")
  values, patience = json.dumps(own, sort_keys=True), int(seconds * 1000)
  problem = ""
  if jax.process_index() == 0:
    client.key_value_set(f"{where}/values", values)
    client.key_value_set(f"{where}/digest", digest(own))
  elif client.blocking_key_value_get(f"{where}/digest", patience) != digest(own):
    first = json.loads(client.blocking_key_value_get(f"{where}/values", patience))
    problem = json.dumps([socket.gethostname(), differences(first, own)])
  if problems := gather_problems(f"{where}/problems", problem, seconds):
    raise ConfigError(_describe({process: json.loads(text) for process, text in problems.items()}))


def digest(values: Mapping[str, str]) -> str:
  """A hash of the values."""
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def differences(first: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
  """What differs between process 0 and this one, with both values."""
  nothing = "nothing"
  return [
    f"{key} is {first.get(key, nothing)} on process 0 and {own.get(key, nothing)}"
    for key in sorted({*first, *own})
    if first.get(key) != own.get(key)
  ]


def _describe(problems: Mapping[int, tuple[str, list[str]]]) -> str:
  """The error message. Processes with the same differences are named together; there may be many."""
  alike: dict[tuple[str, ...], list[str]] = {}
  for process, (host, found) in sorted(problems.items()):
    alike.setdefault(tuple(found), []).append(f"{process} ({host})")
  texts = [_some_of([f"{one} on process {_some_of(who, ', ')}" for one in found], "; ") for found, who in alike.items()]
  return (
    f"The processes of this run differ: {_some_of(texts, '; ')}. "
    f"Start all of them with the same command, files and installed versions."
  )


def _some_of(texts: list[str], separator: str) -> str:
  more = f"{separator}and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
  return separator.join(texts[:_NAMED]) + more
