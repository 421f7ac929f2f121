"""The metadata of a checkpoint: a JSON file beside the arrays. Reading it needs neither JAX nor Orbax."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from typing import Any

from etils import epath

from maxtext.checkpoint.storage import retried
from maxtext.configs.secrets import redact_entries
from maxtext.layers.parameter_paths import below

SCHEMA = 2  # raised when an older release could no longer read what is written; see docs/checkpoints.md
MOVED = {"ahead/": 2}  # beginnings of parameter paths that have another name since that schema
ITEM, FILE = "record", "record.json"
NOT_FINITE = "is not finite"
PARAMETERS = ("params/", "buffers/")  # before the paths of a model's own arrays


class CorruptCheckpointError(Exception):
  """A checkpoint that is not what was saved; the text says what is wrong with it."""


class NotFiniteError(ValueError):
  """A state with NaN or infinities in it, from which no run can resume; the text says where."""

  @staticmethod
  def of(names: Sequence[str]) -> "NotFiniteError":
    """By the names of the arrays that hold them."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return NotFiniteError(f"{names[0]}{more} {NOT_FINITE}")


@dataclass(frozen=True)
class ArrayMetadata:
  """One array of a checkpoint."""

  shape: tuple[int, ...]
  dtype: str

  @property
  def bytes(self) -> int:
    """Its size in memory; a type's name ends with its bits, but for bool and the 8-bit floats."""
    bits = re.search(r"(?:int|bfloat|float)(\d+)", self.dtype)
    return prod(self.shape) * max(int(bits[1]) if bits else 8, 8) // 8


@dataclass(frozen=True)
class CheckpointMetadata:
  """The description of a checkpoint.

  Attributes:
    step: finished updates.
    arrays: every array under its name, as 'params/token_embedder/embedding'.
    stacked: dimension of stacked weights that runs over layers; None where each layer is apart.
    config: every key with its value and origin.
    processes: how many wrote it; each has left the checksums of its parts beside this file.
    schema: the version of this description and of the names.
    eval_loss: the loss of the evaluation of this step; None where there was none, or where it is not finite.
  """

  step: int
  arrays: Mapping[str, ArrayMetadata]
  stacked: int | None
  config: Mapping[str, Mapping[str, Any]]
  processes: int
  schema: int = SCHEMA
  eval_loss: float | None = None

  @property
  def parameters(self) -> dict[str, str]:
    """The arrays that belong to the model, by their paths in it, with their names here."""
    return {below(name): name for name in self.arrays if name.startswith(PARAMETERS)}

  @property
  def moved(self) -> str | None:
    """The first path of the model that has another name in this release."""
    old = tuple(path for path, schema in MOVED.items() if self.schema < schema)
    return next((path for path in self.parameters if path.startswith(old)), None) if old else None

  def to_json(self) -> dict[str, Any]:
    """Everything, with a digest that tells a damaged file."""
    body = json.loads(json.dumps(asdict(self) | {"config": redact_entries(self.config)}, default=str))
    return {"digest": _digest(body), "body": body}

  @staticmethod
  def read(folder: epath.Path) -> "CheckpointMetadata":
    """Reads the metadata of a step's folder; raises `CorruptCheckpointError`."""
    file = folder / ITEM / FILE
    try:
      content = json.loads(retried(file, file.read_text))
      body = content["body"]
      whole = content["digest"] == _digest(body)
    except (FileNotFoundError, NotADirectoryError):
      raise CorruptCheckpointError(f"{ITEM}/{FILE} is missing") from None
    except (IsADirectoryError, ValueError, KeyError, TypeError):
      raise CorruptCheckpointError(f"{ITEM}/{FILE} cannot be read") from None
    if not whole:
      raise CorruptCheckpointError(f"{ITEM}/{FILE} is not what was written")
    arrays = {name: ArrayMetadata(tuple(a["shape"]), a["dtype"]) for name, a in body["arrays"].items()}
    loss = body.get("eval_loss")
    return CheckpointMetadata(
      body["step"], arrays, body["stacked"], body["config"], body["processes"], body["schema"],
      eval_loss=loss if isinstance(loss, int | float) and isfinite(loss) else None,
    )  # fmt: skip


def checksum_file(process: int) -> str:
  """Where a process leaves its checksums, in the order of the arrays' names."""
  return f"checksums-{process}.json"


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
