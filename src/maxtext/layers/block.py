"""One decoder layer: a mixer over the sequence, then a feed-forward layer, each in a residual branch with norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.context import Context
from maxtext.layers.dropout import dropout
from maxtext.layers.engram import EngramMemory
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.hyper_connections import HyperConnections, HyperConnectionWeights, branch_input, rejoined
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.norm import NormLayer, NormSpec
from maxtext.layers.param_factory import Buffer, ParamFactory
from maxtext.layers.rope import RotaryEmbedding
from maxtext.layers.stack import LayerSpec, Report

ACTIVATION_RMS = "activation_rms"
"""Begins the names of the auxiliary outputs that `ExecutionConfig.measure_activations` asks for."""
MIXER_OUTPUT = "mixer_output"
"""The auxiliary output [B,S,E] of a layer that `ExecutionConfig.keep_mixer_outputs` asks for."""
RESIDUAL = ("activation_batch", "activation_norm_length", "activation_embed")
_Other = TypeVar("_Other")
_STREAMS = ("activation_batch", "activation_norm_length", None, "activation_embed")


class MixerLayer(Protocol):
  """A mixer with its weights."""

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    """The output, auxiliary outputs, and the updated cache."""
    ...

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]: ...


class FeedForwardLayer(Protocol):
  """A feed-forward layer with its weights."""

  def __call__(
    self, x: jax.Array, real: jax.Array | None = None, replayed: jax.Array | None = None
  ) -> tuple[jax.Array, Report]:
    """The output and auxiliary outputs; `real` says which tokens are not padding, None means all, and `replayed` to
    which experts they are routed, None leaves that to the layer."""
    ...


class Mixer(Protocol):
  """The spec of a mixer: attention, or another layer that mixes the tokens of a sequence."""

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]: ...

  @property
  def attention_width(self) -> int: ...

  @property
  def window(self) -> int | None: ...

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> MixerLayer: ...


class FeedForward(Protocol):
  """The spec of a feed-forward layer, which processes each token by itself."""

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> FeedForwardLayer: ...


class Layer(LayerSpec, Protocol):
  """The spec of a decoder layer."""

  @property
  def mixer(self) -> Mixer: ...

  @property
  def feed_forward(self) -> FeedForward: ...


@dataclass(frozen=True)
class Block:
  """The spec of one layer: x + post_norm(mixer(norm(x))), then the same with the feed-forward layer.

  Attributes:
    norm: of the input of each branch; None for no norm.
    mixer_post_norm: of the mixer's output, `feed_forward_post_norm`: of the feed-forward layer's; None for no norm.
    feed_forward_norms_itself: the feed-forward layer has its own norm, so its input is not normalized here.
    output_scale: the layer's output is multiplied by a scalar buffer, which gets no gradient.
    streams: hyper-connections between several residual streams; None for a single residual.
    memory: n-gram memory that is added to the residual before the mixer; None for no memory.
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
  """Two residual branches, with the norms of the spec."""

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
    """A layer of a `Stack`; a layer input (such as image features) is added to the residual first."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + (layer_input if self.mixer_streams is None else layer_input[..., None, :])
    if self.memory is not None:
      streams = x if self.mixer_streams is not None else x[:, :, None]
      found, cache = self.memory(streams, context, cache, repeat)
      x = x + found.reshape(x.shape)

    def mix(x: jax.Array) -> tuple[jax.Array, tuple[Report, Cache | None]]:
      mixed, aux, updated = self.mixer(_apply_norm(self.mixer_norm, x), context, cache, repeat)
      if self.execution.keep_mixer_outputs:
        aux = aux | {MIXER_OUTPUT: mixed}
      y = _apply_norm(self.mixer_post_norm, mixed)
      return y, (aux | self._measured("mixer", y, context.real), updated)

    def feed(x: jax.Array) -> tuple[jax.Array, Report]:
      fed, aux = self.feed_forward(_apply_norm(self.feed_forward_norm, x), context.real, context.routed_experts)
      y = _apply_norm(self.feed_forward_post_norm, fed)
      return y, aux | self._measured("feed_forward", y, context.real)

    x, (mixer_aux, updated) = self._add_branch(self.mixer_streams, x, mix, context, 0)
    x, aux = self._add_branch(self.feed_forward_streams, x, feed, context, 1)
    if self.output_scale is not None:
      x = x * self.output_scale[...].astype(x.dtype)
    return x, mixer_aux | aux | self._measured("residual", x, context.real), updated

  def _measured(self, what: str, x: jax.Array, real: jax.Array | None) -> Report:
    """The root mean square of activations [B,S,...] over tokens that are not padding."""
    if not self.execution.measure_activations:
      return {}
    squares = jnp.square(x.astype(jnp.float32)).reshape(*x.shape[:2], -1).mean(-1)
    mean = squares.mean() if real is None else (squares * real).sum() / jnp.maximum(real.sum(), 1)
    return {f"{ACTIVATION_RMS}_{what}": jnp.sqrt(mean)}

  def _add_branch(
    self,
    streams: HyperConnectionWeights | None,
    x: jax.Array,
    branch: Callable[[jax.Array], tuple[jax.Array, _Other]],
    context: Context,
    number: int,
  ) -> tuple[jax.Array, _Other]:
    """The residual, one stream or several, after a branch with dropout; and the second result of the branch."""
    keys, rate = context.dropout_keys, self.execution.dropout_rate
    if streams is None:
      y, other = branch(x)
      y = dropout(y, keys, rate, number)
      return self.execution.sharding.constrain(x + y, *RESIDUAL), other
    read, write, mix = streams(x)
    y, other = branch(self.execution.sharding.constrain(branch_input(x, read), *RESIDUAL))
    y = dropout(y, keys, rate, number)
    return self.execution.sharding.constrain(rejoined(x, y, write, mix), *_STREAMS), other

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    own = {} if self.memory is None else self.memory.cache_specs(batch)
    return self.mixer.cache_specs(batch, length) | own


def _apply_norm(norm: NormLayer | None, x: jax.Array) -> jax.Array:
  return x if norm is None else norm(x)
