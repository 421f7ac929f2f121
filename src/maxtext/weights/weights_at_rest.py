"""Weights at rest: plain weights, read piece by piece, as a model stores them, which may be as quantized values and
scales; loaded onto devices, or written as a checkpoint.

No more than one layer of a weight is ever in memory as it was.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import ArrayMetadata, CheckpointMetadata
from maxtext.checkpoint.options import ArrayStorage, restore_options
from maxtext.checkpoint.restore import load_parameters, readable, with_key_in_errors
from maxtext.checkpoint.stream import StreamReader, StreamWriter, is_written
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import WeightsAtRest
from maxtext.configs.values import default_of, plain_value
from maxtext.kernels.weight_quantize import STORED_FORMATS
from maxtext.layers.parameter_paths import all_layers, one_layer
from maxtext.layers.quantized_weight import QuantizedFormat, WeightRounding, array_paths, is_scale
from maxtext.layers.weight_format import PlainFormat
from maxtext.models.execution.quantization import rounding_of_keys
from maxtext.models.model import Model
from maxtext.weights.plain_weights import CheckpointWeights, Index, PlainWeights, Progress, place


def plain_model(model: Model) -> Model:
  """The model with plain weights and without what matmul implementations add."""
  if isinstance(model.execution.weight_format, PlainFormat) and not model.execution.matmul:
    return model
  return Model.of(model.spec, model.execution.replace(weight_format=PlainFormat(), matmul=()))


def load_rounded(model: Model, plain: Model, source: PlainWeights, unstacked: bool = False) -> dict[str, jax.Array]:
  """The weights on their devices, as the model stores them, which may be plainly. `unstacked` has one entry per layer
  where a program takes that (`Model.unstacked`), without a stack that is there besides."""
  weights, apart = RoundedPieces(model, plain, source), model.unstacked if unstacked else set[str]()
  found = {name: array for path in weights.stored for name, array in weights.load(path, path in apart).items()}
  if jax.process_count() == 1:  # one of several reads what its devices hold, which is not all that was saved
    source.check()
  return found


def load_stored(
  config: MaxTextConfig,
  model: Model,
  key: str,
  path: str,
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  unstacked: bool = False,
) -> dict[str, jax.Array]:
  """Those parameters of a checkpoint, which a key of the configuration names, as the model stores them: plain weights
  are rounded as they are read, and may come `unstacked`."""
  metadata, options = readable(locate(path)), restore_options(config)
  weights = {name for name in model.weight_names if name in wanted}
  rounded: dict[str, jax.Array] = {}
  at_rest = bool(weights) and _check_rounding(config, model, key, path, metadata)
  if weights and not at_rest and isinstance(model.execution.weight_format, QuantizedFormat):
    found = with_key_in_errors(key, path, lambda: _load_and_round(model, locate(path), unstacked))
    rounded = {name: array for name, array in found.items() if all_layers(name) in wanted}
  there = set(map(all_layers, rounded))
  others = {name: struct for name, struct in wanted.items() if name not in there}
  return rounded | (load_parameters(options, key, path, others) if others else {})


def _load_and_round(model: Model, folder: epath.Path, unstacked: bool) -> dict[str, jax.Array]:
  plain = plain_model(model)
  return load_rounded(model, plain, CheckpointWeights(plain, StreamReader(folder)), unstacked)


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
  recorded = _recorded(metadata)
  own = recorded_rounding(format_.rounding) if isinstance(format_, QuantizedFormat) else {"weight_format": ""}
  if differing := [name for name in own if recorded[name] != own[name]]:
    asked = " ".join(f"{name}={plain_value(value)}" for name, value in recorded.items())
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
  name, *others = _recorded(reader.metadata).values()
  if name not in STORED_FORMATS:
    raise ConfigError(f"{reader.folder} is at rest with weight_format={name}, which this release does not know.")
  return rounding_of_keys(name, *others)


def _recorded(metadata: CheckpointMetadata) -> dict[str, Any]:
  """The values of the keys of weights at rest."""
  return {key: metadata.config.get(key, {}).get("value", default_of(key)) for key in WeightsAtRest.model_fields}


class RoundedPieces:
  """Plain weights, piece by piece, as a model stores them.

  Args:
    model: with the format of stored weights; a plain one leaves them as they are.
    plain: the same with plain weights.
  """

  def __init__(self, model: Model, plain: Model, source: PlainWeights) -> None:
    self.model, self._plain, self.source = model, plain, source
    own = {*model.params, *model.buffers}
    self.stored = {path: [name for name in array_paths(path).values() if name in own] for path in plain.weight_names}

  def arrays(self) -> dict[str, ArrayMetadata]:
    """Shape and dtype of all arrays, by their paths."""
    structs = {name: self.model.struct(name) for names in self.stored.values() for name in names}
    return {name: ArrayMetadata(struct.shape, str(struct.dtype)) for name, struct in structs.items()}

  def size(self, path: str, index: Index) -> int:
    """Bytes of the arrays that stand for a piece of a plain parameter."""
    structs = [self.model.struct(name) for name in self.stored[path]]
    return sum(prod(struct.shape[len(index) :]) * struct.dtype.itemsize for struct in structs)

  def load(self, path: str, unstacked: bool = False) -> dict[str, jax.Array]:
    """The arrays of a plain parameter on their devices, stacked or one for each layer."""
    structs = {name: self.model.struct(name) for name in self.stored[path]}
    if not unstacked:
      return place(structs, ((index, partial(self.read, path, index)) for index in self.source.indices(path)))
    found, one = dict[str, jax.Array](), {name: _without_layers(struct) for name, struct in structs.items()}
    for layer, indices in groupby(sorted(self.source.indices(path)), key=itemgetter(0)):
      arrays = place(one, ((index[1:], partial(self.read, path, index)) for index in indices))
      found |= {one_layer(name, layer): array for name, array in arrays.items()}
    return found

  def read(self, path: str, index: Index) -> dict[str, np.ndarray]:
    """The arrays that stand for a piece of a plain parameter."""
    if len(self.stored[path]) == 1:
      return {path: self.source.piece(path, index)}
    format_ = self.model.execution.weight_format
    assert isinstance(format_, QuantizedFormat)
    arrays: Mapping[str, Any]
    stacked, contracted = self._plain.contracted[path]
    table = contracted == 0  # stored as the weight of a head is, but row by row
    if (codes := self.source.codes(path, index, format_.rounding)) is not None:
      arrays = codes.arrays()
    else:
      piece = self.source.piece(path, index)
      arrays = _encode_each(format_.rounding, stacked - len(index), contracted or 1, piece.T if table else piece)
    if table:
      arrays = {leaf: array.T for leaf, array in arrays.items()}
    found = {path + leaf.removeprefix("weight"): np.asarray(array) for leaf, array in arrays.items()}
    return {name: array.reshape(self.model.struct(name).shape[len(index) :]) for name, array in found.items()}


def _without_layers(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """What one layer of a stacked parameter is."""
  sharding = struct.sharding
  assert isinstance(sharding, NamedSharding)
  own = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
  return jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype, sharding=own)


def _encode_each(rounding: WeightRounding, stacked: int, contracted: int, piece: np.ndarray) -> dict[str, np.ndarray]:
  """The arrays of a piece; experts are rounded one at a time, since a layer of them may not fit a device in float32."""
  if stacked:
    each = [_encode_each(rounding, stacked - 1, contracted, one) for one in piece]
    return {leaf: np.stack([arrays[leaf] for arrays in each]) for leaf in each[0]}
  return {leaf: np.asarray(array) for leaf, array in _encode(rounding, contracted)(piece).items()}


@cache
def _encode(rounding: WeightRounding, contracted: int) -> Any:
  return jax.jit(lambda weight: rounding.encode(weight, 0, contracted))


def write_pieces(
  storage: ArrayStorage,
  weights: RoundedPieces,
  target: Path,
  request: Any,
  keys: Mapping[str, Any],
  progress: Progress,
  beside: Callable[[Path], None],
  reuse: bool = False,
) -> Path:
  """Writes a checkpoint of parameters, piece by piece, and returns its folder. Started again, it resumes.

  Args:
    request: what it is made from; a folder that was begun from something else is not continued.
    keys: the configuration that it records.
    beside: writes other files into the folder.
    reuse: a folder that was written for the same is returned as it is.
  """
  if reuse and target.exists():
    if is_written(target, weights.arrays(), request):
      return target
    raise ConfigError(
      f"save_quantized_params_path={target} is there already, with other weights than these: remove it, or name "
      "another folder."
    )
  writer = StreamWriter(storage, target, weights.arrays(), request)
  pieces = [(path, index) for path in weights.stored for index in weights.source.indices(path)]
  done, total = 0, sum(weights.size(path, index) for path, index in pieces)
  for count, (path, index) in enumerate(pieces):
    progress(count, len(pieces), done, total)
    left = [name for name in weights.stored[path] if not writer.has(name, index)]
    found = weights.read(path, index) if left else {}
    for name in left:
      writer.put(name, index, found[name])
    if not left:
      weights.source.skip(path, index)
    done += weights.size(path, index)
  weights.source.check()
  beside(writer.folder)
  progress(len(pieces), len(pieces), done, total)
  return writer.finish(0, keys)
