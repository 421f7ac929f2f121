"""What a position in the data belongs to: it means something else in other data, and is refused there."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from maxtext.configs import ConfigError

SPANS = "spans"
"""The part of a description that says how long documents are cut; it is there only where one is."""
_OLDER = (
  "It is of a version that cut no long documents over the rows of a batch, and goes on with that version; or start a "
  "new run from its parameters (load_parameters_path)."
)


def to_array(about: dict[str, Any]) -> np.ndarray:
  """A description as an array that a checkpoint can keep."""
  return np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)


def check_same_data(saved: np.ndarray, about: dict[str, Any]) -> None:
  """Raises `ConfigError` with what differs."""
  then, now = json.loads(saved.tobytes()), json.loads(json.dumps(about))
  if differences := list(_differences("", then, now)):
    older = SPANS in now and SPANS not in then
    raise ConfigError(
      f"The data of the checkpoint is not the data of this run: {'; '.join(differences)}. "
      + (_OLDER if older else "Resume with what it was, or start a new run.")
    )


def _differences(name: str, then: Any, now: Any) -> Iterator[str]:
  if isinstance(then, dict) and isinstance(now, dict):
    for key in sorted({*then, *now}):
      yield from _differences(f"{name}.{key}".lstrip("."), then.get(key), now.get(key))
  elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
    for i, (a, b) in enumerate(zip(then, now, strict=True)):
      yield from _differences(f"{name}[{i}]", a, b)
  elif then != now:
    yield f"{name} was {then} and is {now}"
