"""One decoder layer: a mixer over the sequence, then a feed-forward layer, each normed and added to the residual."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.cache import Cache, Slots
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.make import Buffer, Make
from maxtext.layers.norm import AnyNorm
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


class Layer(Protocol):
  """What a decoder is a stack of; it is built like `stack.LayerSpec`s are."""

  @property
  def mixer(self) -> Mixer: ...

  @property
  def feed_forward(self) -> FeedForward: ...

  def build(self, make: Make, width: int, how: How) -> Any: ...


@dataclass(frozen=True)
class Block:
  """What one layer is made of: x + after(mixer(before(x))), then the same with the feed-forward layer.

  Attributes:
    norm: of what enters a branch; None is none.
    mixer_post_norm: of what leaves the mixer, `feed_forward_post_norm`: the feed-forward layer; None is none.
    feed_forward_norms_itself: what enters the feed-forward layer is not normed here.
    output_scale: the layer's output is multiplied by a number of its own, which no gradient touches.
  """

  mixer: Mixer
  feed_forward: FeedForward
  norm: AnyNorm | None
  mixer_post_norm: AnyNorm | None = None
  feed_forward_post_norm: AnyNorm | None = None
  feed_forward_norms_itself: bool = False
  output_scale: bool = False

  def build(self, make: Make, width: int, how: How) -> "DecoderBlock":
    """The layer."""
    return DecoderBlock(make, self, width, how)


class DecoderBlock(nnx.Module):
  """Two residual branches, normed on either side as the spec says."""

  def __init__(self, make: Make, spec: Block, width: int, how: How) -> None:
    self.how = how

    def norm(spec: AnyNorm | None, name: str) -> Any:
      return None if spec is None else spec.build(make.at(name), width)

    self.mixer_norm = norm(spec.norm, "mixer_norm")
    self.mixer = spec.mixer.build(make.at("mixer"), width, how)
    self.mixer_post_norm = norm(spec.mixer_post_norm, "mixer_post_norm")
    self.feed_forward_norm = norm(None if spec.feed_forward_norms_itself else spec.norm, "feed_forward_norm")
    self.feed_forward = spec.feed_forward.build(make.at("feed_forward"), width, how)
    self.feed_forward_post_norm = norm(spec.feed_forward_post_norm, "feed_forward_post_norm")
    self.output_scale = make("output_scale", (1,), (None,), fill=1.0, kind=Buffer) if spec.output_scale else None

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array], Cache | None]:
    """A layer of a `Stack`; a layer input (features of an image, say) joins the residual on entry."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + layer_input
    mixed, cache = self.mixer(_normed(self.mixer_norm, x), context, cache, repeat)
    x = self.how.shard(x + _normed(self.mixer_post_norm, mixed), *RESIDUAL)
    fed, report = self.feed_forward(_normed(self.feed_forward_norm, x))
    x = x + _normed(self.feed_forward_post_norm, fed)
    if self.output_scale is not None:
      x = x * self.output_scale[...].astype(x.dtype)
    return self.how.shard(x, *RESIDUAL), report, cache

  def cache_slots(self, batch: int, length: int) -> dict[str, Slots]:
    """The cache of one layer."""
    return self.mixer.cache_slots(batch, length)


def _normed(norm: Any, x: jax.Array) -> jax.Array:
  return x if norm is None else norm(x)
