"""Safetensors files, a tensor at a time: read through memory maps, written as a stream of bytes.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes behind each other. The
library of that name knows no bfloat16 in NumPy, copies what it reads and writes from whole tensors in memory, so the
few lines that it takes are here. Nothing else is ever read: no pickle.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from maxtext.configs.errors import RunError
from maxtext.storage.atomic import atomic_file

_NAMES = {
  "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
  "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip
DTYPES: Mapping[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in _NAMES.items()} | {
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # bytes, as the format has it
_MAX_DIMENSIONS = 32
_MAX_MESSAGE = 500  # characters of what is wrong with a header, which may quote it


@dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file."""

  file: Path
  offset: int
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def bytes(self) -> int:
    """Size in bytes."""
    return prod(self.shape) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """The tensor, memory-mapped: only the parts that are used are read."""
    if not self.bytes:
      return np.zeros(self.shape, self.dtype)
    mapped = np.memmap(self.file, np.uint8, "r", self.offset, (self.bytes,))
    return np.asarray(mapped).view(self.dtype).reshape(self.shape)

  def copy(self) -> np.ndarray:
    """The tensor in memory; raises `RunError` if the file is cut off meanwhile, which a map does not survive."""
    with self.file.open("rb") as file:
      file.seek(self.offset)
      content = file.read(self.bytes)
    if len(content) < self.bytes:
      raise RunError(f"{self.file} was cut off while it was read.")
    return np.frombuffer(content, self.dtype).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
  """The tensors of a file, by name; raises `RunError` if the file is truncated or not a safetensors file."""
  size = file.stat().st_size
  with open(file, "rb") as f:
    length = int.from_bytes(f.read(8), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
      raise RunError(f"{file} is not a safetensors file, or is truncated.")
    try:
      entries = json.loads(f.read(length), object_pairs_hook=_unique_names)
      found = {name: _parse_entry(file, 8 + length, about) for name, about in entries.items() if name != "__metadata__"}
      _check_overlaps(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
      raise RunError(f"{file} has a header that cannot be read: {str(error)[:_MAX_MESSAGE]}.") from None
  for name, tensor in found.items():
    if tensor.offset + tensor.bytes > size:
      raise RunError(f"{file} is truncated: {name} would end at byte {tensor.offset + tensor.bytes} of {size}.")
  return found


def make_header(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> bytes:
  """The header of a file with these shapes and dtypes; the bytes of the tensors follow in that order."""
  entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
  offset = 0
  for name, (shape, dtype) in tensors.items():
    end = offset + prod(shape) * dtype.itemsize
    entries[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(entries, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  return len(text).to_bytes(8, "little") + text


def write_file(file: Path, content: Iterable[bytes | memoryview]) -> None:
  """Writes a file atomically."""
  with atomic_file(file) as f:
    for part in content:
      f.write(part)


def _parse_entry(file: Path, start: int, about: Mapping) -> StoredTensor:
  if about["dtype"] not in DTYPES:
    raise ValueError(f"dtype {about['dtype']} is not known")
  (begin, end), shape = about["data_offsets"], about["shape"]
  if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
    raise ValueError(f"shape {shape} at bytes {begin} to {end} is not a tensor")
  tensor = StoredTensor(file, start + begin, tuple(about["shape"]), DTYPES[about["dtype"]])
  if end - begin != tensor.bytes:
    raise ValueError(f"bytes {begin} to {end} are not {about['dtype']}{about['shape']}")
  return tensor


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
  found = dict(pairs)
  if len(found) != len(pairs):
    raise ValueError("a name occurs twice")
  return found


def _check_overlaps(tensors: Mapping[str, StoredTensor]) -> None:
  """Raises for two names of the same bytes. No writer makes them, and a small file could claim to be a huge model."""
  end, last = 0, ""
  for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
    if tensor.bytes and tensor.offset < end:
      raise ValueError(f"{name} and {last} share bytes")
    if tensor.bytes:
      end, last = tensor.offset + tensor.bytes, name
