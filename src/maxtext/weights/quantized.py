"""Quantized tensors of safetensors files: values and scales, dequantized on read, or taken as they are (`Codes`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from maxtext.kernels.weight_quantize import E2M1_VALUES
from maxtext.layers.quantized_weight import WeightRounding


class TensorSource(Protocol):
  """A tensor that can be read."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> np.dtype: ...

  def read(self) -> np.ndarray:
    """Its values."""
    ...


@dataclass(frozen=True)
class Codes:
  """A weight as it is stored, one value after the other: [..., out, in] in files, [..., in, out] as a parameter.

  Attributes:
    rounding: its format, and the inputs that share a scale.
    values: integers, eight-bit floats, or the bits of four-bit floats.
    scales: one for each block of inputs, as the format stores them.
    whole: what scales are divided by, where the format has that.
  """

  rounding: WeightRounding
  values: np.ndarray
  scales: np.ndarray
  whole: np.ndarray | None = None

  def multiplied(self) -> np.ndarray:
    """The weight of a file in float32."""
    values = _FP4[self.values] if self.values.dtype == np.uint8 else self.values.astype(np.float32)
    scales = self.scales.astype(np.float32)
    if self.rounding.stored.scale == "e8m0":
      scales = np.exp2(scales - 127)
    if self.whole is not None:
      scales = scales * np.asarray(1 / self.whole, np.float32)
    groups = scales.reshape(*values.shape[:-1], -1)
    blocks = values.reshape(*groups.shape, -1) * groups[..., None]
    return blocks.reshape(values.shape)

  def arrays(self) -> dict[str, np.ndarray]:
    """The arrays of a parameter (`kernels/weight_quantize.py`), with the outputs as one dimension."""
    values = self.values
    if self.rounding.stored.bits == 4:
      values = packed_pairs(values.view(np.uint8) & 15, -2)
    found = {"weight": values, "weight_scale": self.scales}
    return found if self.whole is None else found | {"weight_global_scale": self.whole}


def packed_pairs(codes: np.ndarray, axis: int) -> np.ndarray:
  """Four-bit neighbours along an axis, counted from the last, in a byte, the first in the low half."""
  pairs = codes.swapaxes(axis, -1)
  return (pairs[..., ::2] | (pairs[..., 1::2] << 4)).astype(np.uint8).swapaxes(axis, -1)


def unpacked_pairs(packed: np.ndarray, axis: int) -> np.ndarray:
  """The other way."""
  pairs = packed.swapaxes(axis, -1)
  return np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1).swapaxes(axis, -1)


def unpacked_values(rounding: WeightRounding, stored: np.ndarray) -> np.ndarray:
  """`values` of `Codes` [..., in, out] from the array `weight` of a parameter."""
  if rounding.stored.bits == 8:
    return stored
  values = unpacked_pairs(stored, -2)
  return (values ^ 8).astype(np.int8) - np.int8(8) if rounding.format == "int4" else values


@dataclass(frozen=True)
class Mxfp4:
  """Four-bit numbers in blocks of 32 with a power of two each, of every expert.

  Pairs [E, out, in/32, 16] and powers [E, out, in/32] stand for [E, in, out] in bfloat16, which has all these values.
  """

  blocks: TensorSource
  scales: TensorSource

  @property
  def shape(self) -> tuple[int, ...]:
    """Of what it stands for."""
    experts, outputs, groups, pairs = self.blocks.shape
    return experts, groups * pairs * 2, outputs

  @property
  def dtype(self) -> np.dtype:
    """Of what it stands for."""
    return np.dtype(ml_dtypes.bfloat16)

  def codes(self) -> Codes:
    """What is stored, with inputs last."""
    experts, inputs, outputs = self.shape
    values = unpacked_pairs(self.blocks.read(), -1).reshape(experts, outputs, inputs)
    return Codes(WeightRounding("mxfp4", 32), values, self.scales.read())

  def read(self) -> np.ndarray:
    """Expert by expert, so that little else than the result is in memory."""
    experts, inputs, outputs = self.shape
    values = np.empty((experts, outputs, inputs), self.dtype)
    for target, packed, scale in zip(values, self.blocks.read(), self.scales.read(), strict=True):
      power = np.exp2(scale.astype(np.float32) - 127)[..., None]
      pairs = np.stack([_FP4[packed & 15], _FP4[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
      target[...] = (pairs * power).reshape(outputs, inputs)
    return values.swapaxes(1, 2)


_FP4 = np.array(E2M1_VALUES, np.float32)


@dataclass(frozen=True)
class BlockScaled:
  """Eight-bit floats [out, in] with a scale for each block of rows and columns."""

  values: TensorSource
  scales: TensorSource
  block: tuple[int, int]

  @property
  def shape(self) -> tuple[int, ...]:
    """As the file has it."""
    return self.values.shape

  @property
  def dtype(self) -> np.dtype:
    """Of what it stands for."""
    return np.dtype(np.float32)

  def codes(self) -> Codes | None:
    """What is stored, with the scale of a block repeated for each of its rows; None if inputs end within a block."""
    (height, width), (rows, columns) = self.block, self.shape
    if columns % width:
      return None
    scales = np.repeat(np.asarray(self.scales.read(), np.float32), height, 0)[:rows]
    return Codes(WeightRounding("fp8", width), self.values.read(), scales)

  def read(self) -> np.ndarray:
    """Multiplied a row of blocks at a time."""
    (height, width), columns = self.block, self.shape[1]
    result = np.asarray(self.values.read(), np.float32)
    for row, scale in enumerate(np.asarray(self.scales.read(), np.float32)):
      result[row * height : (row + 1) * height] *= np.repeat(scale, width)[:columns]
    return result


def dequantize_tensors(stored: Mapping[str, TensorSource], block: tuple[int, int]) -> dict[str, TensorSource]:
  """Tensors under their names without quantization; plain tensors are unchanged.

  Args:
    stored: the tensors of the files.
    block: rows and columns that share a scale in 8-bit tensors.
  """
  found: dict[str, TensorSource] = {}
  for name, tensor in stored.items():
    if name.endswith("_blocks") and (scales := stored.get(f"{name.removesuffix('_blocks')}_scales")):
      if len(tensor.shape) != 4 or tensor.shape[:-1] != scales.shape:
        raise ValueError(f"{name} is {list(tensor.shape)} and its scales {list(scales.shape)}")
      found[name.removesuffix("_blocks")] = Mxfp4(tensor, scales)
    elif scales := stored.get(f"{name}_scale_inv"):
      if not (len(block) == len(tensor.shape) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(f"{name} is {list(tensor.shape)} in blocks of {list(block)}")
      if scales.shape != tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=True)):
        raise ValueError(f"{name} is {list(tensor.shape)} in blocks of {list(block)}, its scales {list(scales.shape)}")
      found[name] = BlockScaled(tensor, scales, block)
    elif not _is_scale(name, stored):
      found[name] = tensor
  return found


def _is_scale(name: str, stored: Mapping[str, TensorSource]) -> bool:
  return any(
    name.endswith(scale) and name.removesuffix(scale) + values in stored
    for scale, values in {"_scales": "_blocks", "_scale_inv": ""}.items()
  )
