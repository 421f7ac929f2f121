"""Post-training quantization: `maxtext.quantize` and `maxtext quantize` write weights at rest in few bits."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from etils import epath

from maxtext.checkpoint.inspect import OF_THE_MODEL, read_metadata
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import CorruptCheckpointError
from maxtext.checkpoint.options import array_storage
from maxtext.checkpoint.tokenizer import SIDE_FOLDER, copy_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.configs.loader import values_and_origins
from maxtext.configs.types import Lora, Quantization, WeightsAtRest
from maxtext.configs.values import default_of
from maxtext.layers.quantized_weight import QuantizedFormat
from maxtext.models.build import abstract_model
from maxtext.models.execution.adapters import adapters
from maxtext.weights.base import parameter_reader
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.from_hugging_face import HuggingFaceWeights, copy_files, side_files
from maxtext.weights.gptq import GptqWeights, calibration_tokens
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.plain_weights import CheckpointWeights, PlainWeights, Progress, no_progress
from maxtext.weights.resolve import resolve_source
from maxtext.weights.weights_at_rest import (
  RoundedPieces,
  plain_model,
  recorded_rounding,
  rounding_at_rest,
  write_pieces,
)

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys

_LOG = logging.getLogger(__name__)
_OF_THE_COMMAND = ("lora_input_adapters_path", "save_quantized_params_path", "checkpoint_is_quantized")
# Keys that say what is stored, whatever the run had.
_OF_THE_WEIGHTS = {*OF_THE_MODEL, *Quantization.model_fields, *_OF_THE_COMMAND, "shard_mode"}


def quantize(
  source: str | os.PathLike[str],
  target: str | os.PathLike[str],
  *,
  calibration: str | os.PathLike[str] | None = None,
  embedding: bool = False,
  progress: Progress | None = None,
  strict: bool = False,
  **keys: "Unpack[ConfigKeys]",
) -> Path:
  """Writes the weights of a model at rest in few bits, rounded to nearest or by GPTQ: a checkpoint for `LLM`, decode
  and serve.

  An interrupted quantization resumes when it is started again.

  Args:
    source: a Hugging Face folder, a run folder, its checkpoints, one step, or parameters. Adapters of a LoRA run are
      merged.
    target: a folder that does not exist yet.
    calibration: a text file. With it, values are chosen by GPTQ, so that the outputs of each weight on that text change
      less; scales are those of rounding to nearest.
    embedding: rounds the embedding and the head too, beside `weight_format_targets`, given or of the run.
    progress: called with parts done, all parts, bytes done, all bytes.
    strict: makes keys without an effect an error instead of a warning.
    **keys: configuration keys: `weight_format="int4"` says what linear and expert weights of layers are rounded to;
      `weight_block_size=64`, `weight_format_targets=["layers/", "head"]`.

  Returns:
    The folder that was written.

  Raises:
    ConfigError: (a ValueError) the folders or the keys are invalid, or the weights are not those of the model.
  """
  path = os.fspath(source)
  if "://" not in path and not Path(path).expanduser().is_dir():
    raise ConfigError(f"{path} is not a folder: give that of a run, of a checkpoint or of Hugging Face.")
  given: dict[str, Any] = dict(keys)
  recorded = {} if is_hugging_face(path) else read_metadata(locate(path)).config
  if calibration is not None and recorded:  # a run is calibrated at the length that it was trained at
    given = {"max_target_length": recorded["max_target_length"]["value"], **given}
  if embedding:
    of_run = recorded.get("weight_format_targets", {}).get("value", default_of("weight_format_targets"))
    targets = given.get("weight_format_targets", of_run)
    named = targets if isinstance(targets, list) else [targets]
    given["weight_format_targets"] = list(dict.fromkeys([*named, "embedding", "head"]))
  resolved = resolve_source(path if "/" in path else f"./{path}", given, strict)
  text = None if calibration is None else Path(calibration)
  kept = {key: entry for key, entry in recorded.items() if key not in given.keys() | _OF_THE_WEIGHTS}
  written = write_quantized_params(
    resolved.config, Path(target), resolved.origins, progress or no_progress, text, kept=kept
  )
  size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
  _LOG.info(f"{written}: {size / 1e9:.3g} GB at rest, for maxtext serve, decode and LLM")
  return written


def save_quantized_params(config: MaxTextConfig) -> MaxTextConfig:
  """Writes the weights to `save_quantized_params_path`, unless an earlier start did, and returns the configuration that
  reads them there."""
  if config.lora_rank:
    raise ConfigError(
      f"save_quantized_params_path={config.save_quantized_params_path}: a checkpoint of weights at rest has no "
      "adapters; maxtext quantize merges them."
    )
  target = Path(config.save_quantized_params_path).expanduser()
  path = write_quantized_params(config, target, {}, no_progress, reuse=True)
  return config.model_copy(update={"load_parameters_path": str(path), "source_checkpoint_layout": "orbax"})


def write_quantized_params(
  config: MaxTextConfig,
  target: Path,
  origins: Mapping[str, str],
  progress: Progress,
  calibration: Path | None = None,
  reuse: bool = False,
  kept: Mapping[str, Any] | None = None,
) -> Path:
  """Writes the parameters of `load_parameters_path` in the format in which a server would store them, by GPTQ where
  there is a calibration text. With `reuse`, a folder that was written from the same is left as it is. `kept` are
  entries of the run's own record, such as its data, with which the folder is evaluated."""
  if config.lora_input_adapters_path:
    raise ConfigError(
      f"lora_input_adapters_path={config.lora_input_adapters_path}: maxtext quantize merges adapters of a LoRA run, "
      "not of a folder; merge them with PEFT first, or serve them beside the base (maxtext serve --lora)."
    )
  if config.weight_sparsity_n:
    raise ConfigError(
      f"weight_sparsity_n={config.weight_sparsity_n}: weights at rest have no masks of N:M sparsity; serve the run."
    )
  reset = (*Lora.model_fields, *_OF_THE_COMMAND, "load_parameters_path", "source_checkpoint_layout")
  merged = config.model_copy(update={key: default_of(key) for key in reset})
  model, path = abstract_model(merged, serving=True), config.load_parameters_path
  if not isinstance(model.execution.weight_format, QuantizedFormat):
    raise ConfigError("Nothing says to what weights are rounded: set weight_format, or quantization=int8, fp8 or int4.")
  rounding = recorded_rounding(model.execution.weight_format.rounding)
  values = values_and_origins(merged.model_copy(update=rounding), origins) | dict(kept or {})
  try:
    source, made_from, beside = _source(config, merged)
    pieces = RoundedPieces(model, plain_model(model), source)
    if calibration is not None:
      chosen = _by_gptq(config, pieces, calibration)
      pieces, made_from = RoundedPieces(model, plain_model(model), chosen), (made_from, chosen.identity)
    request = made_from, rounding
    return write_pieces(array_storage(config), pieces, target, request, values, progress, beside, reuse)
  except CorruptCheckpointError as damage:
    raise RunError(f"{path} is damaged: {damage}.") from None


