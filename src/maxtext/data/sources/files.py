"""Documents in files of records: ArrayRecord and TFRecord of `tf.train.Example`, JSON lines, and Parquet.

All of them have random access: TFRecord and JSON lines by an index of offsets, Parquet by row group.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxtext.configs import ConfigError
from maxtext.data.order import FEW_SHARDS
from maxtext.data.prepared_corpus import INDEX_BYTES, open_array_record
from maxtext.data.records import Reader, Records, Shard
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.encoding import Encoding
from maxtext.data.sources.json_lines import JsonLinesReader, json_lines_shard, json_values
from maxtext.data.sources.tf_example import feature_values
from maxtext.data.sources.tf_record import TFRecordReader, tf_record_shard


def open_files(paths: Sequence[str], kind: str, encoding: Encoding, in_order: int, threads: int) -> ColumnDocuments:
  """Opens the documents of some files. With slow random access, `in_order` documents are shuffled together."""
  format_, columns, images = FORMATS[kind], encoding.columns, encoding.image_columns
  shards = [shard for path in paths for shard in format_.shards(path, columns)]
  names = [[Path(shard.path).name, shard.part, shard.records, os.path.getsize(shard.path)] for shard in shards]
  records = Records(shards, lambda shard: format_.open(shard, (*columns, *images)), threads)
  return ColumnDocuments(
    records.read,
    encoding,
    [shard.records for shard in shards],
    {"files": hashlib.sha256(repr(names).encode()).hexdigest()},
    records.where,
    FEW_SHARDS._replace(documents=in_order) if format_.in_order else FEW_SHARDS,
    lambda record: format_.values(record, columns, images),
  )


class Format(NamedTuple):
  """A file format.

  Attributes:
    shards: lists the shards of a file, each of which is opened as a whole.
    open: opens a shard, for some columns.
    values: returns the values of a record's columns, and of those of images, which it may lack.
    in_order: whether random access is slow.
  """

  shards: Callable[[str, Sequence[str]], list[Shard]]
  open: Callable[[Shard, Sequence[str]], Reader]
  values: Callable[[Any, Sequence[str], Sequence[str]], Sequence[Any]]
  in_order: bool


def _array_record_shards(path: str, columns: Sequence[str]) -> list[Shard]:
  from array_record.python import array_record_module

  try:
    reader = array_record_module.ArrayRecordReader(path)
    records = reader.num_records()
    reader.close()
  except Exception as error:
    raise ConfigError(f"{path} is not an ArrayRecord file: {error}") from None
  return [Shard(path, records, records * INDEX_BYTES)]


def _parquet_shards(path: str, columns: Sequence[str]) -> list[Shard]:
  metadata = _parquet(path).metadata
  known = [metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)]
  if missing := set(columns) - set(known):
    raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}; it has {', '.join(dict.fromkeys(known))}.")
  groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
  return [Shard(path, group.num_rows, group.total_byte_size, i) for i, group in enumerate(groups)]


class _ParquetReader:
  """A row group, decoded."""

  def __init__(self, shard: Shard, columns: Sequence[str]) -> None:
    file = _parquet(shard.path)
    self._columns, known = columns, set(file.schema_arrow.names)
    self._table = file.read_row_group(shard.part, columns=[column for column in columns if column in known])

  def read(self, places: list[int]) -> list[list[Any]]:
    """The values of these rows."""
    rows = self._table.take(places).to_pylist()
    return [[row.get(column) for column in self._columns] for row in rows]


def _parquet(path: str) -> Any:
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError:
    raise ConfigError("grain_file_type=parquet needs pyarrow: pip install 'maxtext[hf]'.") from None
  try:
    return pyarrow.parquet.ParquetFile(path)
  except pyarrow.ArrowInvalid:
    raise ConfigError(f"{path} is not a Parquet file.") from None


FORMATS = {
  "arrayrecord": Format(_array_record_shards, lambda shard, _: open_array_record(shard), feature_values, False),
  "tfrecord": Format(
    lambda path, _: [tf_record_shard(path)], lambda shard, _: TFRecordReader(shard.path), feature_values, True
  ),
  "jsonl": Format(
    lambda path, _: [json_lines_shard(path)], lambda shard, _: JsonLinesReader(shard.path), json_values, False
  ),
  "parquet": Format(_parquet_shards, _ParquetReader, lambda record, *_: record, True),
}
