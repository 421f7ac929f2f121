"""Multi-LoRA: many adapters in one batch, a different one for each row, as an implementation of the matmul seam.

Each adapted module has a table of A and one of B, with a slot for each loaded adapter, and the slots of the batch's
rows. A matmul gathers the A and B of its rows. Slot 0 is zero: a row that has it is the base's, to the bit. So a table
changes without compilation, and a row's result does not depend on the adapters of the others.

Shapes: B rows, N slots, I inputs, O outputs, Z rank, R layers of a stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.matmul import Matmul
from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.parameter_paths import join

_NAME, _ROWS = "multi_lora", "rows"
_ADAPTED = ("linear", "mla_absorb_key", "mla_absorb_value")


def table_paths(module: str) -> tuple[str, str]:
  """The paths of the tables of A and B beside the weight of a module."""
  return join(module, "matmul", _NAME, "a"), join(module, "matmul", _NAME, "b")


def is_table(path: str) -> bool:
  """Whether a parameter is a table of A or B."""
  return f"/matmul/{_NAME}/" in path and not is_rows(path)


def is_rows(path: str) -> bool:
  """Whether a parameter is the slots of the batch's rows."""
  return path.endswith(f"/{_NAME}/{_ROWS}")


@dataclass(frozen=True)
class MultiLoraMatmul(Matmul):
  """Tables of adapters A [N, inputs, rank] and B [N, rank, outputs], whose scale is in B.

  Attributes:
    modules: paths of the modules with tables. Experts cannot have any: their rows are sorted by expert.
    slots: of a table, slot 0 among them.
    rank: of the tables; adapters of a lower rank are padded with zeros.
    dtype: of the tables.
  """

  name: str = _NAME
  modules: frozenset[str] = frozenset()
  slots: int = 2
  rank: int = 16
  dtype: Any = jnp.float32

  def wants(self, site: Site) -> bool:
    """The linear layers with tables."""
    return site.role in _ADAPTED and site.path in self.modules

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """The tables, with the logical axes of the weight; slots and ranks are on every device."""
    a = factory("a", (self.slots, *inputs.values(), self.rank), (None, *inputs, None), dtype=self.dtype)
    b = factory("b", (self.slots, self.rank, *outputs.values()), (None, None, *outputs), dtype=self.dtype)
    return {"a": a, "b": b, _ROWS: factory(_ROWS, (1,), (None,), dtype=jnp.int32)}

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result of the weight and that of each row's adapter, which is not quantized."""
    rows = jnp.broadcast_to(own[_ROWS][...], x.shape[:1])
    a, b = (own[name][...].at[rows].get(mode="promise_in_bounds") for name in ("a", "b"))
    if call.part is not None:
      b = b[..., slice(*call.part)]
    first, second = _contractions(call, inputs=a.ndim - 2)
    operands = (a, b) if _sums_over_inputs(call, a.ndim - 2) else (b, a)
    return next_(call, x, weight) + _einsum(call, second, _einsum(call, first, x, operands[0]), operands[1])


def with_rows(
  structs: Mapping[str, jax.ShapeDtypeStruct], params: Mapping[str, jax.Array], rows: jax.Array
) -> dict[str, jax.Array]:
  """The parameters of a model with these `structs`, for a batch whose rows have the adapters in these slots [B]."""
  stacked = [(path, struct.shape[:-1]) for path, struct in structs.items() if is_rows(path)]
  return {**params, **{path: jnp.broadcast_to(rows, (*layers, *rows.shape)) for path, layers in stacked}}


def _sums_over_inputs(call: MatmulCall, inputs: int) -> bool:
  """Whether the weight's inputs are contracted; an absorbed matmul may contract its outputs instead."""
  first, weight, _ = call.terms
  return any(letter in first for letter in weight[:inputs])


def _contractions(call: MatmulCall, inputs: int) -> tuple[str, str]:
  """The einsum subscripts of the two matmuls in place of one, where each row has weights of its own."""
  first, weight, result = call.terms
  row, of_a, of_b = first[0], f"{first[0]}{weight[:inputs]}z", f"{first[0]}z{weight[inputs:]}"
  narrow = row + "".join(letter for letter in first[1:] if letter in result) + "z"
  one, other = (of_a, of_b) if _sums_over_inputs(call, inputs) else (of_b, of_a)
  return f"{first},{one}->{narrow}", f"{narrow},{other}->{result}"


def _einsum(call: MatmulCall, subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
  x, weight = (operand if call.dtype is None else operand.astype(call.dtype) for operand in (x, weight))
  return jnp.einsum(subscripts, x, weight, precision=call.precision, preferred_element_type=call.preferred_element_type)
