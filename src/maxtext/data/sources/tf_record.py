"""TFRecord files with random access, by an index that is built at opening.

A record is (length, checksum of the length, content, checksum of the content). Checksums are masked CRC-32C. Both are
verified, the length's before it is used, so the error for a damaged file names the file and the record.
"""

import os
import struct

import numpy as np

from maxtext.configs.errors import RunError
from maxtext.data.records import Shard

_HEADER, _FOOTER = 12, 4


def tf_record_shard(path: str) -> Shard:
  """The shard of a whole file."""
  records = len(_index(path))
  return Shard(path, records, records * 16)


class TFRecordReader:
  """Reads records of an open file."""

  def __init__(self, path: str) -> None:
    self._path, self._places = path, _index(path)
    self._file = os.open(path, os.O_RDONLY)

  def read(self, places: list[int]) -> list[bytes]:
    """The records at these indices."""
    return [self._read(place, *self._places[place].tolist()) for place in places]

  def _read(self, place: int, start: int, size: int) -> bytes:
    content = os.pread(self._file, size + _FOOTER, start)
    if len(content) != size + _FOOTER:
      raise _damage(self._path, place, "the file has become shorter")
    if _checksum(content[:size]) != content[size:]:
      raise _damage(self._path, place, "its content does not have its checksum")
    return content[:size]

  def __del__(self) -> None:
    if hasattr(self, "_file"):
      os.close(self._file)


def _index(path: str) -> np.ndarray:
  """Offset and size of every record's content."""
  places: list[tuple[int, int]] = []
  offset, end = 0, os.path.getsize(path)
  with open(path, "rb") as file:
    while offset < end:
      file.seek(offset)
      header = file.read(_HEADER)
      if len(header) == _HEADER and _checksum(header[:8]) != header[8:]:
        raise _damage(path, len(places), "its length does not have its checksum; or this is no TFRecord file")
      size = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else 0
      if (after := offset + _HEADER + size + _FOOTER) > end:
        raise _damage(path, len(places), f"it ends at byte {after}, and the file is cut short at {end}")
      places.append((offset + _HEADER, size))
      offset = after
  return np.array(places, np.int64).reshape(-1, 2)


def _checksum(content: bytes) -> bytes:
  """The masked CRC-32C as stored in the file: rotated, plus a constant, as the format defines."""
  import google_crc32c

  crc = google_crc32c.value(content)
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _damage(path: str, record: int, what: str) -> RunError:
  return RunError(f"{path}, record {record} is damaged: {what}. Copy or write the file again.")
