"""Quantized tensors of safetensors files: values and scales, dequantized on read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np


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

  def read(self) -> np.ndarray:
    """Expert by expert, so that little else than the result is in memory."""
    experts, inputs, outputs = self.shape
    values = np.empty((experts, outputs, inputs), self.dtype)
    for target, packed, scale in zip(values, self.blocks.read(), self.scales.read(), strict=True):
      power = np.exp2(scale.astype(np.float32) - 127)[..., None]
      pairs = np.stack([_FP4[packed & 15], _FP4[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
      target[...] = (pairs * power).reshape(outputs, inputs)
    return values.swapaxes(1, 2)


_FP4 = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


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
