"""One decoder layer: a mixer over the sequence, then a feed-forward layer, each normed and added to the residual."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.context import Context
from maxtext.layers.engram import EngramMemory
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.hyper_connections import HyperConnections, HyperConnectionWeights, branch_input, rejoined
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.norm import NormLayer, NormSpec
from maxtext.layers.param_factory import Buffer, ParamFactory
from maxtext.layers.rope import RotaryEmbedding
from maxtext.layers.stack import LayerSpec, Report

RESIDUAL = ("activation_batch", "activation_norm_length", "activation_embed")
_Other = TypeVar("_Other")
_STREAMS = ("activation_batch", "activation_norm_length", None, "activation_embed")


class MixerLayer(Protocol):
  """A mixer with its weights."""

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    """The mixed tokens and the extended cache."""
    ...

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]: ...


class FeedForwardLayer(Protocol):
  """A feed-forward layer with its weights."""

  def __call__(self, x: jax.Array, real: jax.Array | None = None) -> tuple[jax.Array, Report]:
    """The output and a report; `real` says which tokens are no padding, None that all are."""
    ...


class Mixer(Protocol):
  """What mixes tokens of a sequence."""

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]: ...

  @property
  def attention_width(self) -> int: ...

  @property
  def window(self) -> int | None: ...

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> MixerLayer: ...


class FeedForward(Protocol):
  """What works on each token alone."""

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> FeedForwardLayer: ...


class Layer(LayerSpec, Protocol):
  """What a decoder is a stack of."""

  @property
  def mixer(self) -> Mixer: ...

  @property
  def feed_forward(self) -> FeedForward: ...


@dataclass(frozen=True)
class Block:
  """What one layer is made of: x + after(mixer(before(x))), then the same with the feed-forward layer.

  Attributes:
    norm: of what enters a branch; None is none.
    mixer_post_norm: of what leaves the mixer, `feed_forward_post_norm`: the feed-forward layer; None is none.
    feed_forward_norms_itself: what enters the feed-forward layer is not normed here.
    output_scale: the layer's output is multiplied by a number of its own, which no gradient touches.
    streams: the residual is several streams; None is one.
    memory: joins the residual on entry; None is none.
  """

  mixer: Mixer
  feed_forward: FeedForward
  norm: NormSpec | None
  mixer_post_norm: NormSpec | None = None
  feed_forward_post_norm: NormSpec | None = None
  feed_forward_norms_itself: bool = False
  output_scale: bool = False
  streams: HyperConnections | None = None
  memory: EngramMemory | None = None

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "DecoderBlock":
    """The layer."""
    return DecoderBlock(factory, self, width, execution)


class DecoderBlock(nnx.Module):
  """Two residual branches, normed on either side as the spec says."""

  def __init__(self, factory: ParamFactory, spec: Block, width: int, execution: ExecutionConfig) -> None:
    self.execution = execution

    def norm(spec: NormSpec | None, name: str) -> NormLayer | None:
      return None if spec is None else spec.build(factory.scope(name), width)

    self.mixer_norm = norm(spec.norm, "mixer_norm")
    self.mixer = spec.mixer.build(factory.scope("mixer"), width, execution)
    self.mixer_post_norm = norm(spec.mixer_post_norm, "mixer_post_norm")
    self.feed_forward_norm = norm(None if spec.feed_forward_norms_itself else spec.norm, "feed_forward_norm")
    self.feed_forward = spec.feed_forward.build(factory.scope("feed_forward"), width, execution)
    self.feed_forward_post_norm = norm(spec.feed_forward_post_norm, "feed_forward_post_norm")
    streams = spec.streams
    self.mixer_streams = None if streams is None else streams.build(factory.scope("mixer_streams"), width, execution)
    self.feed_forward_streams = (
      None if streams is None else streams.build(factory.scope("feed_forward_streams"), width, execution)
    )
    self.memory = None if spec.memory is None else spec.memory.build(factory.scope("memory"), width, execution)
    self.output_scale = factory("output_scale", (1,), (None,), fill=1.0, kind=Buffer) if spec.output_scale else None

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array], Cache | None]:
    """A layer of a `Stack`; a layer input (features of an image, say) joins the residual on entry."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + (layer_input if self.mixer_streams is None else layer_input[..., None, :])
    if self.memory is not None:
      streams = x if self.mixer_streams is not None else x[:, :, None]
      found, cache = self.memory(streams, context, cache, repeat)
      x = x + found.reshape(x.shape)

    def mix(x: jax.Array) -> tuple[jax.Array, Cache | None]:
      mixed, extended = self.mixer(_normed(self.mixer_norm, x), context, cache, repeat)
      return _normed(self.mixer_post_norm, mixed), extended

    def feed(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
      fed, report = self.feed_forward(_normed(self.feed_forward_norm, x), context.real)
      return _normed(self.feed_forward_post_norm, fed), report

    x, extended = self._joined(self.mixer_streams, x, mix)
    x, report = self._joined(self.feed_forward_streams, x, feed)
    if self.output_scale is not None:
      x = x * self.output_scale[...].astype(x.dtype)
    return x, report, extended

  def _joined(
    self, streams: HyperConnectionWeights | None, x: jax.Array, branch: Callable[[jax.Array], tuple[jax.Array, _Other]]
  ) -> tuple[jax.Array, _Other]:
    """The residual, one stream or several, after a branch; and what else the branch returned."""
    if streams is None:
      y, other = branch(x)
      return self.execution.sharding.constrain(x + y, *RESIDUAL), other
    read, write, mix = streams(x)
    y, other = branch(self.execution.sharding.constrain(branch_input(x, read), *RESIDUAL))
    return self.execution.sharding.constrain(rejoined(x, y, write, mix), *_STREAMS), other

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    own = {} if self.memory is None else self.memory.cache_specs(batch)
    return self.mixer.cache_specs(batch, length) | own


def _normed(norm: NormLayer | None, x: jax.Array) -> jax.Array:
  return x if norm is None else norm(x)
