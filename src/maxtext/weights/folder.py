"""A Hugging Face folder, to read: its configuration and every tensor in it by name."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.weights.quantized import Source, unpacked
from maxtext.weights.tensor_files import Stored, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Folder:
  """Weights and configuration as `save_pretrained` leaves them, in one file or several."""

  def __init__(self, path: str | Path) -> None:
    self.path = Path(path).expanduser()
    if not self.path.is_dir():
      raise ConfigError(f"{path} is no folder.")

  @cached_property
  def config(self) -> dict[str, Any]:
    """`config.json`; where it describes more than text, the part about text."""
    content = self.json("config.json")
    for part in ("thinker_config", "text_config"):
      content = content | content.get(part, {})
    return content

  @cached_property
  def tensors(self) -> Mapping[str, Source]:
    """Every tensor under its name. Files are mapped when a tensor is read."""
    block = self.config.get("quantization_config", {}).get("weight_block_size", (128, 128))
    return unpacked(self._stored, tuple(block))

  def files(self) -> list[Path]:
    """The files that hold the tensors."""
    return sorted({tensor.file for tensor in self._stored.values()})

  def json(self, name: str) -> dict[str, Any]:
    """A file of JSON in it; {} where there is none."""
    try:
      return json.loads((self.path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
      return {}
    except ValueError as error:
      raise RunError(f"{self.path / name} is not JSON: {error}.") from None

  @cached_property
  def _stored(self) -> dict[str, Stored]:
    index = self.json(INDEX).get("weight_map")
    names = sorted(set(index.values())) if index else [SINGLE]
    if absent := [name for name in names if not (self.path / name).is_file()]:
      raise ConfigError(f"{self.path} has no {absent[0]}.{self._other_formats()}")
    found = {n: tensor for name in names for n, tensor in read_header(self.path / name).items()}
    if index and (differ := sorted(index.keys() ^ found.keys())):
      raise RunError(f"{self.path / INDEX} and the files it names do not agree on: {', '.join(differ)}.")
    return found

  def _other_formats(self) -> str:
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in self.path.glob(pattern))
    if not others:
      return ""
    return f" {others[0]} is a pickle, which can run any program, and is never loaded: take the model's safetensors."
