"""Layers after the last one that each predict one token further, as extra targets while training.

Shapes: B batch, S sequence, E width.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.block import Layer
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.linear import Linear
from maxtext.layers.make import Make
from maxtext.layers.norm import AnyNorm
from maxtext.layers.stack import Stack


@dataclass(frozen=True)
class Ahead:
  """`count` modules, each with one layer of its own."""

  count: int
  layer: Layer
  norm: AnyNorm

  def build(self, make: Make, width: int, how: How) -> "AheadLayer":
    """One of the modules."""
    return AheadLayer(make, self, width, how)


class AheadLayer(nnx.Module):
  """Joins what was known of a token with the token that follows, and passes both through a layer."""

  def __init__(self, make: Make, spec: Ahead, width: int, how: How) -> None:
    self.token_norm = spec.norm.build(make.at("token_norm"), width)
    self.hidden_norm = spec.norm.build(make.at("hidden_norm"), width)
    self.join = Linear(make.at("join"), {"embed": 2 * width}, {"latent_out": width}, how, "ahead_join")
    self.stack = Stack(make, (spec.layer,), 1, width, dataclasses.replace(how, remat=how.remat[:1]))
    self.norm = spec.norm.build(make.at("norm"), width)

  def __call__(self, hidden: jax.Array, token: jax.Array, context: Context) -> tuple[jax.Array, list[Any]]:
    """Normed hidden states [B,S,E] and embeddings of the next tokens [B,S,E] to normed hidden states and a report."""
    joined = self.join(jnp.concatenate([self.token_norm(token), self.hidden_norm(hidden)], axis=-1))
    hidden, report, _ = self.stack(joined, None, context, None)
    return self.norm(hidden), report
