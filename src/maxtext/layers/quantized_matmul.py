"""Quantized training: an implementation of the matmul seam whose three passes multiply operands of few bits.

Each operand is rounded (`kernels/quantize.py`) with one scale per row or channel that is not contracted, multiplied in
its format, and the result is multiplied by both scales. Gradients pass rounding as if it were not there
(straight-through).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.grouped_matmul import group_of_each_row
from maxtext.kernels.quantize import ABSMAX, NumberFormat, Quantized, RangeCalibration, dequantize, quantize
from maxtext.layers.matmul import Matmul, each_pass
from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import Buffer, ParamFactory, UpdateStatistic
from maxtext.layers.quantized_weight import QuantizedFormat
from maxtext.layers.weight_format import StoredWeight


@dataclass(frozen=True)
class Operand:
  """How one operand is rounded; a `format` of None leaves it as it is."""

  format: NumberFormat | None = None
  calibration: RangeCalibration = ABSMAX


@dataclass(frozen=True)
class QuantizedMatmul(Matmul):
  """Rounds the operands of linear layers and experts. Routers, the head, convolutions and attention stay as they are.

  Attributes:
    input, weight: of the forward pass, and of the gradient of the other one.
    gradient: of the output's gradient.
    pattern, others: it applies to modules whose path the pattern finds, and none of the others does.
    shards: at least so many parts of the batch each have their own scale in the weight gradient of linear layers.
    replicated_scales: the mesh on which scales are replicated rather than sharded; None leaves it to XLA.
  """

  name: str = "quantization"
  input: Operand = Operand()
  weight: Operand = Operand()
  gradient: Operand = Operand()
  pattern: str = ""
  others: tuple[str, ...] = ()
  shards: int = 1
  replicated_scales: Mesh | None = None

  def wants(self, site: Site) -> bool:
    """Linear layers and experts on paths of the pattern."""
    if site.role not in ("linear", "experts") or not re.search(self.pattern, site.path):
      return False
    return not any(re.search(other, site.path) for other in self.others)

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """For each operand with delayed scaling, the largest magnitude of this update, and those of earlier ones."""
    made = {}
    for name, operand in self._delayed.items():
      steps = int(operand.calibration.value)
      made[f"{name}_amax"] = factory(f"{name}_amax", (), (), kind=UpdateStatistic, dtype=jnp.float32, combine="max")
      made[f"{name}_history"] = factory(f"{name}_history", (steps,), (None,), kind=Buffer, dtype=jnp.float32)
    return made

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result, rounded in all three passes. A weight that is stored in few bits is multiplied as it is stored."""
    if isinstance(weight, StoredWeight):
      return self._with_stored(call, own, next_, x, weight)
    ranges = {
      name: _observe(own, name, value) for name, value in (("input", x), ("weight", weight)) if name in self._delayed
    }
    call = dataclasses.replace(call, ranges=(ranges.get("input"), ranges.get("weight")))
    return each_pass(self._pass, call, next_, x, weight)

  def end_update(self, site: Site, own: Mapping[str, nnx.Variable], weight: nnx.Variable | None) -> None:
    """Moves the largest magnitudes of the update into the histories."""
    for name in self._delayed:
      past = own[f"{name}_history"]
      past.set_value(jnp.concatenate([own[f"{name}_amax"][...][..., None], past[...][..., :-1]], -1))

  def _with_stored(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: StoredWeight
  ) -> jax.Array:
    assert isinstance(weight.format, QuantizedFormat)
    if self.input.format is None:
      return next_(call, x, weight)
    right = weight.format.operand(call, x, weight.arrays)
    a, b, result = call.terms
    amax = _observe(own, "input", x) if "input" in self._delayed else None
    left = self._rounded(x, self.input, [a.index(c) for c in a if c in b and c not in result], amax, call)
    assert isinstance(left, Quantized)
    return _product(call, left, right).astype(call.dtype or x.dtype)

  @property
  def _delayed(self) -> dict[str, Operand]:
    operands = {"input": self.input, "weight": self.weight}
    return {name: one for name, one in operands.items() if one.format and one.calibration.method == "delayed"}

  def _pass(self, call: MatmulCall, next_: Next, first: jax.Array, second: jax.Array) -> jax.Array:
    of_input, of_weight = call.ranges
    (by_first, amax), (by_second, other) = {
      "forward": ((self.input, of_input), (self.weight, of_weight)),
      "input_gradient": ((self.gradient, None), (self.weight, of_weight)),
      "weight_gradient": ((self.input, of_input), (self.gradient, None)),
    }[call.site.pass_]
    dtype = call.dtype or first.dtype
    a, b, result = call.terms
    contracted, split = "", 1
    if call.site.pass_ == "weight_gradient" and call.group_sizes is None and by_first.format and by_second.format:
      sizes = {c: size for c, size in zip(a, first.shape, strict=True) if c in b and c not in result}
      contracted, split = _parts(self.shards, sizes)
    if split > 1:
      (a, first), (b, second) = (_split(t, v, contracted, split) for t, v in ((a, first), (b, second)))
      call, result = dataclasses.replace(call, contraction=f"{a},{b}->S{result}"), f"S{result}"
    shared = [c for c in a if c in b and c not in result]
    left = self._rounded(first, by_first, [a.index(c) for c in shared], amax, call)
    right = self._rounded(second, by_second, [b.index(c) for c in shared], other, call)
    if isinstance(left, Quantized) and isinstance(right, Quantized):
      out = _product(call, left, right)
    else:
      out = next_(call, *(dequantize(v, dtype) if isinstance(v, Quantized) else v for v in (left, right)))
    return (out.sum(0) if split > 1 else out).astype(dtype)

  def _rounded(
    self, x: jax.Array, operand: Operand, shared: list[int], amax: jax.Array | None, call: MatmulCall
  ) -> jax.Array | Quantized:
    if operand.format is None:
      return x
    found = quantize(x, operand.format, shared, operand.calibration, amax)
    if self.replicated_scales is None or call.site.role == "experts":  # experts run inside shard_map
      return found
    everywhere = NamedSharding(self.replicated_scales, PartitionSpec())
    return found._replace(scale=jax.lax.with_sharding_constraint(found.scale, everywhere))


