"""Weights at rest in few bits: a weight as packed values and scales, and back.

A weight is [F, ...] here: all contracted dimensions as one, then the outputs. One scale serves a channel, or a block of
consecutive rows of it. Four-bit values are packed in pairs of rows, the earlier one in the low half of a byte. Rounding
is that of `quantize.py`, so that a weight that is stored is the one that a quantized training step multiplied by.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.quantize import FORMATS, NumberFormat, quantize, round_to

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class StoredFormat:
  """A format of weights at rest.

  Attributes:
    number: what values are rounded to.
    bits: of a stored value; two of 4 bits share a byte.
    block: rows that share a scale; 0 is all of them.
    fixed_block: the format has no other block.
    scale: how scales are stored: in float32; as a power of two in a byte (e8m0); or as e4m3, to be divided by one
      float32 number of the whole weight, its global scale.
  """

  number: NumberFormat
  bits: Literal[4, 8]
  block: int = 0
  fixed_block: bool = False
  scale: Literal["float32", "e8m0", "e4m3"] = "float32"


# The quantiles of a normal distribution that QLoRA rounds to (Dettmers et al. 2023, appendix E).
_NF4_VALUES = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Values of these two are indices into a table.
_E2M1 = NumberFormat(jnp.uint8, 6.0)
_NF4 = NumberFormat(jnp.uint8, 1.0)

STORED_FORMATS: dict[str, StoredFormat] = {
  "int8": StoredFormat(FORMATS["int8"], 8),
  "int4": StoredFormat(FORMATS["int4"], 4, block=128),
  "fp8": StoredFormat(FORMATS["e4m3"], 8),
  "nf4": StoredFormat(_NF4, 4, block=64),
  "mxfp4": StoredFormat(_E2M1, 4, block=32, fixed_block=True, scale="e8m0"),
  "nvfp4": StoredFormat(_E2M1, 4, block=16, fixed_block=True, scale="e4m3"),
}


def stored_shapes(
  format_: StoredFormat, block: int, rows: int, outputs: tuple[int, ...]
) -> dict[str, tuple[tuple[int, ...], Any]]:
  """Shape and dtype of each array of a weight [rows, outputs], by name."""
  per_byte = 8 // format_.bits
  scales = (1 if block == 0 else rows // block, *outputs)
  found: dict[str, tuple[tuple[int, ...], Any]] = {
    "weight": ((rows // per_byte, *outputs), jnp.uint8 if per_byte > 1 else format_.number.dtype),
    "weight_scale": (scales, {"float32": jnp.float32, "e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn}[format_.scale]),
  }
  if format_.scale == "e4m3":
    found["weight_global_scale"] = ((), jnp.float32)
  return found


def encode(weight: jax.Array, format_: StoredFormat, block: int) -> dict[str, jax.Array]:
  """The arrays of a weight [F, ...], by name."""
  blocks = _in_blocks(weight.astype(jnp.float32), weight.shape[0], block)
  values, scales = _SCALES[format_.scale](blocks, format_)
  values = values.reshape(weight.shape)
  return {"weight": _packed(values, format_), **scales}


def decode(arrays: Arrays, format_: StoredFormat, block: int, dtype: Any) -> jax.Array:
  """The weight [F, ...] again, less what rounding lost."""
  if format_.bits == 8:
    return _multiplied(arrays["weight"].astype(jnp.float32), arrays, format_, block).astype(dtype)
  pairs = jnp.stack(decode_pairs(arrays, format_, block, dtype), 1)
  return pairs.reshape(-1, *pairs.shape[2:])


def decode_pairs(arrays: Arrays, format_: StoredFormat, block: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """The even rows of a weight of four bits [F/2, ...], and the odd ones.

  Each is an elementwise function of what is stored, so a compiler can make it part of a matmul; rows in their order
  would be written to memory first. Scales of blocks are multiplied by in bfloat16 where that is the dtype: the TPU's
  compiler writes them out if it has to broadcast them in float32, and what bfloat16 loses of a scale is a fraction of
  what four bits lose.
  """
  stored, wide = arrays["weight"], jnp.bfloat16 if block and dtype == jnp.bfloat16 else jnp.float32
  even, odd = (
    _multiplied(_values(codes, format_).astype(wide), arrays, format_, block // 2).astype(dtype)
    for codes in (stored & 15, stored >> 4)
  )
  return even, odd


def row_scales(scales: Arrays, format_: StoredFormat, block: int, rows: int) -> jax.Array:
  """What the values of each row are multiplied by, [F, ...]."""
  return jnp.repeat(_float32_scale(scales, format_), block or rows, axis=0)


def _float32_scale(arrays: Arrays, format_: StoredFormat) -> jax.Array:
  if format_.scale == "e8m0":
    return _power_of_two(arrays["weight_scale"])
  scale = arrays["weight_scale"].astype(jnp.float32)
  return scale * (1 / arrays["weight_global_scale"]) if format_.scale == "e4m3" else scale


def nearest(x: jax.Array, format_: StoredFormat) -> jax.Array:
  """Values in units of the scale, as the nearest of the format, one to an element: four-bit floats as their bits."""
  if format_.number is _NF4:
    return _nearest_nf4(x)
  return _nearest_e2m1(x) if format_.number is _E2M1 else round_to(x, format_.number)


def values_of(codes: jax.Array, format_: StoredFormat) -> jax.Array:
  """What `nearest` found, in float32."""
  table = {_NF4: _NF4_VALUES, _E2M1: E2M1_VALUES}.get(format_.number)
  return codes.astype(jnp.float32) if table is None else _look_up(codes, table)


def _in_blocks(x: jax.Array, rows: int, block: int) -> jax.Array:
  size = block or rows
  return x.reshape(rows // size, size, *x.shape[1:])


def _float32_scales(blocks: jax.Array, format_: StoredFormat) -> tuple[jax.Array, dict[str, jax.Array]]:
  if format_.number is _NF4:
    largest = jnp.max(jnp.abs(blocks), 1, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest)
    return nearest(blocks / scale, format_), {"weight_scale": scale[:, 0]}
  found = quantize(blocks, format_.number, (1,))
  return found.values, {"weight_scale": found.scale[:, 0]}


_E8M0_BIAS = 127


def _power_of_two_scales(blocks: jax.Array, format_: StoredFormat) -> tuple[jax.Array, dict[str, jax.Array]]:
  """As the MX specification has it: the exponent of the largest magnitude less that of the largest value, which is 2.
  Magnitudes beyond that value are cut."""
  largest = jnp.max(jnp.abs(blocks), 1)
  _, exponent = jnp.frexp(largest)  # largest = m 2^exponent with m in [0.5, 1)
  stored = jnp.clip(jnp.where(largest > 0, exponent - 1 - 2, 0) + _E8M0_BIAS, 0, 254).astype(jnp.uint8)
  scale = _power_of_two(stored)
  stored = jnp.where(jnp.isfinite(largest), stored, 255).astype(jnp.uint8)
  return nearest(blocks / scale[:, None], format_), {"weight_scale": stored}


def _power_of_two(exponents: jax.Array) -> jax.Array:
  """2 ** (e - 127) of e8m0 by its bits, which is exact; 0 for e = 0, and no number for 255."""
  return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def _two_level_scales(blocks: jax.Array, format_: StoredFormat) -> tuple[jax.Array, dict[str, jax.Array]]:
  """A scale is e4m3 over one number of the weight, by which the largest scale is the largest value of e4m3."""
  largest = jnp.max(jnp.abs(blocks), 1)
  most = jnp.max(largest)
  whole = jnp.where(most == 0, 1.0, FORMATS["e4m3"].bound * format_.number.bound / most)
  whole = jax.lax.optimization_barrier(whole)  # or XLA simplifies its inverse, and changes last bits
  stored = round_to(largest / format_.number.bound * whole, FORMATS["e4m3"])
  scale = stored.astype(jnp.float32) * (1 / whole)
  scale = jnp.where(scale == 0, 1.0, scale)  # blocks too small for a scale are zero
  return nearest(blocks / scale[:, None], format_), {"weight_scale": stored, "weight_global_scale": whole}


_SCALES: dict[str, Callable[[jax.Array, StoredFormat], tuple[jax.Array, dict[str, jax.Array]]]] = {
  "float32": _float32_scales,
  "e8m0": _power_of_two_scales,
  "e4m3": _two_level_scales,
}


def _nearest_nf4(x: jax.Array) -> jax.Array:
  """The index of the nearest entry of the table."""
  between = (np.array(_NF4_VALUES[:-1]) + np.array(_NF4_VALUES[1:])) / 2
  return sum(((x > edge).astype(jnp.uint8) for edge in between.astype(np.float32)), jnp.zeros(x.shape, jnp.uint8))


def _nearest_e2m1(x: jax.Array) -> jax.Array:
  """The bits of the nearest value, half to even; magnitudes beyond 6 are 6. (XLA does not compile its own conversion
  in every program.)"""
  size = jnp.abs(x)
  code = jnp.where(jnp.signbit(x), jnp.uint8(8), jnp.uint8(0))
  for i, (low, high) in enumerate(pairwise(E2M1_VALUES[:8])):
    edge = (low + high) / 2
    code += ((size >= edge) if i % 2 else (size > edge)).astype(jnp.uint8)
  return code


def _packed(values: jax.Array, format_: StoredFormat) -> jax.Array:
  if format_.bits == 8:
    return values
  if values.dtype != jnp.uint8:
    values = values.astype(jnp.int8).astype(jnp.uint8) & 15
  pairs = values.reshape(values.shape[0] // 2, 2, *values.shape[1:])
  return pairs[:, 0] | (pairs[:, 1] << 4)


def _values(codes: jax.Array, format_: StoredFormat) -> jax.Array:
  """Values in float32 from four bits, as they are packed."""
  integers = format_.number not in (_NF4, _E2M1)
  return values_of((codes ^ 8).astype(jnp.int8) - 8 if integers else codes, format_)


def _multiplied(values: jax.Array, arrays: Arrays, format_: StoredFormat, block: int) -> jax.Array:
  """Values [F, ...] by their scales, in the dtype of the values."""
  blocks = _in_blocks(values, values.shape[0], block)
  return (blocks * _float32_scale(arrays, format_)[:, None].astype(values.dtype)).reshape(values.shape)


def _look_up(codes: jax.Array, table: tuple[float, ...]) -> jax.Array:
  """Entries of a table of 16, by a tree of selects: a gather would read memory for each of them."""
  level: list[Any] = [jnp.float32(entry) for entry in table]
  for bit in (1, 2, 4, 8):
    odd = (codes & bit) != 0
    level = [jnp.where(odd, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
  return level[0]
