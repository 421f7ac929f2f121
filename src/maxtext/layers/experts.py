"""The mixture of experts (MoE): a router, routed experts, and a shared expert that every token passes through.

Shapes: B batch, S sequence, E width, X experts (of this device), M rows, C rows per expert, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.grouped_matmul import GroupedMatmul, group_of_each_row
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.expert_dispatch import Routing
from maxtext.layers.expert_parallel import expert_parallel
from maxtext.layers.expert_weights import weigh_by_gradient
from maxtext.layers.linear import Linear
from maxtext.layers.matmul_call import MatmulCall
from maxtext.layers.mlp import ACTIVATIONS, MLP
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.router import Router


@dataclass(frozen=True)
class MoE:
  """The spec of a mixture of experts.

  Attributes:
    router: chooses experts; their number is in it.
    width: hidden width of an expert.
    activation: of the gate.
    limit: clamps gate and up, and computes (up + 1) * gate * sigmoid(1.702 gate), whatever the activation.
    bias: the experts' projections have biases.
    weigh_inputs: the router's weights multiply the experts' inputs, not their outputs.
    shared: a shared expert, that every token passes through.
    shared_gate: the shared expert's output is multiplied by the sigmoid of a projection of the input.
  """

  router: Router
  width: int
  activation: str = "silu"
  limit: float | None = None
  bias: bool = False
  weigh_inputs: bool = False
  shared: MLP | None = None
  shared_gate: bool = False

  @property
  def experts_per_token(self) -> int:
    """Routed experts of a token."""
    return self.router.per_token

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "MixtureOfExperts":
    """The layer."""
    return MixtureOfExperts(factory, self, width, execution)


class MixtureOfExperts(nnx.Module):
  """Routes tokens, dispatches them, and adds the shared expert."""

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
    self,
    x: jax.Array,
    real: jax.Array | None = None,
    replayed: jax.Array | None = None,
    router_input: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output and auxiliary outputs; the router takes `router_input`, or x where that is None, and `replayed`."""
    routing, aux = self.router(x if router_input is None else router_input, real, replayed)
    y, dropped = self._dispatch(x, routing)
    y = y.astype(x.dtype)
    if self.execution.kernels.experts.drops:
      aux["dropped_tokens"] = dropped / routing.experts.size
    if self.shared is not None:
      shared, _ = self.shared(x)
      if self.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(self.shared_gate(x))
      y = y + shared
    return y, aux

  def _dispatch(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    execution, spec = self.execution, self.spec
    total = spec.router.count
    if execution.sharding.mesh.size == 1:
      return execution.kernels.experts(self.experts, x, routing, 0, total, total, spec.weigh_inputs)

    def local(
      experts: ExpertMLP, x: jax.Array, routing: Routing, first: jax.Array, count: int, parts: int, sent: tuple
    ) -> tuple[jax.Array, jax.Array]:
      return execution.kernels.experts(experts, x, routing, first, count, total, spec.weigh_inputs, sent, parts)

    return expert_parallel(execution, self.experts, x, routing, total, spec.width, local)


class ExpertMLP(nnx.Module):
  """act(x gate) * (x up), then down, with its own weights for each expert."""

  def __init__(self, factory: ParamFactory, spec: MoE, width: int, execution: ExecutionConfig) -> None:
    self.execution, self.activation, self.limit = execution, ACTIVATIONS[spec.activation], spec.limit
    outside, inside = {"expert_embed": width}, {"expert_mlp": spec.width}
    kind: Any = {"bias": spec.bias, "role": "experts"}
    self.gate = ExpertLinear(factory.scope("gate"), outside, inside, execution, "moe_mlpwi_0", **kind)
    self.up = ExpertLinear(factory.scope("up"), outside, inside, execution, "moe_mlpwi_1", **kind)
    self.down = ExpertLinear(factory.scope("down"), inside, outside, execution, "moe_mlpwo", **kind)

  @property
  def exact(self) -> bool:
    """Whether no implementation of the matmul rounds what it multiplies, or adds to it."""
    return not self.execution.matmul

  def __call__(
    self, x: jax.Array, sizes: jax.Array | None, parts: int = 1, weights: jax.Array | None = None
  ) -> jax.Array:
    """Rows [M,E] sorted by expert with their sizes [X], or [X,C,E] without.

    `parts` is the number of devices that the hidden width is sharded over, whose outputs will be summed. `weights` are
    those of the rows, if their gradient is taken here.
    """
    hidden = self._hidden(x, sizes)
    if weights is not None:
      hidden = weigh_by_gradient(hidden, weights)
    return self.down.grouped(hidden, sizes, self.execution.kernels.experts.wo, parts, weights)

  def _hidden(self, x: jax.Array, sizes: jax.Array | None) -> jax.Array:
    wi = self.execution.kernels.experts.wi
    if sizes is None or not self.execution.kernels.experts.merge_gate_up:
      return self._activate(self.gate.grouped(x, sizes, wi), self.up.grouped(x, sizes, wi))
    assert self.gate.weight is not None
    assert self.up.weight is not None
    numerics = self.execution.numerics
    merged = jnp.concatenate([a[...].astype(numerics.dtype) for a in (self.gate.weight, self.up.weight)], axis=-1)
    gate, up = jnp.split(wi(x.astype(numerics.dtype), merged, sizes), 2, axis=-1)
    return self._activate(self.gate.finish(gate, sizes), self.up.finish(up, sizes))

  def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    dtype = jnp.float32 if self.execution.numerics.activations_in_float32 else gate.dtype
    if self.limit is None:
      return self.activation(gate.astype(dtype)).astype(gate.dtype) * up
    gate, up = jnp.minimum(gate, self.limit).astype(dtype), jnp.clip(up, -self.limit, self.limit)
    return (gate * jax.nn.sigmoid(1.702 * gate)).astype(up.dtype) * (up + 1)


class ExpertLinear(Linear):
  """A `Linear` per expert; its factory stacks the variables of all experts."""

  def grouped(
    self,
    x: jax.Array,
    sizes: jax.Array | None,
    kernel: GroupedMatmul,
    parts: int = 1,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    """Rows [M,I] with sizes [X] to [M,O], or [X,C,I] to [X,C,O]; `weights` as of `finish`."""
    dtype = self.execution.numerics.dtype
    contraction = "xci,xio->xco" if sizes is None else "mi,xio->mo"
    call = MatmulCall(
      self.site, contraction, dtype, self.execution.numerics.precision, kernel=kernel, group_sizes=sizes
    )
    return self.finish(self._run(call, x, None), sizes, parts, weights)

  def finish(
    self, y: jax.Array, sizes: jax.Array | None, parts: int = 1, weights: jax.Array | None = None
  ) -> jax.Array:
    """The output of a matmul with the bias, and the name by which a remat policy may save it. The bias has its part in
    the gradient of the rows' `weights`, if that is taken here."""
    if self.bias is not None:
      bias = self.bias[...].astype(self.execution.numerics.dtype) / parts
      rows = bias[:, None] if sizes is None else bias[group_of_each_row(sizes, y.shape[0])]
      y = y + (rows if weights is None else weigh_by_gradient(jnp.broadcast_to(rows, y.shape), weights))
    return checkpoint_name(y, self.name)
