"""The base of a run of adapters, which its checkpoints name and do not hold: where it is, and whether it is it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from maxtext.checkpoint.checksum import checksum_of_part, checksums_of_all
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import ArrayMetadata, Base, CheckpointMetadata, CorruptCheckpointError
from maxtext.checkpoint.restore import readable
from maxtext.checkpoint.stream import Index, StreamReader
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.distributed.multihost import any_process
from maxtext.layers.quantized_weight import QuantizedFormat, is_scale
from maxtext.layers.weight_format import PlainFormat
from maxtext.models.model import Model
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.from_hugging_face import HuggingFaceWeights, load_from_hugging_face
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.plain_weights import CheckpointWeights, PlainWeights
from maxtext.weights.weights_at_rest import RoundedPieces, load_rounded, load_stored, plain_model, rounding_at_rest


def describe_base(path: str, arrays: Mapping[str, jax.Array]) -> Base:
  """What checkpoints keep of the weights in a folder, which the run holds as `arrays`; where the folder itself holds
  adapters, of their base. A run's folder means its latest step, which is another one later, so the step is kept."""
  hugging_face = is_hugging_face(path)
  where = Path(path).expanduser().absolute() if hugging_face else locate(path)
  if not hugging_face and (base := readable(epath.Path(where)).base) is not None:
    return base
  described = {name: ArrayMetadata(array.shape, str(array.dtype)) for name, array in arrays.items()}
  return Base(str(where), described, checksums_of_all(arrays))


def load_base(
  config: MaxTextConfig, model: Model, folder: epath.Path, base: Base, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Those arrays of the base of the checkpoint in `folder`, on their devices.

  Raises:
    ConfigError: the base is gone, or is not what the adapters were trained on.
  """
  base = find_base(config, folder, base)
  if rounds_base(model, base):
    plain = plain_model(model)
    found = load_rounded(model, plain, CheckpointWeights(plain, _AdaptedReader(folder, base, config, model)))
    return {name: found[name] for name in wanted}
  if is_hugging_face(base.path):
    loaded = load_from_hugging_face(config, model, base.path)
  else:
    loaded = load_stored(config, model, "the base", base.path, wanted)
  arrays = {name: loaded[name] for name in wanted}
  _refuse_another(folder, base, checksums_of_all(arrays))
  return arrays


def rounds_base(model: Model, base: Base) -> bool:
  """Whether a model stores weights in few bits that the run of the adapters held plainly."""
  return isinstance(model.execution.weight_format, QuantizedFormat) and not any(map(is_scale, base.arrays))


def find_base(config: MaxTextConfig, folder: epath.Path, base: Base) -> Base:
  """The base of the checkpoint in `folder`, at the path where it is now: where it was, or else, for one that was moved,
  where `load_parameters_path` says."""
  for path in (base.path, config.load_parameters_path):
    if path and not any_process(not _has_weights(path)):
      return replace(base, path=path)
  raise ConfigError(
    f"{folder} holds LoRA adapters, and their base {base.path} is gone: put it back there, or a link to it; a run that "
    "resumes also takes it from load_parameters_path."
  )


def parameter_reader(config: MaxTextConfig, model: Model, folder: epath.Path) -> StreamReader:
  """Reads the parameters of a checkpoint a piece at a time; for one of adapters, those of its base too."""
  reader = StreamReader(folder)
  base = reader.metadata.base
  return reader if base is None else _AdaptedReader(folder, find_base(config, folder, base), config, model)


class _AdaptedReader(StreamReader):
  """A checkpoint of adapters, together with its base."""

  def __init__(self, folder: epath.Path, base: Base, config: MaxTextConfig, model: Model) -> None:
    super().__init__(folder)
    self._base = base
    self._weights = self._base_reader(config, model)

  def _base_reader(self, config: MaxTextConfig, model: Model) -> "StreamReader | _Pieces":
    """Reads the base as the run held it: plain weights, or weights in few bits that the base may hold plainly."""
    path, plain, rounding = self._base.path, plain_model(model), rounding_at_rest(self)
    reader = None if is_hugging_face(path) else StreamReader(locate(path))
    if reader is not None and (rounding is None or rounding_at_rest(reader) is not None):
      return reader
    source: PlainWeights
    if reader is None:
      source = HuggingFaceWeights.of(config, plain, HuggingFaceFolder(path))
    else:
      source = CheckpointWeights(plain, reader)
    format_ = PlainFormat() if rounding is None else QuantizedFormat(rounding)
    held = Model.of(model.spec, plain.execution.replace(weight_format=format_))
    return _Pieces(RoundedPieces(held, plain, source))

  @property
  def parameters(self) -> Collection[str]:
    return {*super().parameters, *self._base.arrays}

  def stored_shape(self, name: str) -> tuple[int, ...]:
    return self._base.arrays[name].shape if name in self._base.arrays else super().stored_shape(name)

  def shapes(self, name: str, struct: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]:
    if name not in self._base.arrays:
      return super().shapes(name, struct)
    return {name: (tuple(struct.shape), self._base.arrays[name].shape)}

  def read(self, name: str, index: Index, dims: int) -> np.ndarray:
    if name not in self._base.arrays:
      return super().read(name, index, dims)
    piece = self._weights.read(name, index, dims).astype(self._base.arrays[name].dtype)
    lead, start = (1,) * len(index), (*index, *(0,) * piece.ndim)
    own, part = f"base/{name}", checksum_of_part(piece.reshape(lead + piece.shape), start)
    self._sums[own] = (self._sums.get(own, 0) + part) % 2**32
    return piece

  def check(self, sums: Mapping[str, int]) -> None:
    base = {name.removeprefix("base/"): value for name, value in sums.items() if name.startswith("base/")}
    _refuse_another(self.folder, self._base, base)
    super().check({name: value for name, value in sums.items() if not name.startswith("base/")})


class _Pieces:
  """Reads weights that are rounded as they are read, as `StreamReader` reads those of a checkpoint."""

  def __init__(self, pieces: RoundedPieces) -> None:
    self._pieces = pieces
    self._paths = {name: path for path, names in pieces.stored.items() for name in names}
    self._last: tuple[tuple[str, Index] | None, Mapping[str, np.ndarray]] = None, {}

  def read(self, name: str, index: Index, dims: int) -> np.ndarray:
    """What stands at an index into a parameter, of which the source has a piece."""
    path = self._paths[name]
    if self._last[0] != (path, index):  # the arrays of a weight are asked for one after the other
      self._last = (path, index), self._pieces.read(path, index)
    piece = self._last[1][name]
    assert piece.ndim == dims - len(index)
    return piece


def _has_weights(path: str) -> bool:
  """Whether a folder has weights of its own; damaged ones are named by who reads them."""
  if is_hugging_face(path):
    return True
  try:
    return CheckpointMetadata.read(locate(path)).base is None
  except CorruptCheckpointError:
    return True
  except ConfigError:
    return False


def _refuse_another(folder: epath.Path, base: Base, found: Mapping[str, int]) -> None:
  other = sorted(name for name, value in found.items() if value != base.checksums[name])
  if other:
    more = f" and {len(other) - 1} more differ" if len(other) > 1 else " differs"
    raise ConfigError(
      f"{base.path} is not the base that the LoRA adapters of {folder} were trained on: {other[0]}{more} from that of "
      f"fingerprint {base.fingerprint}. Put back what was there; to train on what is there now, start another run."
    )
