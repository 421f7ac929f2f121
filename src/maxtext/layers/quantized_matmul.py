"""Quantized training: an implementation of the matmul seam whose three passes multiply operands of few bits.

Each operand is rounded (`kernels/quantize.py`) with one scale per row or channel that is not contracted, multiplied in
its format, and the result is multiplied by both scales. Gradients pass rounding as if it were not there
(straight-through).
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
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
from maxtext.layers.sent_weight import SentWeight
from maxtext.layers.weight_format import StoredWeight

_INPUTS, _OUTPUTS = 1, 2  # dimensions of the weights of experts
_Terms = tuple[str, str, str]  # letters of the dimensions of two operands and a result


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
    batch_shards: over how many devices the batch is split: each scales what its own part adds to such a gradient, so
      that what devices send each other has the run's dtype.
    replicated_scales: the mesh on which scales are replicated rather than sharded; None leaves it to XLA.
  """

  name: str = "quantization"
  input: Operand = Operand()
  weight: Operand = Operand()
  gradient: Operand = Operand()
  pattern: str = ""
  others: tuple[str, ...] = ()
  shards: int = 1
  batch_shards: int = 1
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
    operands = {"input": x, "weight": weight}
    ranges = {name: _observe(own, name, operands[name]) for name in self._delayed}
    call = dataclasses.replace(call, ranges=(ranges.get("input"), ranges.get("weight")))
    return each_pass(self._pass, call, next_, x, weight)

  def sent(self, site: Site, weight: jax.Array, dtype: Any) -> Any:
    """The weight [X,I,O] rounded for both passes. A delayed calibration notes the range of the weight itself, and
    values of four bits are not sent."""
    format_, calibration = self.weight.format, self.weight.calibration
    if format_ is None or format_.dtype == jnp.int4 or "weight" in self._delayed:
      return weight
    forward, by_input = (
      jax.lax.stop_gradient(quantize(weight, format_, [axis], calibration)) for axis in (_INPUTS, _OUTPUTS)
    )
    return SentWeight(weight.astype(dtype), forward, by_input)

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
    dtype = call.dtype or x.dtype
    return _product(call, left, right, dtype).astype(dtype)

  @property
  def _delayed(self) -> dict[str, Operand]:
    operands = {"input": self.input, "weight": self.weight}
    return {name: one for name, one in operands.items() if one.format and one.calibration.method == "delayed"}

  def _pass(self, call: MatmulCall, next_: Next, first: jax.Array, second: jax.Array | SentWeight) -> jax.Array:
    of_input, of_weight = call.ranges
    (by_first, amax), (by_second, other) = {
      "forward": ((self.input, of_input), (self.weight, of_weight)),
      "input_gradient": ((self.gradient, None), (self.weight, of_weight)),
      "weight_gradient": ((self.input, of_input), (self.gradient, None)),
    }[call.site.pass_]
    dtype = call.dtype or first.dtype
    a, b, result = call.terms
    terms, by_parts = (a, b, result), call.site.pass_ == "weight_gradient" and call.group_sizes is None
    if by_parts and by_first.format and by_second.format:
      assert not isinstance(second, SentWeight), "it is no operand of its own gradient"
      letter, parts = _parts(_contracted(terms, first.shape), self.shards)
      terms, first, second = _in_parts(terms, first, second, letter, "S", parts)
    shared = [c for c in terms[0] if c in terms[1] and c not in terms[2]]
    left = self._rounded(first, by_first, [terms[0].index(c) for c in shared], amax, call)
    right = self._rounded(second, by_second, [terms[1].index(c) for c in shared], other, call)
    if not isinstance(left, Quantized) or not isinstance(right, Quantized):
      plain = (dequantize(v, dtype) if isinstance(v, Quantized) else v for v in (left, right))
      return next_(call, *plain).astype(dtype)
    if by_parts:
      terms, left, right = self._divided(terms, left, right)
    out = _product(dataclasses.replace(call, contraction=f"{terms[0]},{terms[1]}->{terms[2]}"), left, right, dtype)
    return self._sum_of_parts(out, len(terms[2]) - len(result), dtype)

  def _divided(self, terms: _Terms, left: Quantized, right: Quantized) -> tuple[_Terms, Quantized, Quantized]:
    """The operands of a weight gradient in parts that are multiplied apart: those of the devices that the batch is
    split over, or more where sums need it."""
    sizes = _contracted(terms, left.values.shape)
    fitting = _parts_that_fit(sizes, left, right)
    of_devices = math.gcd(self.batch_shards, next(iter(sizes.values())))
    letter, parts = _parts(sizes, max(fitting, of_devices), of_devices)
    divided, *values = _in_parts(terms, left.values, right.values, letter, "T", parts)
    _, *scales = _in_parts(terms, left.scale, right.scale, letter, "T", 1)
    first, second = (Quantized(*one) for one in zip(values, scales, strict=True))
    return divided, first, second

  def _sum_of_parts(self, out: jax.Array, dimensions: int, dtype: Any) -> jax.Array:
    """The sum over the first dimensions, in the run's dtype: where each device has one part, it is what they send."""
    if math.prod(out.shape[:dimensions]) > self.batch_shards:
      return out.sum(range(dimensions)).astype(dtype)
    return jax.lax.reduce(out.astype(dtype), jnp.zeros((), dtype), jax.lax.add, range(dimensions))

  def _rounded(
    self, x: jax.Array | SentWeight, operand: Operand, shared: list[int], amax: jax.Array | None, call: MatmulCall
  ) -> jax.Array | Quantized:
    if isinstance(x, SentWeight):
      return x.forward if call.site.pass_ == "forward" else x.input_gradient
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


