"""Log-probabilities of a reference model on disk: two numbers for each preference pair, by its number in its source.

So they do not depend on the mesh, the batch size or the order of the data, and a run needs no copy of the reference
model in memory. A split has two files: `train.f32`, the numbers of all sources one after the other, and `train.json`,
written last, which says what they were computed from and has their checksum.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from etils import epath

from maxtext.configs import ConfigError
from maxtext.data.documents import PAIRED, DataSource, Documents, TokenCounts
from maxtext.data.order import ShuffleWindow
from maxtext.data.splits import SplitName
from maxtext.storage.atomic import write_atomically

REFERENCE = "reference"
"""The extra value of targets (`Batch.extra`): the log-probability of a whole answer, at its last token, 0 elsewhere."""
_REFERENCED = np.dtype([*PAIRED.descr, (REFERENCE, np.float32)])


@dataclass(frozen=True)
class ReferenceLogProbs:
  """Of one split.

  Attributes:
    model: digest of the reference model's parameters.
    digest: of all numbers.
    log_probs: for each source float32 [documents, 2], of the chosen and the rejected answer; NaN where a pair is left
      out because it is too long.
  """

  model: str
  digest: str
  log_probs: tuple[np.ndarray, ...]

  @staticmethod
  def read(folder: str, split: SplitName, sources: Sequence[DataSource]) -> "ReferenceLogProbs | None":
    """Of these sources; None where the folder has none.

    Raises:
      ConfigError: the files are damaged, or were computed for other data.
    """
    about, numbers = _files(folder, split)
    if not about.exists():
      return None
    try:
      described = json.loads(about.read_text())
      content = numbers.read_bytes()
      same = hashlib.sha256(content).hexdigest() == described["sha256"]
      model, identities = str(described["model"]), described["sources"]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise ConfigError(f"{about} cannot be read ({error!r}): delete {folder} to compute it again.") from None
    if not same:
      raise ConfigError(f"{numbers} is damaged: it does not have its checksum. Delete {folder} to compute it again.")
    if identities != _identities(sources):
      raise ConfigError(
        f"{folder} has the reference log-probabilities of other data, another tokenizer, chat template or "
        f"max_target_length: set reference_log_probs_path to another folder, or delete this one."
      )
    sizes = [sum(source.documents.sizes) for source in sources]
    whole = np.frombuffer(content, np.float32).reshape(-1, 2)
    assert len(whole) == sum(sizes)
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    return ReferenceLogProbs(model, described["sha256"], tuple(parts))

  @staticmethod
  def write(folder: str, split: SplitName, sources: Sequence[DataSource], model: str, parts: Sequence[Any]) -> None:
    """Writes what was computed; the file that makes it valid comes last."""
    about, numbers = _files(folder, split)
    content = np.concatenate(parts).astype(np.float32).tobytes()
    described = {"model": model, "sources": _identities(sources), "sha256": hashlib.sha256(content).hexdigest()}
    numbers.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(numbers, content)
    write_atomically(about, json.dumps(described, indent=2).encode())

  def attach(self, sources: Sequence[DataSource]) -> list[DataSource]:
    """The sources, whose pairs bring their numbers."""
    return [
      replace(source, documents=_WithReference(source.documents, found, self.digest))
      for source, found in zip(sources, self.log_probs, strict=True)
    ]


@dataclass(frozen=True)
class _WithReference:
  """Preference pairs with the log-probabilities of a reference model."""

  documents: Documents
  log_probs: np.ndarray
  digest: str

  @property
  def sizes(self) -> Sequence[int]:
    return self.documents.sizes

  @property
  def window(self) -> ShuffleWindow:
    return self.documents.window

  @property
  def identity(self) -> dict[str, Any]:
    return {**self.documents.identity, "reference_log_probs": self.digest}

  @property
  def counts(self) -> TokenCounts:
    return self.documents.counts

  def read(self, numbers: Sequence[int]) -> list[tuple[int, Any]]:
    return list(zip(numbers, self.documents.read(numbers), strict=True))

  def tokens(self, record: tuple[int, Any]) -> np.ndarray:
    number, own = record
    pair = self.documents.tokens(own)
    document = np.zeros(len(pair), _REFERENCED)
    for name in PAIRED.names or ():
      document[name] = pair[name]
    for side, value in enumerate(self.log_probs[number]):
      if len(here := np.flatnonzero(pair["side"] == side)):
        assert np.isfinite(value), "a pair that is trained on has no reference"
        document[REFERENCE][here[-1]] = value
    return document

  def where(self, number: int) -> str:
    return self.documents.where(number)


def _files(folder: str, split: SplitName) -> tuple[epath.Path, epath.Path]:
  return epath.Path(folder) / f"{split}.json", epath.Path(folder) / f"{split}.f32"


def _identities(sources: Sequence[DataSource]) -> list[Any]:
  return json.loads(json.dumps([source.documents.identity for source in sources]))
