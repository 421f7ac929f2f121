"""Weight conversion from Hugging Face: parameters of a folder as a checkpoint, or directly on the devices of a run."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.options import array_storage
from maxtext.checkpoint.tokenizer import SIDE_FOLDER
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.quantized_weight import WeightRounding
from maxtext.models.build import weight_table
from maxtext.models.model import Model
from maxtext.weights.compressed_tensors import Compressed
from maxtext.weights.config_json import SPARE_ROWS, config_differences, hugging_face_class, our_name
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.plain_weights import Index, Progress
from maxtext.weights.quantized import BlockScaled, Codes, Mxfp4, TensorSource
from maxtext.weights.tensor_layout import TensorLayout, check_all_used, tensor_layouts, tensors_of_parameters
from maxtext.weights.weights_at_rest import RoundedPieces, load_rounded, plain_model, write_pieces

_IN_FEW_BITS = (BlockScaled, Mxfp4, Compressed)
_SIDE_FILES = (
  "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
  "merges.txt", "chat_template*",
)  # fmt: skip


def convert_from_hugging_face(
  config: MaxTextConfig,
  model: Model,
  folder: HuggingFaceFolder,
  target: Path,
  keys: Mapping[str, Any],
  progress: Progress,
) -> Path:
  """Writes a checkpoint of parameters, part by part, and returns its folder. Started again, it resumes."""
  pieces = RoundedPieces(model, model, HuggingFaceWeights.of(config, model, folder))
  others = side_files(folder)

  def beside(written: Path) -> None:
    copy_files(others, written / SIDE_FOLDER)

  return write_pieces(array_storage(config), pieces, target, folder.fingerprint(), keys, progress, beside)


def load_from_hugging_face(
  config: MaxTextConfig, model: Model, path: str, unstacked: bool = False
) -> dict[str, jax.Array]:
  """Every parameter on its devices, which may come `unstacked` (`load_rounded`); a process reads only the parts that
  its own devices hold."""
  plain = plain_model(model)
  weights = HuggingFaceWeights.of(config, plain, HuggingFaceFolder(path))
  if config.checkpoint_is_quantized and not any(isinstance(s, _IN_FEW_BITS) for s in weights.sources.values()):
    raise ConfigError(f"checkpoint_is_quantized=true, but {path} has plain weights: leave it out.")
  return load_rounded(model, plain, weights, unstacked)


def side_files(folder: HuggingFaceFolder) -> list[Path]:
  """The files beside the weights: tokenizer, generation and model configuration."""
  names = sorted({file.name for pattern in _SIDE_FILES for file in folder.path.glob(pattern)})
  return [file for name in names if (file := folder.resolve_inside(name)).is_file()]


def copy_files(files: Iterable[Path], target: Path) -> None:
  """Copies files into a folder under the same names."""
  target.mkdir(exist_ok=True)
  for file in files:
    shutil.copyfile(file, target / file.name)


@dataclass(frozen=True)
class HuggingFaceWeights:
  """A folder's tensors, matched with a model's parameters.

  Attributes:
    tensors: the layout of each tensor.
    sources: what reads each tensor.
    parts: for each parameter, the tensors and slice indices that hold it.
  """

  tensors: Mapping[str, TensorLayout]
  sources: Mapping[str, TensorSource]
  parts: Mapping[str, list[tuple[str, int]]]

  @staticmethod
  def of(config: MaxTextConfig, model: Model, folder: HuggingFaceFolder) -> "HuggingFaceWeights":
    """Matches every tensor with parameters.

    Raises:
      ConfigError: tensors are missing, unused or have another shape.
    """
    about = hugging_face_class(config)
    if contradictions := config_differences(config, folder.config):
      raise ConfigError(f"{folder.path / 'config.json'} describes another model: {'; '.join(contradictions)}.")
    tensors = tensor_layouts(model, weight_table(config, model.spec))
    sources = {our_name(name, about): source for name, source in folder.tensors.items()}
    check_all_used(tensors, sources, (*_NEVER_WEIGHTS, *about.ignored))
    fitting = {name: _match_shape(name, tensor, sources[name], model) for name, tensor in tensors.items()}
    return HuggingFaceWeights(tensors, fitting, tensors_of_parameters(tensors))

  def read(self, name: str, number: int) -> np.ndarray:
    """The part of a tensor for one slice, as a view."""
    return self.tensors[name].split(self.sources[name].read())[number]

  def indices(self, path: str) -> list[Index]:
    """The indices of the pieces of a parameter."""
    return [self.tensors[name].slices[number].index for name, number in self.parts[path]]

  def piece(self, path: str, index: Index) -> np.ndarray:
    """A piece of a parameter, or all experts of a layer whose pieces are single ones."""
    parts = self._parts_by_index[path]
    if index in parts:
      return self.read(*parts[index])
    return np.stack([self.read(*parts[one]) for one in sorted(parts) if one[: len(index)] == index])

  @cached_property
  def _parts_by_index(self) -> dict[str, dict[Index, tuple[str, int]]]:
    return {path: dict(zip(self.indices(path), parts, strict=True)) for path, parts in self.parts.items()}

  def codes(self, path: str, index: Index, rounding: WeightRounding) -> Codes | None:
    """A piece that the folder stores in this format."""
    if index not in self._parts_by_index[path]:
      return None  # several pieces at once
    name, number = self._parts_by_index[path][index]
    source, layout = self.sources[name], self.tensors[name]
    found = source.codes() if isinstance(source, (*_IN_FEW_BITS, _ResizedVocabulary)) else None
    if found is None or (found.rounding.format, found.rounding.block) != (rounding.format, rounding.block):
      return None
    if layout.weight.table:
      return replace(found, values=found.values.T, scales=found.scales.reshape(len(found.values), -1).T)
    values, scales = (
      layout.with_rows(array.shape[-1]).split(array if layout.weight.transposed else array.swapaxes(-1, -2))[number]
      for array in (found.values, found.scales)
    )
    return replace(found, values=values, scales=scales)

  def skip(self, path: str, index: Index) -> None:
    """Nothing is left to do."""

  def check(self) -> None:
    """Safetensors files have no checksums."""


@dataclass(frozen=True)
class _ResizedVocabulary:
  """A tensor whose vocabulary has a few rows more or fewer than the model's."""

  source: TensorSource
  rows: int

  @property
  def shape(self) -> tuple[int, ...]:
    return (self.rows, *self.source.shape[1:])

  @property
  def dtype(self) -> np.dtype:
    return self.source.dtype

  def read(self) -> np.ndarray:
    """The tensor; missing rows are zero, and extra rows are left out."""
    return self._resized(self.source.read())

  def codes(self) -> Codes | None:
    """The same of what is stored in few bits, so that it is not rounded a second time."""
    found = self.source.codes() if isinstance(self.source, _IN_FEW_BITS) else None
    return found and replace(found, values=self._resized(found.values), scales=self._resized(found.scales))

  def _resized(self, array: np.ndarray) -> np.ndarray:
    there = array[: self.rows]
    return np.concatenate([there, np.zeros((self.rows - len(there), *there.shape[1:]), there.dtype)])


def _match_shape(name: str, tensor: TensorLayout, source: TensorSource, model: Model) -> TensorSource:
  if source.shape == tensor.shape:
    return source
  spare = source.shape[1:] == tensor.shape[1:] and abs(source.shape[0] - tensor.shape[0]) <= SPARE_ROWS
  if spare and "vocab" in model.logical_axes[tensor.slices[0].path]:
    return _ResizedVocabulary(source, tensor.shape[0])
  raise ConfigError(f"{name} is {list(source.shape)} in the folder, and this model has {list(tensor.shape)}.")


_NEVER_WEIGHTS = (r".*\.rotary_emb\.inv_freq",)
