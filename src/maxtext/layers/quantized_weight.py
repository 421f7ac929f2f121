"""Weights at rest in few bits, as a format of stored weights, for inference and below adapters (QLoRA); and
quantization-aware training for them (QAT).

The contracted dimensions of a stored weight are one, named as the first of them. See `kernels/weight_quantize.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.quantize import Quantized
from maxtext.kernels.weight_quantize import STORED_FORMATS, StoredFormat, decode, decode_pairs, encode, stored_shapes
from maxtext.layers.matmul import Matmul, UnfitWeightError
from maxtext.layers.matmul_call import ABSORBED, MatmulCall, Next, Role, Site
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.weight_format import PlainFormat, StoredWeight

LEAVES = ("weight", "weight_scale", "weight_global_scale")  # the arrays of a weight; not every format has the last
_PLAIN = PlainFormat()
_STORED: tuple[Role, ...] = ("linear", "experts", "head")
_FEW_TOKENS = 512  # up to so many, taking inputs apart is cheaper than putting the rows of a weight together


_SCALE = re.compile(r"(/weight|/table)(_global)?_scale$")


def is_scale(path: str) -> bool:
  """Whether a parameter is a scale of a weight at rest in few bits."""
  return _SCALE.search(path) is not None


def array_paths(path: str) -> dict[str, str]:
  """The paths of the arrays that may stand for a parameter, by their names."""
  return {leaf: path + leaf.removeprefix("weight") for leaf in LEAVES}


def weight_of(path: str) -> str:
  """The weight that a scale belongs to; any other parameter itself."""
  return _SCALE.sub(r"\1", path)


@dataclass(frozen=True)
class WeightRounding:
  """Which weights are rounded, and to what.

  Attributes:
    format: a name of `STORED_FORMATS`.
    block: rows that share a scale; 0 is all of them.
    targets: patterns of the paths of modules, among those with a linear or expert weight and the head; the embedding
      is meant by its own name alone.
  """

  format: str
  block: int
  targets: tuple[str, ...] = ("layers/",)

  @property
  def stored(self) -> StoredFormat:
    """What is stored."""
    return STORED_FORMATS[self.format]

  def wants(self, site: Site) -> bool:
    """Whether the weight of a site is rounded."""
    return site.role in _STORED and any(re.search(pattern, site.path) for pattern in self.targets)

  def wants_table(self, path: str) -> bool:
    """Whether the table of the embedding is rounded, which patterns of other modules may not say by chance."""
    return path in self.targets

  def check(self, path: str, rows: int) -> None:
    """Raises `UnfitWeightError` if a weight with so many contracted rows cannot have the format."""
    per_byte = 8 // self.stored.bits
    step = max(self.block, per_byte)
    if self.block % per_byte:
      raise UnfitWeightError(
        f"weight_format={self.format}: weight_block_size={self.block} must be even: two inputs share a byte."
      )
    if rows % step:
      other = "weight_format" if self.stored.fixed_block else "weight_block_size or weight_format"
      raise UnfitWeightError(
        f"weight_format={self.format}: the {rows} inputs of {path} are not a multiple of {step}: choose another "
        f"{other}, or leave that module out of weight_format_targets."
      )

  def encode(self, weight: jax.Array, stacked: int, contracted: int) -> dict[str, jax.Array]:
    """The arrays of a weight [stacked..., contracted..., outputs...]."""
    lead, rest = weight.shape[:stacked], weight.shape[stacked + contracted :]
    run = _stacked(partial(encode, format_=self.stored, block=self.block), stacked)
    return run(weight.reshape(*lead, -1, *rest))

  def decode(self, arrays: Mapping[str, jax.Array], shape: tuple[int, ...], stacked: int, dtype: Any) -> jax.Array:
    """The weight of that shape."""
    run = _stacked(partial(decode, format_=self.stored, block=self.block, dtype=dtype), stacked)
    return run(arrays).reshape(shape)

  def decode_pairs(
    self, arrays: Mapping[str, jax.Array], shape: tuple[int, ...], stacked: int, dtype: Any
  ) -> tuple[jax.Array, ...]:
    """The even and the odd rows of a weight of four bits, each of that shape."""
    run = _stacked(partial(decode_pairs, format_=self.stored, block=self.block, dtype=dtype), stacked)
    return tuple(half.reshape(shape) for half in run(arrays))

  def decode_rows(self, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """Rows [..., E] of a table, which is stored as the weight [E, V] of a head is, but row by row."""
    last_first = {leaf: jnp.moveaxis(array, -1, 0) if array.ndim else array for leaf, array in arrays.items()}
    return jnp.moveaxis(decode(last_first, self.stored, self.block, dtype), 0, -1)


@dataclass(frozen=True)
class QuantizedFormat:
  """Weights that are wanted are stored in few bits; the others plainly."""

  rounding: WeightRounding

  @property
  def per_item(self) -> int:
    """Two of four bits share a byte."""
    return 8 // self.rounding.stored.bits

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int], std: float
  ) -> dict[str, nnx.Variable]:
    """Values and scales. A stored weight has no initial values of its own: all are 0, with scales of 1."""
    if not self.rounding.wants(site):
      return _PLAIN.variables(factory, site, inputs, outputs, std)
    rows, axis = prod(inputs.values()), next(iter(inputs))
    self.rounding.check(site.path, rows)
    shapes = stored_shapes(self.rounding.stored, self.rounding.block, rows, tuple(outputs.values()))
    return {
      name: factory(
        name,
        shape,
        (axis if shape[0] > 1 else None, *outputs) if shape else (),
        fill=name != "weight",
        dtype=dtype,
        contracted=int(name == "weight"),
      )
      for name, (shape, dtype) in shapes.items()
    }

  def table(self, factory: ParamFactory, vocab: int, width: int) -> dict[str, nnx.Variable]:
    """Values and scales of the embedding, named as those of a weight, the vocabulary first, so that a row is in one
    place; in their paths, `table` stands for `weight`. None where it is stored plainly."""
    if not self.rounding.wants_table(factory.module_path):
      return {}
    self.rounding.check(factory.module_path, width)
    shapes = stored_shapes(self.rounding.stored, self.rounding.block, width, (vocab,))
    return {
      name: factory(
        name.replace("weight", "table"),
        shape[::-1],
        ("vocab", "embed" if shape[0] > 1 else None) if shape else (),
        fill=name != "weight",
        dtype=dtype,
      )
      for name, (shape, dtype) in shapes.items()
    }

  def load(self, site: Site, arrays: Mapping[str, jax.Array]) -> jax.Array | StoredWeight:
    """A stored weight, or the array of a plain one."""
    return StoredWeight(self, arrays) if "weight_scale" in arrays else arrays["weight"]

  def dequantize(self, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The weight [F, outputs...] of one layer and expert."""
    return decode(arrays, self.rounding.stored, self.rounding.block, dtype)

  def matmul(self, call: MatmulCall, next_: Next, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The plain operation with the weight in the call's dtype, which exists in the operation alone."""
    stacked, dtype = int(call.site.role == "experts"), call.dtype or x.dtype
    shape = _weight_shape(call, x, arrays["weight"].shape, self.per_item)
    last = len(shape) - arrays["weight"].ndim + stacked  # of the contracted dimensions, which are stored as one
    whole = self.per_item == 1 or call.site.role not in _STORED or shape[last] % 2
    many = x.size > _FEW_TOKENS * prod(shape[stacked : last + 1])
    if whole or many or call.group_sizes is not None:  # a grouped kernel's operand is written out anyway
      return next_(call, x, self.rounding.decode(arrays, shape, stacked, dtype))
    # Rows come in pairs, and a sum over both is the sum over the even ones and that over the odd ones. Neighbouring
    # inputs are lanes of one register: to take them apart within the matmul costs a TPU's compiler minutes, hence the
    # barrier, and so does the gradient of it for many tokens.
    halves = self.rounding.decode_pairs(arrays, (*shape[:last], shape[last] // 2, *shape[last + 1 :]), stacked, dtype)
    first, weight, _ = call.terms
    axis, kind = first.index(weight[last]), call.preferred_element_type or dtype
    wide = dataclasses.replace(call, preferred_element_type=jnp.float32)
    inputs = jax.lax.optimization_barrier([jax.lax.slice_in_dim(x, start, None, 2, axis) for start in (0, 1)])
    even, odd = (next_(wide, part, half) for part, half in zip(inputs, halves, strict=True))
    return (even.astype(jnp.float32) + odd.astype(jnp.float32)).astype(kind)

  def rows(self, arrays: Mapping[str, jax.Array], index: jax.Array, dtype: Any) -> jax.Array:
    """Only the rows that are looked up are multiplied out."""
    return self.rounding.decode_rows({leaf: a[index] if a.ndim else a for leaf, a in arrays.items()}, dtype)

  def operand(self, call: MatmulCall, x: jax.Array, arrays: Mapping[str, jax.Array]) -> Quantized:
    """Values and scales as an operand of a quantized matmul, for eight bits and one scale per channel."""
    assert self.rounding.block == 0, "blocks of rows have scales of their own"
    assert self.rounding.stored.bits == 8, "values are packed"
    stacked = int(call.site.role == "experts")
    shape = _weight_shape(call, x, arrays["weight"].shape, 1)
    inputs = len(shape) - (arrays["weight"].ndim - stacked - 1) - stacked
    scale = arrays["weight_scale"]
    ones = (*scale.shape[:stacked], *(1,) * inputs, *scale.shape[stacked + 1 :])
    return Quantized(arrays["weight"].reshape(shape), scale.reshape(ones))


def _stacked(function: Callable[..., Any], leading: int) -> Callable[..., Any]:
  """A function of one weight for arrays with so many leading dimensions of layers and experts."""
  for _ in range(leading):
    function = jax.vmap(function)
  return function


def _weight_shape(call: MatmulCall, x: jax.Array, stored: tuple[int, ...], per_byte: int) -> tuple[int, ...]:
  """The shape of the weight in a call, whose contracted dimensions are stored as one."""
  first, weight, _ = call.terms
  stacked = int(call.site.role == "experts")
  rows, outputs = stored[stacked] * per_byte, stored[stacked + 1 :]
  inputs = weight[stacked : len(weight) - len(outputs)]
  sizes = dict(zip(first, x.shape, strict=True))
  known = [rows] if len(inputs) == 1 else [sizes[c] for c in inputs]
  assert prod(known) == rows, (call.contraction, stored, x.shape)
  return (*stored[:stacked], *known, *outputs)


@dataclass(frozen=True)
class RoundedWeights(Matmul):
  """Quantization-aware training: matmuls see the weight as it will be stored, and its gradient passes the rounding as
  if it were not there (straight-through)."""

  name: str = "rounded_weights"
  rounding: WeightRounding = WeightRounding("int8", 0)

  def wants(self, site: Site) -> bool:
    """Weights that will be stored in few bits."""
    return self.rounding.wants(site.of_weight)

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """None; the weight's shape is checked."""
    self.rounding.check(site.path, prod(inputs.values()))
    return {}

  def table(self, path: str, table: jax.Array, dtype: Any) -> jax.Array:
    """The table of the embedding as it will be stored."""
    return round_weight(self.rounding, 0, 1, table.T, dtype).T if self.rounding.wants_table(path) else table

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The matmul with the rounded weight."""
    _, letters, result = call.terms
    stacked = int(call.site.role == "experts")
    contracted = 1 if call.site.role in ABSORBED else sum(c not in result for c in letters[stacked:])
    return next_(call, x, round_weight(self.rounding, stacked, contracted, weight, call.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 4))
def round_weight(rounding: WeightRounding, stacked: int, contracted: int, weight: jax.Array, dtype: Any) -> jax.Array:
  """A weight as it will be stored; its gradient passes as if it were not rounded."""
  # Without the barrier, XLA would simplify across what is stored, and compute other last bits than from the file.
  arrays = jax.lax.optimization_barrier(rounding.encode(weight, stacked, contracted))
  return rounding.decode(arrays, weight.shape, stacked, dtype or weight.dtype)


def _round_forward(
  rounding: WeightRounding, stacked: int, contracted: int, weight: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  return round_weight(rounding, stacked, contracted, weight, dtype), jnp.zeros((), weight.dtype)


def _round_backward(
  rounding: WeightRounding, stacked: int, contracted: int, dtype: Any, like: jax.Array, grad: jax.Array
) -> tuple[jax.Array]:
  return (grad.astype(like.dtype),)


round_weight.defvjp(_round_forward, _round_backward)
