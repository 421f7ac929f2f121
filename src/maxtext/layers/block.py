"""One decoder layer: a mixer over the sequence, then a feed-forward layer, each normed and added to the residual."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.cache import Cache, Slots
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.make import Make
from maxtext.layers.norm import Norm, RMSNorm
from maxtext.layers.rope import Rope

RESIDUAL = ("activation_batch", "activation_norm_length", "activation_embed")


class Mixer(Protocol):
  """What mixes tokens of a sequence: its layer takes (x, context, cache, repeat) to (x, cache), has `cache_slots`."""

  @property
  def ropes(self) -> tuple[Rope, ...]: ...

  @property
  def attention_width(self) -> int: ...

  @property
  def window(self) -> int | None: ...

  def build(self, make: Make, width: int, how: How) -> Any: ...


class FeedForward(Protocol):
  """What works on each token alone: its layer takes x to (x, report)."""

  def build(self, make: Make, width: int, how: How) -> Any: ...


@dataclass(frozen=True)
class Block:
  """What one layer is made of."""

  mixer: Mixer
  feed_forward: FeedForward
  norm: Norm

  def build(self, make: Make, width: int, how: How) -> "DecoderBlock":
    """The layer."""
    return DecoderBlock(make, self, width, how)


class DecoderBlock(nnx.Module):
  """The pre-norm residual scheme."""

  def __init__(self, make: Make, spec: Block, width: int, how: How) -> None:
    self.how = how
    self.mixer_norm = RMSNorm(make.at("mixer_norm"), spec.norm, width)
    self.mixer = spec.mixer.build(make.at("mixer"), width, how)
    self.feed_forward_norm = RMSNorm(make.at("feed_forward_norm"), spec.norm, width)
    self.feed_forward = spec.feed_forward.build(make.at("feed_forward"), width, how)

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array], Cache | None]:
    """A layer of a `Stack`; a layer input (features of an image, say) joins the residual on entry."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + layer_input
    mixed, cache = self.mixer(self.mixer_norm(x), context, cache, repeat)
    x = self.how.shard(x + mixed, *RESIDUAL)
    fed, report = self.feed_forward(self.feed_forward_norm(x))
    return self.how.shard(x + fed, *RESIDUAL), report, cache

  def cache_slots(self, batch: int, length: int) -> dict[str, Slots]:
    """The cache of one layer."""
    return self.mixer.cache_slots(batch, length)
