"""Multi-token prediction (MTP): modules after the last layer that each predict one token further, in training.

Shapes: B batch, S sequence, E width.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.block import Layer
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.norm import NormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.stack import Stack


@dataclass(frozen=True)
class MultiTokenPrediction:
  """The spec of `count` modules, with one layer each."""

  count: int
  layer: Layer
  norm: NormSpec

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "MTPLayer":
    """One of the modules."""
    return MTPLayer(factory, self, width, execution)


class MTPLayer(nnx.Module):
  """Projects a hidden state and the embedding of the next token to one input of a layer."""

  def __init__(self, factory: ParamFactory, spec: MultiTokenPrediction, width: int, execution: ExecutionConfig) -> None:
    self.token_norm = spec.norm.build(factory.scope("token_norm"), width)
    self.hidden_norm = spec.norm.build(factory.scope("hidden_norm"), width)
    self.join = Linear(factory.scope("join"), {"embed": 2 * width}, {"latent_out": width}, execution, "ahead_join")
    self.stack = Stack(factory, (spec.layer,), 1, width, execution.replace(remat=execution.remat[:1]))
    self.norm = spec.norm.build(factory.scope("norm"), width)

  def __call__(self, hidden: jax.Array, token: jax.Array, context: Context) -> tuple[jax.Array, list[Any]]:
    """Normed hidden states and embeddings of the next tokens [B,S,E] to normed hidden states and auxiliary outputs."""
    joined = self.join(jnp.concatenate([self.token_norm(token), self.hidden_norm(hidden)], axis=-1))
    hidden, aux, _ = self.stack(joined, None, context, None)
    return self.norm(hidden), aux