def _observe(own: Mapping[str, nnx.Variable], name: str, x: jax.Array) -> jax.Array:
  """The range from earlier updates, or of this one where there was none; notes the range of this one."""
  now = jnp.max(jnp.abs(jax.lax.stop_gradient(x))).astype(jnp.float32)
  noted = own[f"{name}_amax"]
  noted.set_value(jnp.maximum(noted[...], now))
  past = jnp.max(own[f"{name}_history"][...])
  return jnp.where(past > 0, past, now)


# An int32 holds the sum of so many products of two int8 values.
_MOST_SUMMED = 2**31 // 128**2


def _parts(shards: int, sizes: Mapping[str, int]) -> tuple[str, int]:
  """Which contracted dimension is split, and into how many parts: at least those asked for, and as many as it takes for
  sums to fit an int32. ("", 1) if none is."""
  least = max(shards, -(-math.prod(sizes.values()) // _MOST_SUMMED))
  for letter, size in sizes.items() if least > 1 else ():
    if parts := next((parts for parts in range(least, size + 1) if size % parts == 0), 0):
      return letter, parts
  return "", 1


def _split(letters: str, x: jax.Array, letter: str, parts: int) -> tuple[str, jax.Array]:
  """The dimension of a letter in two: S of this many parts, and the rest."""
  axis = letters.index(letter)
  x = x.reshape(*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
  return letters.replace(letter, "S" + letter), x


def _product(call: MatmulCall, left: Quantized, right: Quantized) -> jax.Array:
  """The product in float32: of the values in their format, times both scales."""
  a, b, result = call.terms
  total: Any = jnp.float32
  if all(jnp.issubdtype(v.values.dtype, jnp.integer) for v in (left, right)):
    total = jnp.int32
    if left.values.dtype != right.values.dtype:  # four bits times eight
      left, right = (v._replace(values=v.values.astype(jnp.int8)) for v in (left, right))
  if call.group_sizes is None:
    values = _einsum(a, b, result, left.values, right.values, total)
    scales = [_arrange(left.scale, a, result), _arrange(right.scale, b, result)]
  else:
    assert call.kernel is not None
    sizes, rows = call.group_sizes, left.values.shape[0]
    if call.site.pass_ == "weight_gradient":
      values = call.kernel.quantized_weights_gradient(left.values, right.values, sizes, total)
      scales = [left.scale.reshape(1, -1, 1), right.scale.reshape(1, 1, -1)]
    else:
      by_input = call.site.pass_ == "input_gradient"
      weights, scale = (v.swapaxes(1, 2) if by_input else v for v in right)
      values = call.kernel.quantized(left.values, weights, sizes, total)
      scales = [left.scale, scale[:, 0] if scale.shape[0] == 1 else scale[:, 0][group_of_each_row(sizes, rows)]]
  return values.astype(jnp.float32) * scales[0] * scales[1]


def _einsum(a: str, b: str, result: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
  """As `jnp.einsum`, which would convert operands of two formats to one."""
  batch = [c for c in a if c in b and c in result]
  shared = [c for c in a if c in b and c not in result]
  numbers = (
    ([a.index(c) for c in shared], [b.index(c) for c in shared]),
    ([a.index(c) for c in batch], [b.index(c) for c in batch]),
  )
  made = [*batch, *(c for c in a if c not in b), *(c for c in b if c not in a)]
  out = jax.lax.dot_general(x, y, numbers, preferred_element_type=dtype)
  return out.transpose([made.index(c) for c in result])


def _arrange(scale: jax.Array, letters: str, result: str) -> jax.Array:
  """A scale with the dimensions of an operand, as it multiplies the result."""
  kept = [c for c in result if c in letters]
  scale = scale.squeeze([i for i, c in enumerate(letters) if c not in result])
  scale = scale.transpose([[c for c in letters if c in result].index(c) for c in kept])
  return jnp.expand_dims(scale, [i for i, c in enumerate(result) if c not in letters])
