"""A Hugging Face folder: its `config.json` and its tensors by name."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.safe_paths import resolve_inside
from maxtext.models.hugging_face import flat_entries
from maxtext.weights.compressed_tensors import compressed_tensors, read_scheme
from maxtext.weights.quantized import TensorSource, dequantize_tensors
from maxtext.weights.tensor_files import StoredTensor, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HuggingFaceFolder:
  """A folder as `save_pretrained` writes it, with tensors in one file or several."""

  def __init__(self, path: str | Path) -> None:
    self.path = Path(path).expanduser()
    if not self.path.is_dir():
      raise ConfigError(f"{path} is not a folder.")

  @cached_property
  def config(self) -> dict[str, Any]:
    """The entries of `config.json`, flat."""
    return flat_entries(self.json("config.json"))

  @cached_property
  def tensors(self) -> Mapping[str, TensorSource]:
    """Every tensor by name, dequantized on read. Files are mapped when a tensor is read."""
    stored, block = self._stored, self._block
    try:
      if (rounding := read_scheme(self.config.get("quantization_config") or {})) is not None:
        return compressed_tensors(stored, rounding)
      return dequantize_tensors(stored, block)
    except ValueError as error:
      raise RunError(f"{self.path} has quantized tensors that cannot be read: {error}.") from None

  def files(self) -> list[Path]:
    """The files that hold the tensors."""
    return sorted({tensor.file for tensor in self._stored.values()})

  def fingerprint(self) -> list[tuple[str, int, int]]:
    """Identifies the files that hold the tensors: path, size and time of each."""
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files()]

  def json(self, name: str) -> dict[str, Any]:
    """The content of a JSON file in the folder; {} if there is none."""
    file = self.resolve_inside(name)
    try:
      content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
      return {}
    except (ValueError, RecursionError) as error:
      raise RunError(f"{self.path / name} is not JSON: {error}.") from None
    if not isinstance(content, dict):
      raise RunError(f"{self.path / name} is not a JSON object.")
    return content

  def resolve_inside(self, name: str) -> Path:
    """The path of a file in the folder; raises `ConfigError` if it leads outside."""
    return resolve_inside(self.path, name)

  @property
  def _block(self) -> tuple[int, int]:
    """Rows and columns that share a scale in 8-bit tensors."""
    file, content = self.path / "config.json", self.config.get("quantization_config") or {}
    if not isinstance(content, dict):
      raise ConfigError(f"{file} has a quantization_config that is not a JSON object.")
    block = content.get("weight_block_size") or [128, 128]
    if not isinstance(block, list):
      raise ConfigError(f"{file} has a weight_block_size that is not a list of two numbers.")
    return tuple(block)

  @cached_property
  def _stored(self) -> dict[str, StoredTensor]:
    index = self.json(INDEX).get("weight_map")
    if index and not (isinstance(index, dict) and all(isinstance(name, str) for name in index.values())):
      raise RunError(f"{self.path / INDEX} has a weight_map that is not a table of names.")
    names = sorted(set(index.values())) if index else [SINGLE]
    if absent := [name for name in names if not self.resolve_inside(name).is_file()]:
      raise ConfigError(f"{self.path} has no {absent[0]}.{self._other_formats()}")
    found = {n: tensor for name in names for n, tensor in read_header(self.path / name).items()}
    if index and (differ := sorted(index.keys() ^ found.keys())):
      raise RunError(f"{self.path / INDEX} and the files it names do not agree on: {', '.join(differ)}.")
    return found

  def _other_formats(self) -> str:
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in self.path.glob(pattern))
    if not others:
      return ""
    return f" {others[0]} is a pickle, which can run any program and is never loaded: use the model's safetensors."
