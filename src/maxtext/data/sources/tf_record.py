"""TFRecord files: records of (length, its checksum, content, its checksum), found by an index that is made at opening.

Checksums are masked CRC-32C. Both are checked, that of a length before anything is read by it, so a damaged file is
named with the record instead of being read from a wrong place.
"""

import os
import struct

import numpy as np

from maxtext.configs.errors import RunError
from maxtext.data.records import Shard

_HEADER, _FOOTER = 12, 4


def tf_record_shard(path: str) -> Shard:
  """A whole file."""
  records = len(_index(path))
  return Shard(path, records, records * 16)


class TFRecordReader:
  """An open file."""

  def __init__(self, path: str) -> None:
    self._path, self._places = path, _index(path)
    self._file = os.open(path, os.O_RDONLY)

  def read(self, places: list[int]) -> list[bytes]:
    """The records at these places."""
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
  """Start and size of every record's content."""
  places: list[tuple[int, int]] = []
  at, end = 0, os.path.getsize(path)
  with open(path, "rb") as file:
    while at < end:
      file.seek(at)
      header = file.read(_HEADER)
      if len(header) == _HEADER and _checksum(header[:8]) != header[8:]:
        raise _damage(path, len(places), "its length does not have its checksum; or this is no TFRecord file")
      size = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else 0
      if (after := at + _HEADER + size + _FOOTER) > end:
        raise _damage(path, len(places), f"it ends at byte {after}, and the file is cut short at {end}")
      places.append((at + _HEADER, size))
      at = after
  return np.array(places, np.int64).reshape(-1, 2)


def _checksum(content: bytes) -> bytes:
  """As it stands in the file: rotated and moved, because a CRC over data that contains its own CRC says little."""
  import google_crc32c

  crc = google_crc32c.value(content)
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _damage(path: str, record: int, what: str) -> RunError:
  return RunError(f"{path}, record {record} is damaged: {what}. Copy or write the file again.")
