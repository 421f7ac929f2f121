"""A dense feed-forward layer and a mixture of experts in parallel, each with its own norms."""

from dataclasses import dataclass

import jax
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.experts import MoE
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory


@dataclass(frozen=True)
class DenseAndExperts:
  """post_norm(dense(norm(x))) + post_norm(experts(norm(x))); the router takes x itself."""

  dense: MLP
  experts: MoE
  norm: RMSNormSpec

  @property
  def experts_per_token(self) -> int:
    """Routed experts of a token."""
    return self.experts.experts_per_token

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "DenseAndExpertsLayer":
    """The layer."""
    return DenseAndExpertsLayer(factory, self, width, execution)


class DenseAndExpertsLayer(nnx.Module):
  """The layer of `DenseAndExperts`."""

  def __init__(self, factory: ParamFactory, spec: DenseAndExperts, width: int, execution: ExecutionConfig) -> None:
    self.dense_norm = spec.norm.build(factory.scope("dense_norm"), width)
    self.dense = spec.dense.build(factory.scope("dense"), width, execution)
    self.dense_post_norm = spec.norm.build(factory.scope("dense_post_norm"), width)
    self.experts_norm = spec.norm.build(factory.scope("experts_norm"), width)
    self.experts = spec.experts.build(factory.scope("experts"), width, execution)
    self.experts_post_norm = spec.norm.build(factory.scope("experts_post_norm"), width)

  def __call__(
    self, x: jax.Array, real: jax.Array | None = None, replayed: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output, and the auxiliary outputs of the experts."""
    dense, _ = self.dense(self.dense_norm(x))
    selected, aux = self.experts(self.experts_norm(x), real, replayed, router_input=x)
    return self.dense_post_norm(dense) + self.experts_post_norm(selected), aux
