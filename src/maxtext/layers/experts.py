"""The mixture of experts: a router, experts that tokens are sent to, and one that every token passes through.

Shapes: B batch, S sequence, E width, X experts (of this device), M rows, C rows per expert, I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.grouped_matmul import GroupedMatmul
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.expert_dispatch import Routing
from maxtext.layers.expert_parallel import expert_parallel
from maxtext.layers.linear import Linear
from maxtext.layers.matmul_call import MatmulCall
from maxtext.layers.mlp import ACTIVATIONS, MLP
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.router import Router


@dataclass(frozen=True)
class MoE:
  """What a mixture is.

  Attributes:
    router: chooses experts; their number is in it.
    width: hidden width of an expert.
    activation: of the gate.
    limit: clamps gate and up, and up counts from 1: (up + 1) * gate * sigmoid(1.702 gate), for any activation.
    bias: the experts' products have biases.
    weigh_inputs: the router's weights multiply what enters the experts, not what leaves them.
    shared: a dense layer beside the experts.
    shared_gate: the shared layer's output is multiplied by the sigmoid of a learned product of the input.
  """

  router: Router
  width: int
  activation: str = "silu"
  limit: float | None = None
  bias: bool = False
  weigh_inputs: bool = False
  shared: MLP | None = None
  shared_gate: bool = False

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "MixtureOfExperts":
    """The layer."""
    return MixtureOfExperts(factory, self, width, execution)


class MixtureOfExperts(nnx.Module):
  """Routes, dispatches, and adds the shared layer."""

  def __init__(self, factory: ParamFactory, spec: MoE, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    self.router = spec.router.build(factory.scope("router"), width, execution)
    self.experts = ExpertMLP(factory.scope("experts", expert=spec.router.count), spec, width, execution)
    self.shared = None if spec.shared is None else spec.shared.build(factory.scope("shared"), width, execution)
    gated = spec.shared is not None and spec.shared_gate
    self.shared_gate = (
      Linear(factory.scope("shared_gate"), {"embed": width}, {"router": 1}, execution, "shared_gate") if gated else None
    )

  def __call__(
    self, x: jax.Array, real: jax.Array | None = None, router_input: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output and a report; the router sees x unless it is given something else to see."""
    routing, report = self.router(x if router_input is None else router_input, real)
    y, dropped = self._routed(x, routing)
    y = y.astype(x.dtype)
    if self.execution.kernels.experts.drops:
      report["dropped_tokens"] = dropped / routing.experts.size
    if self.shared is not None:
      shared, _ = self.shared(x)
      if self.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(self.shared_gate(x))
      y = y + shared
    return y, report

  def _routed(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    execution, spec = self.execution, self.spec
    total = spec.router.count
    if execution.sharding.mesh.size == 1:
      return execution.kernels.experts(self.experts, x, routing, 0, total, total, spec.weigh_inputs)

    def local(
      experts: ExpertMLP, x: jax.Array, routing: Routing, first: jax.Array, count: int, parts: int, sent: tuple
    ) -> tuple[jax.Array, jax.Array]:
      return execution.kernels.experts(
        partial(experts, parts=parts), x, routing, first, count, total, spec.weigh_inputs, sent
      )

    return expert_parallel(execution, self.experts, x, routing, total, spec.width, local)


class ExpertMLP(nnx.Module):
  """act(x gate) * (x up), then down, with weights of each expert's own."""

  def __init__(self, factory: ParamFactory, spec: MoE, width: int, execution: ExecutionConfig) -> None:
    self.execution, self.activation, self.limit = execution, ACTIVATIONS[spec.activation], spec.limit
    outside, inside = {"expert_embed": width}, {"expert_mlp": spec.width}
    kind: Any = {"bias": spec.bias, "role": "experts"}
    self.gate = ExpertLinear(factory.scope("gate"), outside, inside, execution, "moe_mlpwi_0", **kind)
    self.up = ExpertLinear(factory.scope("up"), outside, inside, execution, "moe_mlpwi_1", **kind)
    self.down = ExpertLinear(factory.scope("down"), inside, outside, execution, "moe_mlpwo", **kind)

  def __call__(self, x: jax.Array, sizes: jax.Array | None, parts: int = 1) -> jax.Array:
    """Rows [M,E] sorted by expert with their sizes [X], or [X,C,E] without.

    `parts` counts the devices that each hold a part of the hidden width and whose outputs will be summed.
    """
    wi, wo = self.execution.kernels.experts.wi, self.execution.kernels.experts.wo
    hidden = self._activate(self.gate.grouped(x, sizes, wi), self.up.grouped(x, sizes, wi))
    return self.down.grouped(hidden, sizes, wo, parts)

  def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    dtype = jnp.float32 if self.execution.numerics.activations_in_float32 else gate.dtype
    if self.limit is None:
      return self.activation(gate.astype(dtype)).astype(gate.dtype) * up
    gate, up = jnp.minimum(gate, self.limit).astype(dtype), jnp.clip(up, -self.limit, self.limit)
    return (gate * jax.nn.sigmoid(1.702 * gate)).astype(up.dtype) * (up + 1)


class ExpertLinear(Linear):
  """A `Linear` per expert; the factory it is given makes one copy of every variable for each."""

  def grouped(self, x: jax.Array, sizes: jax.Array | None, kernel: GroupedMatmul, parts: int = 1) -> jax.Array:
    """Rows [M,I] with sizes [X], or [X,C,I], to the same of O."""
    dtype = self.execution.numerics.dtype
    contraction = "xci,xio->xco" if sizes is None else "mi,xio->mo"
    call = MatmulCall(
      self.site, contraction, dtype, self.execution.numerics.precision, kernel=kernel, group_sizes=sizes
    )
    y = self._run(call, x, None)
    if self.bias is not None:
      bias = self.bias[...].astype(dtype) / parts
      y = y + (bias[:, None] if sizes is None else bias[_expert_of_each_row(sizes, x.shape[0])])
    return checkpoint_name(y, self.name)


def _expert_of_each_row(sizes: jax.Array, rows: int) -> jax.Array:
  """The last one's number for rows after all experts."""
  ends = jnp.cumsum(sizes)[:-1]
  return jnp.searchsorted(ends, jnp.arange(rows), side="right")
