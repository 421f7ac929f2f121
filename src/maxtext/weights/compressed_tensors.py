"""The compressed-tensors format of Hugging Face folders, which vLLM serves: weights at rest, without multiplying out.

A linear weight [out, in] is stored as values and scales [out, in / group]. `weight_scheme` names the format in
`config.json`; `compress_values` and `Compressed` translate tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.kernels.weight_quantize import stored_shapes
from maxtext.layers.quantized_weight import WeightRounding
from maxtext.weights.quantized import Codes, TensorSource, packed_pairs, unpacked_pairs

# The format's name, and bits and type of a value.
_NAMES = {
  "int8": ("int-quantized", 8, "int"),
  "fp8": ("float-quantized", 8, "float"),
  "int4": ("pack-quantized", 4, "int"),
  "nvfp4": ("nvfp4-pack-quantized", 4, "float"),
  "mxfp4": ("mxfp4-pack-quantized", 4, "float"),
}
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "weight_shape")


def weight_scheme(rounding: WeightRounding, activations: bool, ignored: list[str]) -> dict[str, Any]:
  """`quantization_config` of `config.json`.

  Args:
    activations: inputs are rounded to the same format, with a scale for each token.
    ignored: linear modules that stay as they are.

  Raises:
    ConfigError: the format has no such weights.
  """
  name, bits, kind = _format(rounding, activations), *_NAMES[rounding.format][1:]
  strategy = "group" if rounding.block else "channel"
  weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
  weights |= {"strategy": "tensor_group" if rounding.format == "nvfp4" else strategy}
  weights |= {"group_size": rounding.block} if rounding.block else {}
  scale = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}.get(rounding.format)
  weights |= {"scale_dtype": scale} if scale else {}
  inputs = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
  targets = ["Linear", *(["Embedding"] if rounding.wants_table("embedding") else [])]
  group = {"targets": targets, "weights": weights, "input_activations": inputs if activations else None}
  return {
    "quant_method": "compressed-tensors",
    "format": name,
    "quantization_status": "compressed",
    "config_groups": {"group_0": group},
    "ignore": ignored,
  }


def _format(rounding: WeightRounding, activations: bool) -> str:
  """Its name. Integers whose inputs are not rounded are packed, whatever their bits."""
  if rounding.format not in _NAMES:
    raise ConfigError(
      f"weight_format={rounding.format} is none of compressed-tensors' formats, so it cannot be exported: "
      f"{', '.join(_NAMES)} can."
    )
  return "pack-quantized" if rounding.format == "int8" and not activations else _NAMES[rounding.format][0]


def compressed_parts(
  rounding: WeightRounding, activations: bool, shape: tuple[int, int]
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Shape and dtype of the tensors of a weight [out, in], by the endings of their names.

  Raises:
    ConfigError: the weight has a size that cannot be packed.
  """
  (outputs, inputs), stored = shape, rounding.stored
  dtypes = stored_shapes(stored, rounding.block, inputs, (outputs,))
  scales = outputs, inputs // rounding.block if rounding.block else 1
  found: dict[str, tuple[tuple[int, ...], Any]] = {"weight_scale": (scales, dtypes["weight_scale"][1])}
  if "weight_global_scale" in dtypes:
    found["weight_global_scale"] = (1,), np.float32
  if rounding.format in ("nvfp4", "mxfp4"):
    found["weight_packed"] = (outputs, inputs // 2), np.uint8
  elif _format(rounding, activations) != "pack-quantized":
    found["weight"] = shape, dtypes["weight"][1]
  elif inputs * stored.bits % 32:
    raise ConfigError(f"A weight with {inputs} inputs cannot be packed in 32 bits, as compressed-tensors has it.")
  else:
    found |= {"weight_packed": ((outputs, inputs * stored.bits // 32), "<i4"), "weight_shape": ((2,), np.int64)}
  return {part: (shape, np.dtype(dtype)) for part, (shape, dtype) in found.items()}


def compress_values(rounding: WeightRounding, activations: bool, values: np.ndarray) -> np.ndarray:
  """The values [out, in] of a weight as they are in `weight` or `weight_packed`."""
  if rounding.format in ("nvfp4", "mxfp4"):
    return packed_pairs(values, -1)
  if _format(rounding, activations) != "pack-quantized":
    return values
  bits = values.view(np.uint8)
  shifted = bits ^ np.uint8(128) if rounding.stored.bits == 8 else packed_pairs(bits & 15 ^ 8, -1)
  return np.ascontiguousarray(shifted).view("<i4")


@dataclass(frozen=True)
class Compressed:
  """A weight [out, in] of a folder in this format.

  Attributes:
    rounding: its format and block, as ours are named.
    parts: its tensors, by their names' endings.
  """

  rounding: WeightRounding
  parts: Mapping[str, TensorSource]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of what it stands for."""
    if (values := self.parts.get("weight")) is not None:
      return values.shape
    packed = self.parts["weight_packed"]
    per_item = 8 * packed.dtype.itemsize // self.rounding.stored.bits
    return packed.shape[0], packed.shape[1] * per_item

  @property
  def dtype(self) -> np.dtype:
    """Of what it stands for."""
    return np.dtype(np.float32)

  def codes(self) -> Codes:
    """What is stored."""
    scales = self.parts["weight_scale"].read()
    if self.rounding.stored.scale == "float32":
      scales = scales.astype(np.float32)
    if (values := self.parts.get("weight")) is not None:
      return Codes(self.rounding, values.read(), scales)
    packed = self.parts["weight_packed"].read()
    if packed.dtype == np.uint8:
      whole = self.parts.get("weight_global_scale")
      number = None if whole is None else whole.read().astype(np.float32).reshape(())
      return Codes(self.rounding, unpacked_pairs(packed, -1), scales, number)
    unsigned = np.ascontiguousarray(packed).view(np.uint8)
    if self.rounding.stored.bits == 8:
      return Codes(self.rounding, (unsigned ^ np.uint8(128)).view(np.int8), scales)
    return Codes(self.rounding, unpacked_pairs(unsigned, -1).astype(np.int8) - 8, scales)

  def read(self) -> np.ndarray:
    """Multiplied out."""
    return self.codes().multiplied()


def read_scheme(content: Mapping[str, Any]) -> WeightRounding | None:
  """The rounding of a `quantization_config`; None if it is not of this format.

  Raises:
    ValueError: it is, and has weights that are none of ours; the message says which.
  """
  if content.get("quant_method") != "compressed-tensors":
    return None
  groups = content.get("config_groups")
  found = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
  if len(found) != 1 or not isinstance(weights := found[0], dict):
    raise ValueError("its quantization_config has not one group of weights")
  kind, bits, block = weights.get("type"), weights.get("num_bits"), weights.get("group_size") or 0
  if type(block) is not int or block < -1:
    raise ValueError(f"its group_size {block!r} is not a number of inputs")
  block = max(block, 0)
  if not weights.get("symmetric", True):
    raise ValueError("its weights have zero points, which are not supported")
  if (strategy := weights.get("strategy")) not in (None, "group", "channel", "tensor_group"):
    raise ValueError(f"its weights have scales by {strategy!r}, which are not supported")
  for name, (_, own_bits, own_kind) in _NAMES.items():
    fixed = WeightRounding(name, 0).stored
    if (bits, kind) == (own_bits, own_kind) and (not fixed.fixed_block or fixed.block == block):
      return WeightRounding(name, block)
  raise ValueError(f"its weights of {bits} bits of type {kind!r} in groups of {block} are not supported")


def compressed_tensors(stored: Mapping[str, TensorSource], rounding: WeightRounding) -> dict[str, TensorSource]:
  """Tensors under their names without compression; others are unchanged.

  Raises:
    ValueError: parts of a weight do not fit each other.
  """
  found: dict[str, TensorSource] = {}
  for name, tensor in stored.items():
    module, _, leaf = name.rpartition(".")
    parts = {part: stored[f"{module}.{part}"] for part in ("weight", *PARTS) if f"{module}.{part}" in stored}
    if "weight_scale" not in parts or leaf not in ("weight", *PARTS):
      found[name] = tensor
    elif leaf in ("weight", "weight_packed"):
      whole = Compressed(rounding, parts)
      _check(module, whole)
      found[f"{module}.weight"] = whole
  return found


def _check(module: str, whole: Compressed) -> None:
  parts, rounding = whole.parts, whole.rounding
  values = parts.get("weight", parts.get("weight_packed"))
  assert values is not None, "who calls has found one of them"
  if len(values.shape) != 2 or 0 in values.shape:
    raise ValueError(f"{module} has values of shape {list(values.shape)}")
  (outputs, inputs), block = whole.shape, rounding.block or whole.shape[1]
  packed = "weight" not in parts
  own = np.dtype(stored_shapes(rounding.stored, rounding.block, inputs, (outputs,))["weight"][1])
  expected = np.dtype(np.uint8 if rounding.format in ("nvfp4", "mxfp4") else np.int32) if packed else own
  if values.dtype != expected or (not packed and rounding.stored.bits == 4):
    raise ValueError(f"{module} has values of dtype {values.dtype}, which are not {rounding.format}")
  scales = parts["weight_scale"].shape
  if inputs % block or scales not in ((outputs, inputs // block), *(((outputs,),) if block == inputs else ())):
    raise ValueError(f"{module} is {[outputs, inputs]} in groups of {block}, and its scales {list(scales)}")
  if rounding.stored.scale == "e4m3":
    whole_scale = parts.get("weight_global_scale")
    if whole_scale is None or whole_scale.shape not in ((), (1,)):
      raise ValueError(f"{module} has not one global scale")
    if not 0 < float(whole_scale.read().reshape(())) < float("inf"):
      raise ValueError(f"{module} has a global scale that is not a number above 0")
