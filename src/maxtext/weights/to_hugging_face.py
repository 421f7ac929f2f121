"""To Hugging Face: a checkpoint as a folder of safetensors shards, an index, config.json and tokenizer files."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from maxtext.checkpoint.files import CHUNK
from maxtext.checkpoint.journal import Journal
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.metadata import CorruptCheckpointError
from maxtext.checkpoint.tokenizer import SIDE_FOLDER, kind_of, open_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.options import data_options
from maxtext.layers.lora import adapted_module, is_adapter
from maxtext.models.build import weight_table
from maxtext.models.execution.adapters import adapters
from maxtext.models.model import Model
from maxtext.weights.base import parameter_reader
from maxtext.weights.config_json import TOKENS, config_json_entries
from maxtext.weights.from_hugging_face import Progress, copy_files, side_files
from maxtext.weights.hugging_face_folder import INDEX, SINGLE, HuggingFaceFolder
from maxtext.weights.tensor_files import make_header, write_file
from maxtext.weights.tensor_layout import tensor_layouts
from maxtext.weights.tokenizer_files import write_tokenizer

SHARD_BYTES = 5 * 10**9  # bytes, as Hugging Face's library has it


def convert_to_hugging_face(
  config: MaxTextConfig, model: Model, source: epath.Path, target: Path, progress: Progress, most: int = SHARD_BYTES
) -> Path:
  """Writes shard after shard, the index last, and returns the folder. Started again, it keeps complete shards.

  Args:
    config: the model, and `weight_dtype`, in which the tensors are written.
    model: the abstract model.
    source: a checkpoint of a run, or of parameters.
    target: the folder to create.
    progress: is called as it goes.
    most: the largest size of a shard in bytes, unless a tensor is larger.
  """
  try:
    return _HuggingFaceWriter(config, model, source, target, most).write(progress)
  except CorruptCheckpointError as damage:
    raise RunError(f"{source} is damaged: {damage}.") from None


class _HuggingFaceWriter:
  def __init__(self, config: MaxTextConfig, model: Model, source: epath.Path, target: Path, most: int) -> None:
    if config.weight_sparsity_n:
      raise ConfigError(
        f"weight_sparsity_n={config.weight_sparsity_n}: masks of N:M sparsity cannot be exported; serve the run itself."
      )
    self._config, self._model, self._reader = config, model, parameter_reader(config, model, source)
    self._entries = config_json_entries(config)
    tensors = tensor_layouts(model, weight_table(config, model.spec))
    self._tensors = {name: tensors[name] for name in sorted(tensors, key=_natural)}
    names = (f"{adapted_module(name)}/weight" for name in (*model.params, *model.buffers) if is_adapter(name))
    self._lora = adapters(config)
    self._adapters = {name: self._lora.paths(name.removesuffix("/weight")) for name in names} if self._lora else {}
    stored = (*model.weight_names, *(name for pair in self._adapters.values() for name in pair))
    layout = Layout(self._reader.metadata.stacked)
    parts = {part for name in stored for part in layout.stored(name, model.struct(name))}
    if lost := [name for name in self._reader.metadata.parameters if is_adapter(name) and name not in parts]:
      raise ConfigError(f"{source} has the LoRA adapter {lost[0]}, and lora_rank or lora_targets would leave it out.")
    self._reader.check_shapes({name: model.struct(name) for name in stored})
    self._shards = self._plan(most)
    record = self._reader.metadata.to_json()["digest"]
    self._journal = Journal(target, (str(source.absolute()), record, config.weight_dtype.value, most, str(self._lora)))

  def write(self, progress: Progress) -> Path:
    """All of it."""
    folder, finished = self._journal.folder, {entry["shard"]: entry["sums"] for entry in self._journal.entries}
    total, done = sum(map(self._size, self._tensors)), 0
    sums: dict[str, int] = {}
    for count, (shard, names) in enumerate(self._shards.items()):
      if shard not in finished or not (folder / shard).exists():
        report = partial(self._report, progress, count, done, total)
        write_file(folder / shard, self._content(names, report))
        finished[shard] = self._reader.take_sums()
        self._journal.note({"shard": shard, "sums": finished[shard]})
      for name, value in finished[shard].items():
        sums[name] = (sums.get(name, 0) + value) % 2**32
      done += sum(map(self._size, names))
    self._reader.check(sums)
    self._write_side_files(folder)
    if len(self._shards) > 1:
      weight_map = {name: shard for shard, names in self._shards.items() for name in names}
      write_file(folder / INDEX, [_json({"metadata": {"total_size": total}, "weight_map": weight_map})])
    progress(len(self._shards), len(self._shards), total, total)
    return self._journal.finish()

  def _report(self, progress: Progress, count: int, before: int, total: int, written: int) -> None:
    progress(count, len(self._shards), before + written, total)

  def _content(self, names: list[str], report: Callable[[int], None]) -> Iterator[bytes | memoryview]:
    """The bytes of a shard. `report` is called with the bytes of tensors so far."""
    yield make_header({name: (self._tensors[name].shape, self._dtype(name)) for name in names})
    written = 0
    for name in names:
      tensor = self._tensors[name]
      pieces = [self._read(slice_.path, slice_.index) for slice_ in tensor.slices]
      for rows in tensor.join_in_rows(pieces, CHUNK):
        block = np.ascontiguousarray(rows, self._dtype(name)).view(np.uint8).data
        yield block
        written += block.nbytes
        report(written)

  def _read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
    """A part of a parameter, with its adapter merged into it."""
    weight, *adapter = (
      self._reader.read(name, index, len(self._model.struct(name).shape))
      for name in (path, *self._adapters.get(path, ()))
    )
    if not adapter:
      return weight
    assert self._lora is not None
    return self._lora.merge(weight, self._model.contracted[path][0] - len(index), *adapter)

  def _plan(self, most: int) -> dict[str, list[str]]:
    """Files with their tensors, in the order of layers."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in self._tensors:
      if groups[-1] and size + self._size(name) > most:
        groups.append([])
        size = 0
      groups[-1].append(name)
      size += self._size(name)
    if len(groups) == 1:
      return {SINGLE: groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups)}

  def _write_side_files(self, folder: Path) -> None:
    """Writes the tokenizer and generation settings, as imported or the run's own, and config.json."""
    came = Path(self._reader.folder / SIDE_FOLDER)
    if came.is_dir():
      copy_files(side_files(HuggingFaceFolder(came)), folder)
    tokens = {name: HuggingFaceFolder(folder).config.get(name) for name in TOKENS}
    if self._config.tokenizer_path or kind_of(came) is None:
      with open_tokenizer(data_options(self._config), str(self._reader.folder)) as tokenizer:
        if tokenizer is not None:
          write_tokenizer(tokenizer, folder)
          tokens = dict(zip(TOKENS, (tokenizer.bos, tokenizer.eos, tokenizer.vocabulary.pad), strict=True))
    content = self._entries | tokens | {"dtype": self._config.weight_dtype.value}
    write_file(folder / "config.json", [_json(content)])
    if not (folder / "generation_config.json").exists():
      write_file(folder / "generation_config.json", [_json(tokens)])

  def _dtype(self, name: str) -> np.dtype:
    return np.dtype(self._model.struct(self._tensors[name].slices[0].path).dtype)

  def _size(self, name: str) -> int:
    return prod(self._tensors[name].shape) * self._dtype(name).itemsize


def _json(content: Mapping[str, Any]) -> bytes:
  return (json.dumps(content, indent=2, default=str) + "\n").encode()


def _natural(name: str) -> list[Any]:
  return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
