"""A linear layer: weight, bias and checkpoint name; the matmul goes through the matmul seam (`matmul.py`)."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.matmul import matmul, matmul_variables, sent_weight
from maxtext.layers.matmul_call import LETTERS, MatmulCall, Role, Site
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.sent_weight import SentWeight
from maxtext.layers.weight_format import StoredWeight
from maxtext.mesh import explicit


class Linear(nnx.Module):
  """Contracts the last dimensions of x with the first of the weight.

  Args:
    factory: of this module's variables.
    inputs: logical axes that are contracted, with their sizes.
    outputs: logical axes of the output, with their sizes.
    name: checkpoint name of the output, by which a remat policy may save it.
    tied: the layer has no weight, and is called with that of another module.
    bias: adds a learned bias to the output.
    role: of the matmul at its site.
  """

  def __init__(
    self,
    factory: ParamFactory,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    execution: ExecutionConfig,
    name: str,
    tied: bool = False,
    bias: bool = False,
    role: Role = "linear",
  ) -> None:
    self.execution, self.name, self.site = execution, name, Site(factory.module_path, role)
    self.inputs, self.outputs = len(inputs), len(outputs)
    std = (execution.numerics.init_scale / prod(inputs.values())) ** 0.5
    stored = {} if tied else execution.weight_format.variables(factory, self.site, inputs, outputs, std)
    self.stored = tuple(stored)
    self.weight: nnx.Variable | None = stored.pop("weight", None)
    for part, variable in stored.items():
      setattr(self, part, variable)
    self.bias = factory("bias", tuple(outputs.values()), tuple(outputs)) if bias else None
    self.matmul = matmul_variables(execution.matmul, factory, self.site, inputs, outputs)

  def __call__(
    self, x: jax.Array, weight: jax.Array | StoredWeight | None = None, dtype: jax.typing.DTypeLike | None = None
  ) -> jax.Array:
    """The output. `weight` is that of a tied layer; `dtype` is that of the matmul, None for the run's."""
    outer, letters = x.ndim - self.inputs, LETTERS[: x.ndim]
    outputs = LETTERS[x.ndim : x.ndim + self.outputs]
    contraction = f"{letters},{letters[outer:]}{outputs}->{letters[:outer]}{outputs}"
    call = MatmulCall(self.site, contraction, dtype or self.execution.numerics.dtype, self.execution.numerics.precision)
    y = self._run(call, x, weight)
    if self.bias is not None:
      bias = self.bias[...].astype(y.dtype)
      y = y + (
        explicit.match_sharding(bias, y, self.execution.sharding.mesh) if self.execution.sharding.explicit else bias
      )
    return checkpoint_name(y, self.name)

  def contract(self, role: Role, contraction: str, x: jax.Array, part: tuple[int, int]) -> jax.Array:
    """Another contraction with a slice `part` of the weight's last dimension, without bias and checkpoint name. It is
    a site of its own at the same path."""
    call = MatmulCall(
      Site(self.site.path, role),
      contraction,
      self.execution.numerics.dtype,
      self.execution.numerics.precision,
      part=part,
    )
    return self._run(call, x, None)

  def sent_weight(self) -> Any:
    """The weight of experts as devices gather it, a second operand of the matmul in place of what is stored."""
    assert self.weight is not None
    value = self.weight[...]
    if len(self.stored) > 1:
      return value
    sent = sent_weight(self.execution.matmul, self.site, value, self.execution.numerics.dtype)
    gathered = any(pipeline is not None and pipeline.gather_once for pipeline in self.execution.pipelines)
    if not isinstance(sent, SentWeight) or gathered:
      return sent
    axes = self.weight.axes[len(self.weight.axes) - value.ndim :]  # a scan over layers has removed the first
    # Without this the compiler may gather what is stored, and round it on every device.
    return jax.tree.map(lambda array: self.execution.sharding.constrain(array, *axes), sent)

  def end_update(self) -> None:
    """Calls `end_update` of the implementations of the matmul."""
    for one in self.execution.matmul:
      if one.wants(self.site):
        one.end_update(self.site, self.matmul[one.name], self.weight)

  def _run(self, call: MatmulCall, x: jax.Array, tied: jax.Array | StoredWeight | None) -> jax.Array:
    weight: Any = tied
    if self.weight is not None:
      arrays = {name: getattr(self, name).get_value() for name in self.stored}  # an array, or what `sent_weight` made
      weight = self.execution.weight_format.load(self.site, arrays)
    assert weight is not None
    return matmul(
      self.execution.matmul,
      self.matmul,
      call,
      x,
      weight,
      self.execution.sharding.mesh if self.execution.sharding.explicit else None,
    )
