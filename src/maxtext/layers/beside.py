"""A dense feed-forward layer and a mixture of experts side by side, each with norms of its own."""

from dataclasses import dataclass

import jax
from flax import nnx

from maxtext.layers.experts import Mixture
from maxtext.layers.how import How
from maxtext.layers.make import Make
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import Norm


@dataclass(frozen=True)
class Beside:
  """after(dense(before(x))) + after(experts(before(x))); the router sees x itself."""

  dense: MLP
  experts: Mixture
  norm: Norm

  def build(self, make: Make, width: int, how: How) -> "SideBySide":
    """The layer."""
    return SideBySide(make, self, width, how)


class SideBySide(nnx.Module):
  """The two, and the sum."""

  def __init__(self, make: Make, spec: Beside, width: int, how: How) -> None:
    self.dense_norm = spec.norm.build(make.at("dense_norm"), width)
    self.dense = spec.dense.build(make.at("dense"), width, how)
    self.dense_post_norm = spec.norm.build(make.at("dense_post_norm"), width)
    self.experts_norm = spec.norm.build(make.at("experts_norm"), width)
    self.experts = spec.experts.build(make.at("experts"), width, how)
    self.experts_post_norm = spec.norm.build(make.at("experts_post_norm"), width)

  def __call__(self, x: jax.Array, real: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output, and what the experts report."""
    dense, _ = self.dense(self.dense_norm(x))
    chosen, report = self.experts(self.experts_norm(x), real, router_input=x)
    return self.dense_post_norm(dense) + self.experts_post_norm(chosen), report
