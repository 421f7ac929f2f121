"""Quantization of weights at rest: plain weights, read piece by piece, as values of few bits and their scales.

No more than one layer of a weight is ever in memory as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import ArrayMetadata, CheckpointMetadata
from maxtext.checkpoint.options import array_storage, restore_options
from maxtext.checkpoint.restore import load_parameters, readable, with_key_in_errors
from maxtext.checkpoint.stream import StreamReader, StreamWriter
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import WeightsAtRest
from maxtext.configs.values import default_of, plain_value
from maxtext.kernels.weight_quantize import STORED_FORMATS
from maxtext.layers.quantized_weight import QuantizedFormat, WeightRounding, is_scale
from maxtext.layers.weight_format import PlainFormat
from maxtext.models.execution.quantization import rounding_of_keys
from maxtext.models.model import Model
from maxtext.weights.plain_weights import CheckpointWeights, Index, PlainWeights, Progress, place


def plain_model(model: Model) -> Model:
  """The model with plain weights and without what matmul implementations add."""
  return Model.of(model.spec, model.execution.replace(weight_format=PlainFormat(), matmul=()))


def load_rounded(model: Model, plain: Model, source: PlainWeights) -> dict[str, jax.Array]:
  """The weights on their devices, as the model stores them, which may be plainly."""
  weights = RoundedPieces(model, plain, source)
  found = {name: array for path in weights.stored for name, array in weights.load(path).items()}
  if jax.process_count() == 1:  # one of several reads what its devices hold, which is not all that was saved
    source.check()
  return found


def load_stored(
  config: MaxTextConfig, model: Model, key: str, path: str, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Those parameters of a checkpoint, which a key of the configuration names, as the model stores them: plain weights
  are rounded as they are read."""
  metadata, options = readable(locate(path)), restore_options(config)
  weights = {name for name in model.weight_names if name in wanted}
  rounded: dict[str, jax.Array] = {}
  if weights and not _check_rounding(config, model, key, path, metadata):
    plain = plain_model(model)
    if isinstance(model.execution.weight_format, QuantizedFormat):
      weights_of = partial(load_rounded, model, plain)
      found = with_key_in_errors(key, path, lambda: weights_of(CheckpointWeights(plain, StreamReader(locate(path)))))
      rounded = {name: array for name, array in found.items() if name in wanted}
  others = {name: struct for name, struct in wanted.items() if name not in rounded}
  return rounded | (load_parameters(options, key, path, others) if others else {})


def _check_rounding(config: MaxTextConfig, model: Model, key: str, path: str, metadata: CheckpointMetadata) -> bool:
  """Whether a checkpoint holds weights at rest in few bits.

  Raises:
    ConfigError: it holds others than the model has.
  """
  format_ = model.execution.weight_format
  if not any(map(is_scale, metadata.parameters)):
    if config.checkpoint_is_quantized:
      raise ConfigError(f"checkpoint_is_quantized=true, but {key}={path} has plain weights: leave it out.")
    return False
  recorded = {key: metadata.config[key]["value"] for key in WeightsAtRest.model_fields if key in metadata.config}
  own = recorded_rounding(format_.rounding) if isinstance(format_, QuantizedFormat) else {"weight_format": ""}
  if differing := [key for key in own if recorded.get(key, default_of(key)) != own[key]]:
    asked = " ".join(f"{key}={plain_value(value)}" for key, value in recorded.items())
    raise ConfigError(
      f"{key}={path} holds weights at rest with {asked}, and this run has {differing[0]}="
      f"{plain_value(own[differing[0]])}: they are for inference and below LoRA adapters (lora_rank), with those keys."
    )
  return True


def recorded_rounding(rounding: WeightRounding) -> dict[str, Any]:
  """The keys that a checkpoint of weights at rest records."""
  block = rounding.block if rounding.block != rounding.stored.block else 0
  return {
    "weight_format": rounding.format,
    "weight_block_size": -1 if rounding.block == 0 != rounding.stored.block else block,
    "weight_format_targets": list(rounding.targets),
  }


def rounding_at_rest(reader: StreamReader) -> WeightRounding | None:
  """The rounding of the weights of a checkpoint, or of its base, as it records it; None for plain ones."""
  if not any(map(is_scale, reader.parameters)):
    return None
  config = reader.metadata.config
  name, *others = (config.get(key, {}).get("value", default_of(key)) for key in WeightsAtRest.model_fields)
  if name not in STORED_FORMATS:
    raise ConfigError(f"{reader.folder} is at rest with weight_format={name}, which this release does not know.")
  return rounding_of_keys(name, *others)


