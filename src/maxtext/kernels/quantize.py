"""Rounding to few bits: the one place where numbers are rounded to a format.

A quantized array is values of a narrow dtype and a scale, `x ~ values * scale`. The arithmetic is float32, whatever the
dtype of x, so that training, conversion and the engine round alike. Scales are those of qwix and of compressed-tensors,
and so are values, but for the lowest integer (-128, -8), which is not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Method = Literal["absmax", "rms", "fixed", "delayed"]


@dataclass(frozen=True)
class NumberFormat:
  """What a value is rounded to.

  Attributes:
    dtype: of the stored values.
    bound: to which the largest value is scaled. That of integers is half a step above the largest one, so that the last
      step is as wide as the others.
  """

  dtype: Any
  bound: float

  @property
  def is_integer(self) -> bool:
    """Whether its products are summed in integers."""
    return jnp.issubdtype(self.dtype, jnp.integer)


FORMATS = {
  "int8": NumberFormat(jnp.int8, 127.5),
  "int4": NumberFormat(jnp.int4, 7.5),
  "e4m3": NumberFormat(jnp.float8_e4m3fn, 448.0),
  "e5m2": NumberFormat(jnp.float8_e5m2, 57344.0),
}


@dataclass(frozen=True)
class RangeCalibration:
  """How the range that a scale covers is found.

  Attributes:
    method: `absmax` is the largest magnitude along the shared axes, `rms` a multiple of their root mean square, `fixed`
      a constant, and `delayed` the largest magnitude of earlier steps, which the caller keeps.
    value: the factor of absmax and rms, the bound of fixed, or the number of steps of delayed.
  """

  method: Method = "absmax"
  value: float = 1.0

  @staticmethod
  def parse(text: str) -> "RangeCalibration":
    """From `absmax[,factor]`, `rms,factor`, `fixed,bound`, `fixed,-bound,bound` or `delayed[,steps]`.

    Raises:
      ValueError: it is none of these; the message says what is wrong, without the key.
    """
    method, *words = text.strip().lower().split(",")
    try:
      numbers = [float(word) for word in words]
    except ValueError:
      raise ValueError(f"{text!r} has something after {method!r} that is not a number") from None
    if method == "fixed" and len(numbers) == 2:
      if numbers[0] != -numbers[1]:
        raise ValueError(f"{text!r} has bounds that are not symmetric, which would need zero points")
      numbers = numbers[1:]
    default = {"absmax": [1.0], "delayed": [16.0]}
    numbers = numbers or default.get(method, [])
    if method not in ("absmax", "rms", "fixed", "delayed") or len(numbers) != 1:
      raise ValueError(f"{text!r} is none of 'absmax', 'absmax,0.9', 'rms,7', 'fixed,-224,224' and 'delayed,16'")
    if not 0 < numbers[0] < float("inf"):
      raise ValueError(f"{text!r} needs a number above 0")
    if method == "delayed" and (numbers[0] % 1 or numbers[0] > 1024):
      raise ValueError(f"{text!r} needs a whole number of steps up to 1,024")
    return RangeCalibration(method, numbers[0])  # type: ignore[arg-type]


ABSMAX = RangeCalibration()


class Quantized(NamedTuple):
  """Rounded values, and their scale in float32, which has the same number of dimensions and 1 where it is shared."""

  values: jax.Array
  scale: jax.Array


def quantize(
  x: jax.Array,
  format_: NumberFormat,
  shared: Sequence[int],
  calibration: RangeCalibration = ABSMAX,
  amax: jax.Array | None = None,
) -> Quantized:
  """Rounds to the nearest value of the format.

  Args:
    shared: dimensions along which one scale is used.
    amax: the range itself, which can be broadcast to x; needed for `delayed`.
  """
  wide = x.astype(jnp.float32)
  if amax is None:
    amax = _range(wide, tuple(shared), calibration)
  scale = amax / format_.bound
  scale = jnp.where(scale < jnp.sqrt(jnp.finfo(jnp.float32).tiny), 1.0, scale)
  scale = jnp.broadcast_to(scale, (1,) * (x.ndim - scale.ndim) + scale.shape)
  return Quantized(round_to(wide / scale, format_), scale)


def dequantize(array: Quantized, dtype: Any) -> jax.Array:
  """The array again, less what rounding lost."""
  return (array.values.astype(jnp.float32) * array.scale).astype(dtype)


def round_to(x: jax.Array, format_: NumberFormat) -> jax.Array:
  """Values in units of the scale, rounded half to even and cut at the ends of the format, which are symmetric.

  The largest value of a scale is exactly half a step beyond the last integer. Were -128 allowed, the last bit of a
  division would decide whether it is that or -127, and a mesh would not compute what one device does.
  """
  if format_.is_integer:
    most = float(jnp.iinfo(format_.dtype).max)
    return jnp.clip(jnp.round(x), -most, most).astype(format_.dtype)
  most = float(jnp.finfo(format_.dtype).max)
  return jnp.clip(x, -most, most).astype(format_.dtype)


def _range(x: jax.Array, shared: tuple[int, ...], calibration: RangeCalibration) -> jax.Array:
  if calibration.method == "fixed":
    return jnp.full((1,) * x.ndim, calibration.value, jnp.float32)
  if calibration.method == "rms":
    return calibration.value * jnp.sqrt(jnp.mean(jnp.square(x), shared, keepdims=True))
  assert calibration.method == "absmax", "the caller of a delayed calibration knows the range"
  return calibration.value * jnp.max(jnp.abs(x), shared, keepdims=True)
