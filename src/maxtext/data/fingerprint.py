"""The fingerprint of the data, saved with the data-iterator state: resuming with other data is an error."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from maxtext.configs import ConfigError

SPANS = "spans"
"""The part about spans of long documents; present only if a document is split."""
_OLDER = (
  "It is from a version that did not split long documents; resume with that version, or start a new "
  "run from its parameters (load_parameters_path)."
)
_STREAMS = (
  "Streams are the rows of a global batch, which a run keeps: with other devices or hosts, set per_device_batch_size "
  "(it may be a fraction) times devices to what it was, or start a new run."
)


def to_array(about: dict[str, Any]) -> np.ndarray:
  """The fingerprint as an array that a checkpoint can save."""
  return np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)


def check_same_data(saved: np.ndarray, about: dict[str, Any]) -> None:
  """Raises `ConfigError` with the differences, if there are any."""
  then, now = json.loads(saved.tobytes()), json.loads(json.dumps(about))
  if differences := list(_differences("", then, now)):
    advice = "Resume with the same data, or start a new run."
    if SPANS in now and SPANS not in then:
      advice = _OLDER
    elif then.get("streams") != now.get("streams"):
      advice = _STREAMS
    raise ConfigError(f"The data of the checkpoint is not the data of this run: {'; '.join(differences)}. {advice}")


def _differences(name: str, then: Any, now: Any) -> Iterator[str]:
  if isinstance(then, dict) and isinstance(now, dict):
    for key in sorted({*then, *now}):
      yield from _differences(f"{name}.{key}".lstrip("."), then.get(key), now.get(key))
  elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
    for i, (a, b) in enumerate(zip(then, now, strict=True)):
      yield from _differences(f"{name}[{i}]", a, b)
  elif then != now:
    yield f"{name} was {then} and is {now}"
