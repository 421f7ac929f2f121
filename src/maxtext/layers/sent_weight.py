"""A weight of experts that is rounded before devices gather it: they send it in few bits."""

from dataclasses import dataclass
from typing import Any

import jax

from maxtext.kernels.quantize import Quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SentWeight:
  """The weight [X,I,O] as the second operand of a matmul in few bits, of a device's experts.

  Attributes:
    plain: in the dtype of its gradient. Its values are not read, so that they are not sent; it takes the gradient.
    forward, input_gradient: rounded for the passes of these names, which share scales along different dimensions.
  """

  plain: jax.Array
  forward: Quantized
  input_gradient: Quantized

  def with_gradient(self, gradient: jax.Array) -> "SentWeight":
    """What a custom derivative returns for it: the weight's gradient, and none of its roundings."""
    nothing: Any = None
    return SentWeight(gradient.astype(self.plain.dtype), nothing, nothing)
