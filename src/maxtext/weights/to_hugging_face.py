"""To Hugging Face: a checkpoint as a folder of safetensors shards, an index, config.json and tokenizer files."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from maxtext.layers.lora import is_adapter
from maxtext.layers.quantized_weight import array_paths
from maxtext.models.build import weight_table
from maxtext.models.execution.adapters import adapters
from maxtext.models.execution.quantization import rounds_inputs
from maxtext.models.model import Model
from maxtext.weights.base import parameter_reader
from maxtext.weights.compressed_tensors import compress_values, compressed_parts, weight_scheme
from maxtext.weights.config_json import TOKENS, config_json_entries
from maxtext.weights.from_hugging_face import copy_files, side_files
from maxtext.weights.hugging_face_folder import INDEX, SINGLE, HuggingFaceFolder
from maxtext.weights.plain_weights import CheckpointWeights, Progress
from maxtext.weights.quantized import unpacked_values
from maxtext.weights.tensor_files import make_header, write_file
from maxtext.weights.tensor_layout import ParameterSlice, TensorLayout, tensor_layouts
from maxtext.weights.tokenizer_files import write_tokenizer
from maxtext.weights.weights_at_rest import rounding_at_rest

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


@dataclass(frozen=True)
class _FileTensor:
  """A tensor of a file: what its header says, and its bytes from the first dimension on, in chunks."""

  shape: tuple[int, ...]
  dtype: np.dtype
  chunks: Callable[[], Iterator[np.ndarray]]

  @property
  def bytes(self) -> int:
    return prod(self.shape) * self.dtype.itemsize


class _HuggingFaceWriter:
  def __init__(self, config: MaxTextConfig, model: Model, source: epath.Path, target: Path, most: int) -> None:
    if config.weight_sparsity_n:
      raise ConfigError(
        f"weight_sparsity_n={config.weight_sparsity_n}: masks of N:M sparsity cannot be exported; serve the run itself."
      )
    self._config, self._model, self._reader = config, model, parameter_reader(config, model, source)
    self._entries = config_json_entries(config)
    tensors = tensor_layouts(model, weight_table(config, model.spec))
    self._lora, rounding = adapters(config), rounding_at_rest(self._reader)
    self._weights = CheckpointWeights(model, self._reader, rounding, self._lora)
    self._rounding, self._activations = None if self._lora else rounding, rounds_inputs(config)
    self._tensors = {
      name: tensor
      for whole in sorted(tensors, key=_natural)
      for name, tensor in self._in_the_file(whole, tensors[whole]).items()
    }
    own, layout = (*model.params, *model.buffers), Layout(self._reader.metadata.stacked)
    parts = {part for name in own for part in layout.stored(name, model.struct(name))}
    if lost := [name for name in self._reader.metadata.parameters if is_adapter(name) and name not in parts]:
      raise ConfigError(f"{source} has the LoRA adapter {lost[0]}, and lora_rank or lora_targets would leave it out.")
    self._shards = self._plan(most)
    record, scheme = self._reader.metadata.to_json()["digest"], str((self._rounding, self._activations))
    self._journal = Journal(
      target, (str(source.absolute()), record, config.weight_dtype.value, most, str(self._lora), scheme)
    )

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
    yield make_header({name: (self._tensors[name].shape, self._tensors[name].dtype) for name in names})
    written = 0
    for name in names:
      for rows in self._tensors[name].chunks():
        block = np.ascontiguousarray(rows, self._tensors[name].dtype).view(np.uint8).data
        yield block
        written += block.nbytes
        report(written)

  def _in_the_file(self, name: str, layout: TensorLayout) -> dict[str, _FileTensor]:
    """The tensors of a file for one of the model: itself, or the parts of a weight at rest in few bits."""
    path = layout.slices[0].path
    if self._rounding is None or f"{path}_scale" not in self._reader.parameters:
      dtype = np.dtype(self._model.struct(path).dtype)
      return {name: _FileTensor(layout.shape, dtype, partial(self._plain_rows, layout))}
    two = len(layout.shape) == 2 and (layout.weight.transposed or layout.weight.table)
    if not two or not name.endswith(".weight"):
      raise ConfigError(
        f"{name} is neither a linear layer's weight nor an embedding, and compressed-tensors has no other in few bits."
      )
    if layout.weight.table and self._model.spec.tied:
      raise ConfigError(
        f"{name}: compressed-tensors ties no head to an embedding in few bits: quantize without 'embedding' and 'head'."
      )
    if len(layout.slices) > 1 and self._rounding.stored.scale == "e4m3":
      raise ConfigError(f"{name} holds several weights, and {self._rounding.format} has one global scale for them.")
    parts = compressed_parts(self._rounding, self._activations, (layout.shape[0], layout.shape[1]))
    return {
      f"{name.removesuffix('weight')}{part}": _FileTensor(shape, dtype, partial(self._part, layout, part))
      for part, (shape, dtype) in parts.items()
    }

  def _plain_rows(self, layout: TensorLayout) -> Iterator[np.ndarray]:
    pieces = [self._weights.piece(slice_.path, slice_.index) for slice_ in layout.slices]
    return layout.join_in_rows(pieces, CHUNK)

  def _part(self, layout: TensorLayout, part: str) -> Iterator[np.ndarray]:
    """A part of a weight at rest."""
    assert self._rounding is not None
    if part == "weight_shape":
      yield np.array(layout.shape, np.int64)
      return
    leaf = {"weight_packed": "weight"}.get(part, part)
    pieces = [self._stored(slice_, leaf) for slice_ in layout.slices]
    if part == "weight_global_scale":
      yield pieces[0].reshape(1)
    elif part == "weight_scale":
      yield _joined(layout, pieces)
    else:
      values = [unpacked_values(self._rounding, piece) for piece in pieces]
      yield compress_values(self._rounding, self._activations, np.ascontiguousarray(_joined(layout, values)))

  def _stored(self, slice_: ParameterSlice, leaf: str) -> np.ndarray:
    """An array of a weight at rest, [rows, outputs]."""
    name = array_paths(slice_.path)[leaf]
    found = self._reader.read(name, slice_.index, len(self._reader.stored_shape(name)))
    if not self._model.contracted[slice_.path][1]:
      return found.T
    return found.reshape(found.shape[0], -1) if found.ndim else found

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
    dtype = {"dtype": self._config.weight_dtype.value}
    content = self._entries | tokens | dtype | self._quantization_config()
    write_file(folder / "config.json", [_json(content)])
    if not (folder / "generation_config.json").exists():
      write_file(folder / "generation_config.json", [_json(tokens)])

  def _size(self, name: str) -> int:
    return self._tensors[name].bytes

  def _quantization_config(self) -> dict[str, Any]:
    """The entry of config.json for weights at rest; none without them."""
    if self._rounding is None:
      return {}
    rounded = {name.rpartition(".")[0] for name in self._tensors if name.endswith(".weight_scale")}
    linear = {
      name.rpartition(".")[0]
      for name, tensor in self._tensors.items()
      if name.endswith(".weight") and len(tensor.shape) == 2
    }
    ignored = sorted(linear - rounded, key=_natural)
    return {"quantization_config": weight_scheme(self._rounding, self._activations, ignored)}


def _joined(layout: TensorLayout, pieces: list[np.ndarray]) -> np.ndarray:
  """Values or scales [rows, outputs] of a weight as [outputs, rows], which is how a table is in a file, too."""
  return pieces[0].T if layout.weight.table else layout.with_rows(pieces[0].shape[0]).join(pieces)


def _json(content: Mapping[str, Any]) -> bytes:
  return (json.dumps(content, indent=2, default=str) + "\n").encode()


def _natural(name: str) -> list[Any]:
  return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
