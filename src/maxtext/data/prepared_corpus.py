"""Prepared corpora: folders of tokenised ArrayRecord shards with a manifest, as `maxtext data prepare` writes them.

`manifest.json` is {"schema": 1, "dtype": "uint16" or "uint32", "documents": N, "tokens": T, "tokenizer": {...},
"skipped": s, "shards": [{"file": ..., "documents": n, "tokens": t, "long": [...], "bytes": b, "sha256": ...}, ...],
"held_out": {"share": 0.01, "documents": N, "tokens": T, "shards": [...]}}. A record is the tokens of a document,
little-endian, with its beginning and its end in it. `long` has record and tokens, one after the other, of the documents
with more than a 128th of the shard's tokens, of which there are fewer than 128. `skipped` is how many records of the
text could not be read. Held-out documents are in shards of their own, and other counts are without them. Older
folders lack `long`, `skipped` and `held_out`.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.documents import TokenCounts
from maxtext.data.order import FEW_SHARDS
from maxtext.data.records import Reader, Records, Shard

SCHEMA = 1
MANIFEST = "manifest.json"
HELD_OUT = "held_out"
INDEX_BYTES = 46  # of memory, per record of an open ArrayRecord shard


class PreparedCorpus:
  """The documents of a prepared corpus that are for training, or its held-out documents."""

  window = FEW_SHARDS

  def __init__(self, folder: str | Path, threads: int = 1, held_out: bool = False) -> None:
    """Reads the manifest only; a shard is looked at when something is read from it."""
    self._manifest = read_manifest(folder)
    self._part = self._manifest[HELD_OUT] if held_out else self._manifest
    shards = [
      Shard(str(Path(folder, shard["file"])), shard["documents"], shard["documents"] * INDEX_BYTES)
      for shard in self._part["shards"]
    ]
    self._bytes = {shard.path: entry["bytes"] for shard, entry in zip(shards, self._part["shards"], strict=True)}
    self._dtype = np.dtype(self._manifest["dtype"]).newbyteorder("<")
    self._records = Records(shards, self._open, threads)
    self.sizes = [shard.records for shard in shards]

  @property
  def vocab_size(self) -> int:
    """One more than the largest token that its tokenizer makes; 0 where the manifest does not say."""
    return self._manifest["tokenizer"].get("vocab_size", 0)

  @property
  def identity(self) -> dict[str, Any]:
    """What the shards hold, whatever the folder is called."""
    hashes = "".join(shard["sha256"] for shard in self._part["shards"])
    return {"documents": self._part["documents"], "sha256": hashlib.sha256(hashes.encode()).hexdigest()}

  @property
  def counts(self) -> TokenCounts:
    """As the manifest has them."""
    shards, total = self._part["shards"], self._part["tokens"]
    if any("long" not in shard for shard in shards):
      return TokenCounts(total, None)
    firsts = itertools.accumulate((shard["documents"] for shard in shards), initial=0)
    listed = [
      (first + place, tokens)
      for first, shard in zip(firsts, shards, strict=False)
      for place, tokens in zip(shard["long"][::2], shard["long"][1::2], strict=True)
    ]
    return TokenCounts(total, [long_document_threshold(shard["tokens"]) for shard in shards], listed)

  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """The records of these documents."""
    return self._records.read(numbers)

  def tokens(self, record: bytes) -> np.ndarray:
    """The tokens of a record."""
    if len(record) % self._dtype.itemsize:
      raise RunError(f"{len(record)} bytes are no whole number of {self._dtype.name}: prepare the corpus again.")
    return np.frombuffer(record, self._dtype)

  def where(self, number: int) -> str:
    """A shard and a record of it."""
    return self._records.where(number)

  def _open(self, shard: Shard) -> Reader:
    try:
      size = os.path.getsize(shard.path)
    except OSError as error:
      raise RunError(f"{shard.path}, which the manifest beside it names, cannot be read: {error.strerror}.") from None
    if size != self._bytes[shard.path]:
      raise RunError(
        f"{shard.path} has {size} bytes and the manifest beside it says {self._bytes[shard.path]}: "
        f"remove the corpus and run `maxtext data prepare` again."
      )
    return open_array_record(shard)


def held_out_documents(manifest: dict[str, Any]) -> int:
  """How many documents a corpus holds out; older ones none."""
  return manifest.get(HELD_OUT, {}).get("documents", 0)


def long_document_threshold(tokens: int) -> int:
  """A manifest lists the documents of a shard of so many tokens that have more than this."""
  return tokens // 128


def read_manifest(folder: str | Path) -> dict[str, Any]:
  """The manifest of a prepared corpus."""
  path = Path(folder, MANIFEST)
  try:
    manifest = json.loads(path.read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise ConfigError(f"{path} is not the manifest of a prepared corpus: {error}.") from None
  schema = manifest.get("schema") if isinstance(manifest, dict) else None
  if schema != SCHEMA:
    raise ConfigError(f"{path} has schema {schema}, and this version reads {SCHEMA}: prepare it again.")
  return manifest


def open_array_record(shard: Shard) -> Reader:
  """A reader without read-ahead: places are spread over the file."""
  from array_record.python import array_record_module

  try:
    reader = array_record_module.ArrayRecordReader(
      shard.path, options="readahead_buffer_size:0", file_reader_buffer_size=32768
    )
    records = reader.num_records()
  except Exception as error:
    raise RunError(f"{shard.path} is not an ArrayRecord file: {error}") from None
  if records != shard.records:
    raise RunError(f"{shard.path} has {records} records and was expected to have {shard.records}.")
  return reader