def _by_gptq(config: MaxTextConfig, pieces: RoundedPieces, calibration: Path) -> GptqWeights:
  if config.lora_rank:
    raise ConfigError(
      f"lora_rank={config.lora_rank}: GPTQ calibrates plain weights: merge the adapters first (maxtext convert to-hf)."
    )
  usual = {key: default_of(key) for key in (*WeightsAtRest.model_fields, "quantization", "ragged_buffer_factor")}
  every_token = {"sparse_matmul": True, "use_random_routing": False}  # reaches its experts, as in a server
  plain = config.model_copy(update=usual | every_token)
  rounded = [path for path, arrays in pieces.stored.items() if len(arrays) > 1 and path.endswith("/weight")]
  return GptqWeights(plain, pieces.source, plain_model(pieces.model), rounded, calibration_tokens(plain, calibration))


def _source(config: MaxTextConfig, merged: MaxTextConfig) -> tuple[PlainWeights, Any, Callable[[Path], None]]:
  """The weights, what identifies them, and what copies the files beside them, such as the tokenizer."""
  path = config.load_parameters_path
  if config.source_checkpoint_layout == "safetensors":
    folder = HuggingFaceFolder(path)
    source = HuggingFaceWeights.of(config, abstract_model(merged), folder)
    return source, folder.fingerprint(), lambda target: copy_files(side_files(folder), target / SIDE_FOLDER)
  model, lora = abstract_model(config), adapters(config)
  reader = parameter_reader(config, model, locate(path))
  if (rounding := rounding_at_rest(reader)) is not None and lora is None:
    raise ConfigError(f"{path} is at rest in {rounding.format} already: that is not rounded again.")
  weights = CheckpointWeights(model, reader, rounding, lora)
  request = reader.metadata.to_json()["digest"], str(lora)
  return weights, request, lambda target: copy_tokenizer(path, epath.Path(target))