class RoundedPieces:
  """Plain weights, piece by piece, as a model stores them.

  Args:
    model: with the format of stored weights; a plain one leaves them as they are.
    plain: the same with plain weights.
  """

  def __init__(self, model: Model, plain: Model, source: PlainWeights) -> None:
    self._model, self._plain, self._source = model, plain, source
    own = {*model.params, *model.buffers}
    self.stored = {
      path: [path, *(name for leaf in ("scale", "global_scale") if (name := f"{path}_{leaf}") in own)]
      for path in plain.weight_names
    }

  def pieces(self, path: str) -> Iterator[tuple[Index, Any]]:
    """Each piece of a plain parameter: its index, and what reads the arrays that stand for it."""
    for index in self._source.indices(path):
      yield index, lambda index=index: self.read(path, index)

  def load(self, path: str) -> dict[str, jax.Array]:
    """The arrays of a plain parameter on their devices."""
    return place({name: self._model.struct(name) for name in self.stored[path]}, self.pieces(path))

  def read(self, path: str, index: Index) -> dict[str, np.ndarray]:
    """The arrays that stand for a piece of a plain parameter."""
    if len(self.stored[path]) == 1:
      return {path: self._source.piece(path, index)}
    format_ = self._model.execution.weight_format
    assert isinstance(format_, QuantizedFormat)
    arrays: Mapping[str, Any]
    if (codes := self._source.codes(path, index, format_.rounding)) is not None:
      arrays = codes.arrays()
    else:
      stacked, contracted = self._plain.contracted[path]
      arrays = _encode_each(format_.rounding, stacked - len(index), contracted, self._source.piece(path, index))
    found = {path + leaf.removeprefix("weight"): np.asarray(array) for leaf, array in arrays.items()}
    return {name: array.reshape(self._model.struct(name).shape[len(index) :]) for name, array in found.items()}


def _encode_each(rounding: WeightRounding, stacked: int, contracted: int, piece: np.ndarray) -> dict[str, np.ndarray]:
  """The arrays of a piece; experts are rounded one at a time, since a layer of them may not fit a device in float32."""
  if stacked:
    each = [_encode_each(rounding, stacked - 1, contracted, one) for one in piece]
    return {leaf: np.stack([arrays[leaf] for arrays in each]) for leaf in each[0]}
  return {leaf: np.asarray(array) for leaf, array in _encode(rounding, contracted)(piece).items()}


@cache
def _encode(rounding: WeightRounding, contracted: int) -> Any:
  return jax.jit(lambda weight: rounding.encode(weight, 0, contracted))


def write_weights_at_rest(
  config: MaxTextConfig,
  model: Model,
  source: PlainWeights,
  target: Path,
  request: Any,
  keys: Mapping[str, Any],
  progress: Progress,
  beside: Callable[[Path], None],
) -> Path:
  """Writes a checkpoint of quantized parameters, piece by piece, and returns its folder. Started again, it resumes.

  Args:
    request: what it is made from; a folder that was begun from something else is not continued.
    keys: the configuration that it records.
    beside: writes other files into the folder.
  """
  weights = RoundedPieces(model, plain_model(model), source)
  names = [name for stored in weights.stored.values() for name in stored]
  arrays = {name: ArrayMetadata(model.struct(name).shape, str(model.struct(name).dtype)) for name in names}
  writer = StreamWriter(array_storage(config), target, arrays, request)
  pieces = [(path, *piece) for path in weights.stored for piece in weights.pieces(path)]
  sizes = [
    sum(prod(model.struct(n).shape[len(index) :]) * model.struct(n).dtype.itemsize for n in weights.stored[path])
    for path, index, _ in pieces
  ]
  done = 0
  for count, ((path, index, read), size) in enumerate(zip(pieces, sizes, strict=True)):
    progress(count, len(pieces), done, sum(sizes))
    if all(writer.has(name, index) for name in weights.stored[path]):
      source.piece(path, index)  # is read again, so that what was saved can be checked as a whole
    else:
      for name, array in read().items():
        if not writer.has(name, index):
          writer.put(name, index, array)
    done += size
  source.check()
  beside(writer.folder)
  progress(len(pieces), len(pieces), done, sum(sizes))
  return writer.finish(0, keys)
