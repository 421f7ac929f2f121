"""The front end of an audio encoder: chunks of a mel spectrogram to tokens.

Shapes: N inputs, C chunks of an input, T tokens of a chunk, W width of the tower.
"""

from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.embedding import sinusoids
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.param_factory import ParamFactory

_SIZE = 3  # of a convolution, along both axes


def halved(size: int, times: int) -> int:
  """What convolutions of stride 2 leave of a number of frames or bins, rounded up each time."""
  return reduce(lambda left, _: (left + 1) // 2, range(times), size)


@dataclass(frozen=True)
class MelConvolutions:
  """Convolutions of stride 2 over bins and frames of each chunk, a projection, and sinusoidal positions in the chunk.

  Attributes:
    bins: of the mel spectrogram.
    channels: of the convolutions.
    count: of convolutions.
    longest: wavelength of the positions, divided by 2 pi.
    at_once: chunks that are convolved together, which bounds memory.
  """

  bins: int
  channels: int
  count: int
  longest: float = 1e4
  at_once: int = 500

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "MelTokens":
    """[N,C,bins,frames] to [N,C*T,W]."""
    return MelTokens(factory, self, width, execution)


class MelTokens(nnx.Module):
  """The layer of `MelConvolutions`."""

  def __init__(self, factory: ParamFactory, spec: MelConvolutions, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    convolutions = factory.scope("convolutions")
    sizes = (1, *[spec.channels] * (spec.count - 1))
    self.convolutions = nnx.List(
      [Convolution(convolutions.scope(i), size, spec.channels) for i, size in enumerate(sizes)]
    )
    rows = {"narrow": spec.channels * halved(spec.bins, spec.count)}
    self.out = Linear(factory.scope("out"), rows, {"embed": width}, execution, "patch_proj")

  def __call__(self, x: jax.Array) -> jax.Array:
    inputs, chunks, bins, frames = x.shape
    x = x.reshape(inputs * chunks, 1, bins, frames)
    if len(x) <= self.spec.at_once:
      x = self._convolved(x)
    else:
      x = jax.lax.map(lambda chunk: self._convolved(chunk[None])[0], x, batch_size=self.spec.at_once)
    x = self.out(x.transpose(0, 3, 1, 2).reshape(x.shape[0], x.shape[3], -1))
    places = jnp.arange(x.shape[1])[None]
    x = x + sinusoids(places, x.shape[2], x.dtype, self.spec.longest)
    return x.reshape(inputs, -1, x.shape[2])

  def _convolved(self, x: jax.Array) -> jax.Array:
    for convolution in self.convolutions:
      x = ACTIVATIONS["exact gelu"](convolution(x))
    return x


class Convolution(nnx.Module):
  """A convolution of stride 2 with zeros around its input [N,channels,rows,columns]."""

  def __init__(self, factory: ParamFactory, in_channels: int, out_channels: int) -> None:
    shape = (out_channels, in_channels, _SIZE, _SIZE)
    self.kernel = factory("kernel", shape, (None,) * 4, std=(in_channels * _SIZE**2) ** -0.5)
    self.bias = factory("bias", (out_channels,), (None,))

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel, bias = (a[...].astype(x.dtype) for a in (self.kernel, self.bias))
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), ((1, 1), (1, 1))) + bias[:, None, None]
