"""A decoder layer with one residual branch: attention into a narrow space, the feed-forward layer there, and back."""

from dataclasses import dataclass

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.attention import GQA
from maxtext.layers.block import RESIDUAL, FeedForward
from maxtext.layers.cache import Cache, Slots
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.linear import Linear
from maxtext.layers.make import Make
from maxtext.layers.norm import Norm


@dataclass(frozen=True)
class Chain:
  """x + out(feed_forward(norm(mixer(norm(x))))); the mixer's `out_width` is that of the narrow space."""

  mixer: GQA
  feed_forward: FeedForward
  norm: Norm

  def build(self, make: Make, width: int, how: How) -> "ChainedBlock":
    """The layer."""
    return ChainedBlock(make, self, width, how)


class ChainedBlock(nnx.Module):
  """The layer of `Chain`."""

  def __init__(self, make: Make, spec: Chain, width: int, how: How) -> None:
    self.how, narrow = how, spec.mixer.out_width or width
    self.mixer_norm = spec.norm.build(make.at("mixer_norm"), width)
    self.mixer = spec.mixer.build(make.at("mixer"), width, how)
    self.feed_forward_norm = spec.norm.build(make.at("feed_forward_norm"), narrow)
    self.feed_forward = spec.feed_forward.build(make.at("feed_forward"), narrow, how)
    self.out = Linear(make.at("out"), {"narrow": narrow}, {"embed": width}, how, "out_proj")

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array], Cache | None]:
    """A layer of a `Stack`."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + layer_input
    mixed, cache = self.mixer(self.mixer_norm(x), context, cache, repeat)
    fed, report = self.feed_forward(self.feed_forward_norm(mixed), context.real)
    return self.how.shard(x + self.out(fed), *RESIDUAL), report, cache

  def cache_slots(self, batch: int, length: int) -> dict[str, Slots]:
    """The cache of one layer."""
    return self.mixer.cache_slots(batch, length)
