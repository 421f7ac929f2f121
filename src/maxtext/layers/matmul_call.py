"""The description of one matmul of a model: its site, and what is computed there. See `matmul.py`.

Contractions are einsum subscripts; x is the axis of experts, m that of rows sorted by expert.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax

from maxtext.kernels.grouped_matmul import GroupedMatmul

Role = Literal[
  "linear", "head", "router", "experts", "mla_absorb_key", "mla_absorb_value", "attention_scores", "attention_values",
  "indexer_scores", "convolution",
]  # fmt: skip
Pass = Literal["forward", "input_gradient", "weight_gradient"]
ABSORBED: tuple[Role, ...] = ("mla_absorb_key", "mla_absorb_value")
ATTENTION: tuple[Role, ...] = ("attention_scores", "attention_values")

# Letters for contractions of any number of dimensions.
LETTERS = "abcdefghijklmnopqrstuvw"


@dataclass(frozen=True)
class Site:
  """Which matmul of the model it is.

  Attributes:
    path: of the module; the layers of a stack share it, as they share the path of their parameters.
    role: what it does there. A module has at most one matmul of each role.
    pass_: the matmul itself, or one of the two of its gradient.
  """

  path: str
  role: Role
  pass_: Pass = "forward"

  @property
  def of_weight(self) -> "Site":
    """The site of the module's own matmul, of whose weight an absorbed one contracts a part."""
    return dataclasses.replace(self, role="linear") if self.role in ABSORBED else self


@partial(
  jax.tree_util.register_dataclass,
  data_fields=("group_sizes", "documents", "ranges"),
  meta_fields=("site", "contraction", "dtype", "precision", "preferred_element_type", "kernel", "part", "taps"),
)
@dataclass(frozen=True)
class MatmulCall:
  """A matmul without its two operands. A pytree, so that it can be an argument of transformed functions.

  Attributes:
    contraction: einsum subscripts of the two operands and the result. Rows that are sorted by expert are "mi,xio->mo":
      each row is multiplied by the weight of its expert. A convolution is "btcd,wcd->bscd".
    dtype: to which both operands are cast; None does not cast them.
    precision: of the plain operation.
    preferred_element_type: of the result; None is that of the operands.
    kernel: the grouped matmul of rows sorted by expert.
    part: range (start, end) of the weight's last dimension; None is all of it.
    taps: number of taps of a convolution, and their distance.
    group_sizes: [X] rows of each expert.
    documents: of a convolution: the document of each token [B,S], and of each token with the earlier ones [B,T].
    ranges: of an implementation that does all passes: the largest magnitudes of the input and of the weight that it
      knows from earlier steps.
  """

  site: Site
  contraction: str
  dtype: Any = None
  precision: str = "default"
  preferred_element_type: Any = None
  kernel: GroupedMatmul | None = None
  part: tuple[int, int] | None = None
  taps: tuple[int, int] | None = None
  group_sizes: jax.Array | None = None
  documents: tuple[jax.Array, jax.Array] | None = None
  ranges: tuple[jax.Array | None, jax.Array | None] = (None, None)

  @property
  def terms(self) -> tuple[str, str, str]:
    """The letters of the first operand, of the second, and of the result."""
    operands, result = self.contraction.split("->")
    first, second = operands.split(",")
    return first, second, result

  def low_rank(self) -> tuple["MatmulCall", "MatmulCall"]:
    """The calls of two matmuls in place of one: with weights [..., inputs, rank] and [..., rank, outputs]."""
    first, weight, result = self.terms
    inputs = "".join(c for c in weight if c in first and c not in result)
    outputs = "".join(c for c in weight if c in result and c not in first)
    stacked = "".join(c for c in weight if c not in inputs + outputs)
    narrow = "".join(c for c in first if c not in inputs) + "z"
    down, up = f"{first},{stacked}{inputs}z->{narrow}", f"{narrow},{stacked}z{outputs}->{result}"
    return dataclasses.replace(self, contraction=down), dataclasses.replace(self, contraction=up)

  def transposed(self, pass_: Pass) -> "MatmulCall":
    """The call of a gradient: of the first operand, from (gradient, weight); of the weight, from (input, gradient)."""
    first, weight, result = self.terms
    contraction = f"{result},{weight}->{first}" if pass_ == "input_gradient" else f"{first},{result}->{weight}"
    return dataclasses.replace(self, site=dataclasses.replace(self.site, pass_=pass_), contraction=contraction)


Next = Callable[[MatmulCall, jax.Array, Any], jax.Array]
