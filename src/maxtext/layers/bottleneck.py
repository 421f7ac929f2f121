"""A bottleneck decoder layer: one residual branch, whose feed-forward layer is narrower than the residual."""

from dataclasses import dataclass

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.attention import GQA
from maxtext.layers.block import RESIDUAL, FeedForward
from maxtext.layers.context import Context
from maxtext.layers.dropout import dropout
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.linear import Linear
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory


@dataclass(frozen=True)
class Bottleneck:
  """x + out(feed_forward(norm(mixer(norm(x))))); the mixer's `out_width` is the width of the feed-forward layer."""

  mixer: GQA
  feed_forward: FeedForward
  norm: RMSNormSpec

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "BottleneckBlock":
    """The layer."""
    return BottleneckBlock(factory, self, width, execution)


class BottleneckBlock(nnx.Module):
  """The layer of `Bottleneck`."""

  def __init__(self, factory: ParamFactory, spec: Bottleneck, width: int, execution: ExecutionConfig) -> None:
    self.execution, narrow = execution, spec.mixer.out_width or width
    self.mixer_norm = spec.norm.build(factory.scope("mixer_norm"), width)
    self.mixer = spec.mixer.build(factory.scope("mixer"), width, execution)
    self.feed_forward_norm = spec.norm.build(factory.scope("feed_forward_norm"), narrow)
    self.feed_forward = spec.feed_forward.build(factory.scope("feed_forward"), narrow, execution)
    self.out = Linear(factory.scope("out"), {"narrow": narrow}, {"embed": width}, execution, "out_proj")

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array], Cache | None]:
    """A layer of a `Stack`."""
    x = checkpoint_name(x, "decoder_layer_input")
    if layer_input is not None:
      x = x + layer_input
    mixed, mixer_aux, cache = self.mixer(self.mixer_norm(x), context, cache, repeat)
    fed, aux = self.feed_forward(self.feed_forward_norm(mixed), context.real, context.routed_experts)
    y = dropout(self.out(fed), context.dropout_keys, self.execution.dropout_rate)
    return self.execution.sharding.constrain(x + y, *RESIDUAL), mixer_aux | aux, cache

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    return self.mixer.cache_specs(batch, length)
