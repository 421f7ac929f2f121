"""Processes that compare what they have, before they begin something that they can only do alike.

Everything goes through the coordinator's key-value store, not the devices: processes that differ may not even run the
same collectives.
"""

import hashlib
import json
import socket
from collections.abc import Mapping

import jax

from maxtext.configs import ConfigError
from maxtext.distributed.multihost import coordinator, once, problems_of_all

_NAMED = 5  # differences, and processes, that a message names


def agree(name: str, own: Mapping[str, str], seconds: float) -> None:
  """Ends the run on all processes, and says what differs and where, unless all have the same values as process 0.

  Process 0 publishes its values and their digest; the others take the digest, and the values only if it is not theirs.
  A process alone has nothing to compare.

  Args:
    name: what is compared.
    own: the values of this process, by the names that a message uses.
    seconds: how long the slowest process may take.
  """
  if jax.process_count() == 1:
    return
  client, where = coordinator(), once(f"agreement/{name}")
  values, patience = json.dumps(own, sort_keys=True), int(seconds * 1000)
  problem = ""
  if jax.process_index() == 0:
    client.key_value_set(f"{where}/values", values)
    client.key_value_set(f"{where}/digest", digest(own))
  elif client.blocking_key_value_get(f"{where}/digest", patience) != digest(own):
    first = json.loads(client.blocking_key_value_get(f"{where}/values", patience))
    problem = json.dumps([socket.gethostname(), differences(first, own)])
  if problems := problems_of_all(f"{where}/problems", problem, seconds):
    raise ConfigError(_sentence({process: json.loads(text) for process, text in problems.items()}))


def digest(values: Mapping[str, str]) -> str:
  """A short text that is the same where all values are."""
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def differences(first: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
  """What differs between process 0 and this one, with both values."""
  nothing = "nothing"
  return [
    f"{key} is {first.get(key, nothing)} on process 0 and {own.get(key, nothing)}"
    for key in sorted({*first, *own})
    if first.get(key) != own.get(key)
  ]


def _sentence(problems: Mapping[int, tuple[str, list[str]]]) -> str:
  """Processes with the same differences are named together, which in a large run may be all but one."""
  alike: dict[tuple[str, ...], list[str]] = {}
  for process, (host, found) in sorted(problems.items()):
    alike.setdefault(tuple(found), []).append(f"{process} ({host})")
  texts = [_some([f"{one} on process {_some(who, ', ')}" for one in found], "; ") for found, who in alike.items()]
  return (
    f"The processes of this run differ: {_some(texts, '; ')}. "
    f"Start all of them with the same command, files and installed versions."
  )


def _some(texts: list[str], separator: str) -> str:
  more = f"{separator}and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
  return separator.join(texts[:_NAMED]) + more