def _contracted(terms: _Terms, shape: Sequence[int]) -> dict[str, int]:
  """The contracted dimensions of a matmul whose first operand has this shape, with their sizes."""
  a, b, result = terms
  return {c: size for c, size in zip(a, shape, strict=True) if c in b and c not in result}


def _parts_that_fit(sizes: Mapping[str, int], left: Quantized, right: Quantized) -> int:
  """Of how many parts each has sums that fit an int32, where values are integers."""
  integers = all(jnp.issubdtype(v.values.dtype, jnp.integer) for v in (left, right))
  return -(-math.prod(sizes.values()) // _MOST_SUMMED) if integers else 1


def _parts(sizes: Mapping[str, int], least: int, multiple: int = 1) -> tuple[str, int]:
  """Which contracted dimension is split, and into how many parts: so many or more, a multiple of a number. ("", 1) if
  none is."""
  first = -(-least // multiple) * multiple
  for letter, size in sizes.items() if least > 1 else ():
    if parts := next((parts for parts in range(first, size + 1, multiple) if size % parts == 0), 0):
      return letter, parts
  return "", 1


def _in_parts(
  terms: _Terms, first: jax.Array, second: jax.Array, letter: str, new: str, parts: int
) -> tuple[_Terms, jax.Array, jax.Array]:
  """A matmul with a contracted dimension in two, the parts and the rest, whose result has one for each part."""
  a, b, result = terms
  if not letter:
    return terms, first, second
  first, second = (_split(t, x, letter, parts) for t, x in ((a, first), (b, second)))
  return (a.replace(letter, new + letter), b.replace(letter, new + letter), new + result), first, second


def _split(letters: str, x: jax.Array, letter: str, parts: int) -> jax.Array:
  """The dimension of a letter in two: of this many parts, and the rest."""
  axis = letters.index(letter)
  return x.reshape(*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])


def _product(call: MatmulCall, left: Quantized, right: Quantized, dtype: Any) -> jax.Array:
  """The product in float32: of the values in their format, times both scales. Kernels may round what they return to
  the `dtype` of the run."""
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
      values = call.kernel.quantized_weights_gradient(left.values, right.values, sizes, total, dtype)
      scales = [left.scale.reshape(1, -1, 1), right.scale.reshape(1, 1, -1)]
    else:
      by_input = call.site.pass_ == "input_gradient"
      weights, scale = (v.swapaxes(1, 2) if by_input else v for v in right)
      values = call.kernel.quantized(left.values, weights, sizes, total, dtype)
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
