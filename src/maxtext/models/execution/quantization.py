"""From keys to quantized and sparse matmuls, and to weights at rest in few bits (`layers/quantized_matmul.py`,
`layers/sparse_matmul.py`, `layers/quantized_weight.py`)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import QuantizationType
from maxtext.kernels.quantize import FORMATS, RangeCalibration
from maxtext.kernels.weight_quantize import STORED_FORMATS
from maxtext.layers.matmul_call import Site
from maxtext.layers.quantized_matmul import Operand, QuantizedMatmul
from maxtext.layers.quantized_weight import QuantizedFormat, RoundedWeights, WeightRounding
from maxtext.layers.sparse_matmul import SparseMatmul
from maxtext.layers.weight_format import PlainFormat, WeightFormat
from maxtext.models.model import Model

# Formats of the input, the weight and the gradient.
_FORMATS: dict[QuantizationType, tuple[str | None, str, str | None]] = {
  QuantizationType.INT8: ("int8", "int8", "int8"),
  QuantizationType.INT4: (None, "int4", None),
  QuantizationType.FP8: ("e4m3", "e4m3", "e5m2"),
  QuantizationType.FP8_FULL: ("e4m3", "e4m3", "e5m2"),
}
_STATIC = RangeCalibration("fixed", 224.0)
_METHODS = {
  "input": "act_quantization_calibration_method",
  "weight": "weight_quantization_calibration_method",
  "gradient": "bwd_quantization_calibration_method",
}


def quantized_matmuls(config: MaxTextConfig, mesh: Mesh, batch_shards: int) -> tuple[QuantizedMatmul, ...]:
  """The implementations that `quantization` asks for, on a mesh that splits the batch so; none without it.

  Raises:
    ConfigError: a calibration method or the file of quant_cfg_path cannot be read.
  """
  kind = config.quantization
  if not kind:
    return ()
  shards = config.quantization_local_shard_count
  common: dict[str, Any] = {
    "shards": max(config.num_slices, 1) if shards == -1 else shards,
    "batch_shards": batch_shards,
    "replicated_scales": mesh if config.replicate_quant_scale and mesh.size > 1 else None,
  }
  if kind == QuantizationType.INTMP:
    return _by_path(config, common)
  return (QuantizedMatmul(**_operands(config, *_FORMATS[kind]), **common),)


def weights_at_rest(config: MaxTextConfig, serving: bool) -> WeightFormat:
  """How weights are stored: in few bits for inference, and below adapters, where the keys say so.

  Raises:
    ConfigError: keys contradict each other.
  """
  rounding = weight_rounding(config)
  if serving:
    rounding = rounding or _rounding_of_matmuls(config)
  elif rounding is not None and config.lora_rank and config.quantization:
    raise ConfigError(
      f"weight_format={config.weight_format} below adapters (lora_rank={config.lora_rank}) is multiplied in dtype: "
      f"leave quantization={config.quantization.value} out."
    )
  stored = rounding if serving or config.lora_rank else None
  return PlainFormat() if stored is None else QuantizedFormat(stored)


def check_weight_format(config: MaxTextConfig, model: Model) -> None:
  """Raises `ConfigError` where `weight_format` finds no weight, or where a mesh splits what shares a scale, and
  `UnfitWeightError` where the embedding cannot have it."""
  if (rounding := weight_rounding(config)) is None:
    return
  execution, table = model.execution, "embedding"
  modules = {path.removesuffix("/weight") for path in model.weight_names if not path.startswith(f"{table}/")} | {"head"}
  for pattern in config.weight_format_targets:
    if pattern != table and not any(re.search(pattern, module) for module in modules):
      modules.add(table)
      raise ConfigError(f"weight_format_targets: '{pattern}' is the path of no module: {', '.join(sorted(modules))}.")
  if model.spec.tied and rounding.wants(Site("head", "head")) != rounding.wants_table(table):
    raise ConfigError("weight_format_targets: the head of this model is its embedding: name both, or neither.")
  if rounding.wants_table(table):
    rounding.check(table, model.spec.width)
  shards = execution.sharding.rules.num_shards(execution.sharding.mesh, "activation_mlp")
  experts = [path for path, axes in model.logical_axes.items() if "expert" in axes and path.endswith("/weight")]
  if shards == 1 or not experts:
    return
  if not isinstance(execution.weight_format, QuantizedFormat) or config.lora_merge_aware:
    raise ConfigError(
      f"weight_format={rounding.format} rounds the weights of experts in training, and this mesh splits them over "
      f"{shards} devices, each of which would find scales of its own: use ici_fsdp_parallelism or "
      "ici_expert_parallelism in place of tensor parallelism."
    )
  for path in experts if rounding.block else ():
    rows = model.contracted[path][0]
    scales = model.struct(f"{path}_scale").shape[rows] if f"{path}_scale" in model.logical_axes else shards
    if model.logical_axes[path][rows] == "expert_mlp" and scales % shards:
      raise ConfigError(
        f"weight_format={rounding.format}: {path} has {scales} blocks of {rounding.block} inputs, which this mesh "
        f"splits over {shards} devices: choose a smaller weight_block_size, or a mesh whose tensor axes divide them."
      )


def rounded_weights(config: MaxTextConfig, serving: bool) -> tuple[RoundedWeights, ...]:
  """Quantization-aware training for `weight_format`; none where weights are stored in it, or matmuls round to it."""
  rounding = weight_rounding(config)
  if rounding is None or serving or config.lora_rank or config.quantization:
    return ()
  return (RoundedWeights(rounding=rounding),)


_ALL_BUT_THE_HEAD = ("^(?!head)",)
# Formats whose weights a quantized matmul takes as they are stored.
_AT_REST = {QuantizationType.INT8: "int8", QuantizationType.FP8: "fp8", QuantizationType.INT4: "int4"}


def weight_rounding(config: MaxTextConfig) -> WeightRounding | None:
  """The rounding of `weight_format`; None without it."""
  name = config.weight_format
  if not name:
    return None
  stored, block = STORED_FORMATS[name], config.weight_block_size
  if block and stored.fixed_block:
    raise ConfigError(f"weight_block_size={block}: {name} has blocks of {stored.block}; leave it out.")
  if config.quantization:
    multiplied = _rounding_of_matmuls(config)
    if multiplied is None or multiplied.format != name or block > 0:
      raise ConfigError(
        f"weight_format={name} is not what quantization={config.quantization.value} multiplies by: leave weight_format "
        "out, and weights at rest have the format of quantization; or leave quantization out for weights alone."
      )
    if named := [target for target in ("embedding", "head") if target in config.weight_format_targets]:
      raise ConfigError(
        f"weight_format_targets: quantization={config.quantization.value} rounds neither the embedding nor the head: "
        f"leave '{named[0]}' out, or leave quantization out for weights alone."
      )
    return multiplied
  return rounding_of_keys(name, block, config.weight_format_targets)


def _rounding_of_matmuls(config: MaxTextConfig) -> WeightRounding | None:
  """The format at rest of the weights that `quantization` rounds; None where it depends on more than the weight."""
  name = _AT_REST.get(config.quantization) if config.quantization else None
  if name is None or config.weight_sparsity_n or config.weight_quantization_calibration_method != "absmax":
    return None
  return WeightRounding(name, 0, _ALL_BUT_THE_HEAD)


def rounds_inputs(config: MaxTextConfig) -> bool:
  """Whether `quantization` rounds the inputs of matmuls, and not their weights alone."""
  return config.quantization in _FORMATS and _FORMATS[config.quantization][0] is not None


def rounding_of_keys(weight_format: str, weight_block_size: int, targets: Sequence[str]) -> WeightRounding:
  """The rounding of these values of keys."""
  block = max(weight_block_size, 0) if weight_block_size else STORED_FORMATS[weight_format].block
  return WeightRounding(weight_format, block, tuple(targets))


def sparse_matmuls(config: MaxTextConfig) -> tuple[SparseMatmul, ...]:
  """The implementation that `weight_sparsity_n` asks for; none without it."""
  kept, block = config.weight_sparsity_n, config.weight_sparsity_m
  if kept is None or block is None:
    return ()
  start, every = config.weight_sparsity_start_step, config.weight_sparsity_update_step
  return (SparseMatmul(kept=kept, block=block, start=start, every=every),)


def _operands(config: MaxTextConfig, *formats: str | None) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for (name, key), format_ in zip(_METHODS.items(), formats, strict=True):
    try:
      calibration = RangeCalibration.parse(getattr(config, key))
    except ValueError as error:
      raise ConfigError(f"{key}: {error}.") from None
    if name == "gradient" and calibration.method == "delayed":
      raise ConfigError(f"{key}=delayed: only inputs and weights have histories; gradients are scaled by absmax.")
    if config.quantization == QuantizationType.FP8_FULL and name != "gradient" and getattr(config, key) == "absmax":
      calibration = _STATIC
    found[name] = Operand(None if format_ is None else FORMATS[format_], calibration)
  return found


def _by_path(config: MaxTextConfig, common: dict[str, Any]) -> tuple[QuantizedMatmul, ...]:
  """One implementation for each entry of quant_cfg_path; a path belongs to the first entry whose pattern it has."""
  entries = _entries(config.quant_cfg_path)
  rest = entries.pop("__default__", None)
  made: list[QuantizedMatmul] = []
  for i, (pattern, bits) in enumerate([*entries.items(), *([("", rest)] if rest is not None else [])]):
    formats = tuple(None if bits.get(key) is None else f"int{bits[key]}" for key in ("a_bits", "w_bits", "a_bits"))
    if formats[1] is not None:
      others = tuple(entries)[:i]
      made.append(
        QuantizedMatmul(f"quantization_{i}", **_operands(config, *formats), pattern=pattern, others=others, **common)
      )
  return tuple(made)


def _entries(path: str) -> dict[str, dict[str, int | None]]:
  shape = '{"__default__": {"w_bits": 8, "a_bits": 8}, "PATTERN OF PATHS": {"w_bits": 4, "a_bits": null}}'
  try:
    entries = json.loads(Path(path).read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise ConfigError(f"quant_cfg_path={path} cannot be read as JSON: {error}.") from None
  for pattern, bits in entries.items() if isinstance(entries, dict) else [("", {"": None})]:
    known = isinstance(bits, dict) and bits.keys() <= {"w_bits", "a_bits"}
    if not known or not all(value is None or (type(value) is int and value in (4, 8)) for value in bits.values()):
      raise ConfigError(f"quant_cfg_path={path}: the entry {pattern!r} must be as in {shape}.")
    try:
      re.compile(pattern)
    except re.error as error:
      raise ConfigError(f"quant_cfg_path={path}: {pattern!r} is no regular expression: {error}.") from None
  return entries
