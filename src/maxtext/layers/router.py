"""The router of a mixture of experts: selects the experts of each token, and their weights.

Shapes: B batch, S sequence, E width, X experts, K experts per token, G groups.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.expert_dispatch import Routing
from maxtext.layers.linear import Linear
from maxtext.layers.norm import unit_rms
from maxtext.layers.param_factory import Buffer, ParamFactory, UpdateStatistic
from maxtext.mesh.explicit import auto_axes

ROUTED_EXPERTS = "routed_experts"
"""The auxiliary output [B,S,K] of a layer that `ExecutionConfig.keep_routed_experts` asks for."""


@dataclass(frozen=True)
class ExpertGroups:
  """Group-limited routing: the experts of a token are selected from its best groups only.

  Attributes:
    count: number of groups that the experts are divided into.
    kept: number of groups that a token selects.
    best: the score of a group is the sum of its `best` largest expert scores.
  """

  count: int
  kept: int
  best: int


@dataclass(frozen=True)
class Router:
  """The spec of a top-k router.

  A softmax over the selected experts only is `softmax` with `normalize`: the weights are the same.

  Attributes:
    count: number of experts.
    per_token: number of experts per token (top-k).
    score: function from logits to scores.
    normalize: the selected scores are divided by their sum.
    scale: multiplies the weights.
    groups: group-limited routing; None selects from all experts.
    bias: the logits have a learned bias.
    selection_bias: a bias per expert is added to scores for the selection, but not to the weights.
    selection_bias_rate: the step of that bias in each update, upwards for experts with less than an even load.
    expert_scale: a learned factor per expert multiplies its weight.
    input_norm: epsilon of a norm of the input, with a learned scale over sqrt(E); None for no norm.
    float32: logits are computed in float32 whatever the run's dtype.
    balance_weight: of the load-balancing loss.
  """

  count: int
  per_token: int
  score: Literal["softmax", "sigmoid"] = "softmax"
  normalize: bool = True
  scale: float = 1.0
  groups: ExpertGroups | None = None
  bias: bool = False
  selection_bias: bool = False
  selection_bias_rate: float = 0.0
  expert_scale: bool = False
  input_norm: float | None = None
  float32: bool = False
  balance_weight: float = 0.0

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "TopKRouterLayer":
    """The layer."""
    return TopKRouterLayer(factory, self, width, execution)


class TopKRouterLayer(nnx.Module):
  """x [B,S,E] to a routing and auxiliary outputs."""

  def __init__(self, factory: ParamFactory, spec: Router, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    self.logits = Linear(
      factory.scope("logits"), {"embed": width}, {"router": spec.count}, execution, "router_logits", role="router"
    )
    per_expert = (spec.count,), ("router",)
    self.bias = factory("bias", *per_expert) if spec.bias else None
    self.selection_bias = (
      factory("selection_bias", *per_expert, kind=Buffer, dtype=jnp.float32) if spec.selection_bias else None
    )
    self.tokens = (
      factory("tokens", *per_expert, kind=UpdateStatistic, dtype=jnp.float32, combine="sum")
      if spec.selection_bias and spec.selection_bias_rate
      else None
    )
    self.expert_scale = factory("expert_scale", *per_expert, fill=1.0) if spec.expert_scale else None
    self.input_scale = factory("input_scale", (width,), ("norm",), fill=1.0) if spec.input_norm is not None else None

  def __call__(
    self, x: jax.Array, real: jax.Array | None = None, replayed: jax.Array | None = None
  ) -> tuple[Routing, dict[str, jax.Array]]:
    """Tokens that are not `real` [B,S] are routed too, but are not included in the load.

    With `replayed` [B,S,K] a token is routed to these experts, weighted by their scores here; where they are negative,
    to those that are selected here.
    """
    spec = self.spec
    scores = _SCORES[spec.score](self._logits(x))
    experts = self._select(jax.lax.stop_gradient(scores))
    if replayed is not None:
      replayed = self.execution.sharding.constrain(replayed.astype(experts.dtype), *_TOKENS, None)
      experts = jnp.where(replayed >= 0, replayed, experts)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if spec.normalize:
      weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * spec.scale
    if self.expert_scale is not None:
      scale = self.expert_scale[...].astype(jnp.float32)
      weights = weights * auto_axes(lambda scale, experts: scale[experts], jax.typeof(experts).sharding, scale, experts)
    counted = None if real is None else self.execution.sharding.constrain(real.astype(jnp.float32), *_TOKENS)
    tokens, total = _sum(jax.nn.one_hot(experts, spec.count, dtype=jnp.float32).sum(2), counted)
    load = tokens / total  # of each expert, per token
    even = spec.per_token / spec.count
    aux = {"expert_load": load.max() / even}
    if self.execution.keep_routed_experts:
      aux[ROUTED_EXPERTS] = experts
    if spec.balance_weight:
      share = _sum(scores / scores.sum(-1, keepdims=True), counted)[0] / total
      aux["load_balance_loss"] = spec.balance_weight * spec.count * (load * share).sum()
    if self.tokens is not None:
      self.tokens.set_value(self.tokens[...] + jax.lax.stop_gradient(tokens))
    return Routing(experts, weights), aux

  def end_update(self) -> None:
    """Moves the selection bias by its rate towards an even load, from the load of the whole update."""
    if self.tokens is not None and self.selection_bias is not None:
      tokens = self.tokens[...]
      step = self.spec.selection_bias_rate * jnp.sign(tokens.mean(-1, keepdims=True) - tokens)
      self.selection_bias.set_value(self.selection_bias[...] + step)

  def _logits(self, x: jax.Array) -> jax.Array:
    epsilon = self.spec.input_norm
    if epsilon is not None and self.input_scale is not None:
      x = unit_rms(x, epsilon).astype(x.dtype) * (self.input_scale[...] * x.shape[-1] ** -0.5).astype(x.dtype)
    exact = self.spec.float32 or self.execution.kernels.experts.float32_logits
    logits = self.logits(x, dtype=jnp.float32 if exact else None).astype(jnp.float32)
    if self.execution.kernels.experts.random:
      logits = jax.random.normal(jax.random.key(0), logits.shape)
    return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

  def _select(self, scores: jax.Array) -> jax.Array:
    if self.selection_bias is not None:
      scores = scores + self.selection_bias[...]
    if (groups := self.spec.groups) is not None:
      grouped = scores.reshape(*scores.shape[:-1], groups.count, -1)
      group_scores = jax.lax.top_k(grouped, groups.best)[0].sum(-1)
      selected = jax.nn.one_hot(jax.lax.top_k(group_scores, groups.kept)[1], groups.count).sum(-2)
      scores = jnp.where(selected[..., None] > 0, grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, self.spec.per_token)[1]


def _sum(values: jax.Array, counted: jax.Array | None) -> tuple[jax.Array, jax.Array | float]:
  """The sum [X] of values [B,S,X] over the tokens where `counted` [B,S] is 1, and their number."""
  if counted is None:
    return values.sum((0, 1)), float(values.shape[0] * values.shape[1])
  return (values * counted[..., None]).sum((0, 1)), jnp.maximum(counted.sum(), 1.0)


_TOKENS = ("activation_batch", "activation_norm_length")
_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
