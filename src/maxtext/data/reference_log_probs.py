"""Log-probabilities of a reference model on disk: two numbers for each preference pair, by its number in its source.

So they do not depend on the mesh, the batch size or the order of the data, and a run needs no copy of the reference
model in memory. A split has two files: `train-<digest>.bin`, the numbers of all sources one after the other, each pair
with a checksum of its tokens, and `train.json`, written last, which names the first and says what it was computed from.
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from maxtext.configs import ConfigError
from maxtext.data.documents import DataSource, Documents, TokenCounts
from maxtext.data.order import ShuffleWindow
from maxtext.data.splits import SplitName
from maxtext.storage.atomic import UNFINISHED, write_atomically

REFERENCE = "reference"
"""The extra value of targets (`Batch.extra`): the log-probability of a whole answer, at its last token, 0 elsewhere."""
PAIR_RECORD = np.dtype([("log_probs", np.float32, (2,)), ("checksum", np.uint32)])
"""Of a pair: log-probabilities of the chosen and the rejected answer, and the checksum of the tokens they are of. NaN
where a pair is left out because it is too long."""


def pair_checksum(pair: np.ndarray) -> int:
  """Of the tokens of a pair, and of which side each is on."""
  return zlib.crc32(pair["side"].tobytes(), zlib.crc32(pair["token"].tobytes()))


@dataclass(frozen=True)
class ReferenceLogProbs:
  """Of one split.

  Attributes:
    path: the file of the numbers.
    model: digest of the reference model's parameters.
    records: for each source `PAIR_RECORD` [documents].
  """

  path: str
  model: str
  records: tuple[np.ndarray, ...]

  @staticmethod
  def read(folder: str, split: SplitName, sources: Sequence[DataSource]) -> "ReferenceLogProbs | None":
    """Of these sources; None where the folder has none.

    Raises:
      ConfigError: the files are damaged, or were computed for other data.
    """
    about = _about(folder, split)
    if not about.exists():
      return None
    try:
      described = json.loads(about.read_text())
      file, model, identities = str(described["file"]), str(described["model"]), described["sources"]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise ConfigError(f"{about} cannot be read ({error!r}): delete it to compute it again.") from None
    if identities != _identities(sources):
      raise ConfigError(
        f"{about} is of other data, another tokenizer, chat template or max_target_length: set "
        f"reference_log_probs_path to another folder, or delete this file."
      )
    return ReferenceLogProbs.read_file(str(about.parent / file), model, sources)

  @staticmethod
  def read_file(path: str, model: str, sources: Sequence[DataSource]) -> "ReferenceLogProbs":
    """The numbers of a file, whose name is that of its content.

    Raises:
      ConfigError: it is missing or damaged.
    """
    try:
      content = epath.Path(path).read_bytes()
    except OSError as error:
      raise ConfigError(f"{path} cannot be read ({error!r}): delete its .json file to compute it again.") from None
    sizes = [sum(source.documents.sizes) for source in sources]
    if _digest(content) not in path or len(content) != sum(sizes) * PAIR_RECORD.itemsize:
      raise ConfigError(f"{path} is damaged: delete it, and its .json file, to compute it again.")
    parts = np.split(np.frombuffer(content, PAIR_RECORD), np.cumsum(sizes)[:-1])
    return ReferenceLogProbs(path, model, tuple(parts))

  @staticmethod
  def write(folder: str, split: SplitName, sources: Sequence[DataSource], model: str, parts: Sequence[Any]) -> None:
    """Writes what was computed; the file that makes it valid comes last. Others may do so at the same time."""
    about, content = _about(folder, split), np.concatenate(parts).tobytes()
    numbers = about.with_name(f"{split}-{_digest(content)}.bin")
    described = {"file": numbers.name, "model": model, "sources": _identities(sources)}
    about.parent.mkdir(parents=True, exist_ok=True)
    for path, data in ((numbers, content), (about, json.dumps(described, indent=2).encode())):
      write_atomically(path, data, unfinished=Path(f"{path}.{uuid.uuid4().hex}{UNFINISHED}"))

  def attach(self, sources: Sequence[DataSource]) -> list[DataSource]:
    """The sources, whose pairs bring their numbers."""
    return [
      replace(source, documents=_WithReference(source.documents, found, self.model))
      for source, found in zip(sources, self.records, strict=True)
    ]


@dataclass(frozen=True)
class _WithReference:
  """Preference pairs with the log-probabilities of a reference model."""

  documents: Documents
  records: np.ndarray
  model: str

  @property
  def sizes(self) -> Sequence[int]:
    return self.documents.sizes

  @property
  def window(self) -> ShuffleWindow:
    return self.documents.window

  @property
  def identity(self) -> dict[str, Any]:
    return {**self.documents.identity, "reference_model": self.model}

  @property
  def counts(self) -> TokenCounts:
    return self.documents.counts

  def read(self, numbers: Sequence[int]) -> list[tuple[int, Any]]:
    return list(zip(numbers, self.documents.read(numbers), strict=True))

  def tokens(self, record: tuple[int, Any]) -> np.ndarray:
    number, own = record
    pair, reference = self.documents.tokens(own), self.records[number]
    document = np.zeros(len(pair), [*pair.dtype.descr, (REFERENCE, np.float32)])
    if not len(pair):
      return document
    if pair_checksum(pair) != reference["checksum"]:
      raise ConfigError(
        "the pair has changed since the reference log-probabilities were computed: set reference_log_probs_path to "
        "another folder, or delete the old one."
      )
    for name in pair.dtype.names or ():
      document[name] = pair[name]
    for side, value in enumerate(reference["log_probs"]):
      document[REFERENCE][np.flatnonzero(pair["side"] == side)[-1]] = value
    return document

  def where(self, number: int) -> str:
    return self.documents.where(number)


def _about(folder: str, split: SplitName) -> epath.Path:
  return epath.Path(folder) / f"{split}.json"


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:32]


def _identities(sources: Sequence[DataSource]) -> list[Any]:
  return json.loads(json.dumps([source.documents.identity for source in sources]))
