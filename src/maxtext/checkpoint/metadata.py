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

SCHEMA = 3  # raised when an older release could no longer read what is written; see docs/checkpoints.md
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
class Base:
  """The frozen weights of a run of adapters: its checkpoints name them, with their checksums, and do not hold them.

  Attributes:
    path: the folder with the weights: a step of a run, exported parameters, or a Hugging Face folder.
    arrays: the weights as the run holds them, by their paths in the model.
    checksums: of each array, as `checksum.py` computes them; they depend on neither mesh nor files.
  """

  path: str
  arrays: Mapping[str, ArrayMetadata]
  checksums: Mapping[str, int]

  @property
  def fingerprint(self) -> str:
    """One short name for the content of all arrays."""
    return _digest(json.loads(json.dumps([asdict(self)["arrays"], dict(self.checksums)])))[:16]

  @property
  def stored_names(self) -> dict[str, str]:
    """The arrays by the names that they would have in a checkpoint, with their paths in the model."""
    return {f"buffers/{path}": path for path in self.arrays}

  @staticmethod
  def parse(body: Mapping[str, Any]) -> "Base":
    """From what `CheckpointMetadata` writes."""
    return Base(body["path"], _parse_arrays(body["arrays"]), body["checksums"])


@dataclass(frozen=True)
class Criterion:
  """By what the checkpoints of a run are compared.

  Attributes:
    metric: of evaluations.
    highest: the highest value is the best; otherwise the lowest.
  """

  metric: str = "eval_loss"
  highest: bool = False

  def score(self, value: Any) -> "Score | None":
    """A value of the metric; None where there is none, or where it is not finite."""
    return Score(self, value) if isinstance(value, int | float) and isfinite(value) else None


@dataclass(frozen=True)
class Score:
  """What an evaluation found of a checkpoint, and by what that is compared with others."""

  criterion: Criterion
  value: float

  @property
  def rank(self) -> float:
    """Lower is better."""
    return -self.value if self.criterion.highest else self.value

  @staticmethod
  def parse(body: Mapping[str, Any]) -> "Score | None":
    """From what `CheckpointMetadata` writes; older releases wrote an evaluation loss."""
    written = body.get("score")
    if isinstance(written, dict):
      try:
        return Criterion(**written["criterion"]).score(written["value"])
      except (KeyError, TypeError):  # of a later release
        return None
    return Criterion().score(body.get("eval_loss"))


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
    score: of the evaluation of this step; None where there was none, or where it is not finite.
    base: the frozen weights that are elsewhere; None where `arrays` is everything.
  """

  step: int
  arrays: Mapping[str, ArrayMetadata]
  stacked: int | None
  config: Mapping[str, Mapping[str, Any]]
  processes: int
  schema: int = SCHEMA
  score: Score | None = None
  base: Base | None = None

  @property
  def arrays_with_base(self) -> dict[str, ArrayMetadata]:
    """Every array of the state, those of the base among them."""
    base = {} if self.base is None else {name: self.base.arrays[path] for name, path in self.base.stored_names.items()}
    return {**self.arrays, **base}

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
    base = body.get("base")
    return CheckpointMetadata(
      body["step"], _parse_arrays(body["arrays"]), body["stacked"], body["config"], body["processes"], body["schema"],
      score=Score.parse(body), base=None if base is None else Base.parse(base),
    )  # fmt: skip


def checksum_file(process: int) -> str:
  """Where a process leaves its checksums, in the order of the arrays' names."""
  return f"checksums-{process}.json"


def _parse_arrays(body: Mapping[str, Mapping[str, Any]]) -> dict[str, ArrayMetadata]:
  return {name: ArrayMetadata(tuple(array["shape"]), array["dtype"]) for name, array in body.items()}


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
