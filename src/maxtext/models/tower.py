"""Encoders of images or audio whose features are input to a decoder.

Shapes: N inputs (all images of a batch), T tokens of an input, W width of the tower, E width of the decoder.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.block import RESIDUAL
from maxtext.layers.context import Context
from maxtext.layers.embedding import AxisPositions, Positions
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.stack import Stack
from maxtext.models.spec import TowerSpec


class Tower(nnx.Module):
  """Encodes inputs to features of the decoder's width."""

  def __init__(self, factory: ParamFactory, spec: TowerSpec, out_width: int, execution: ExecutionConfig) -> None:
    execution = _execution(execution, spec)
    self.spec, self.execution = spec, execution
    self.front_end = spec.front_end.build(factory.scope("front_end"), spec.width, execution)
    rows = spec.length if spec.learned_positions else spec.position_grid and spec.position_grid**2
    self.positions = None if rows is None else Positions(factory.scope("positions"), rows, spec.width, execution)
    axes = spec.axis_positions
    self.axes = None if axes is None else AxisPositions(factory.scope("axes"), axes, spec.width, execution)
    self.class_token = factory("class_token", (spec.width,), ("norm",), std=0.02) if spec.class_token else None
    self.first_norm = (
      None if spec.first_norm is None else spec.first_norm.build(factory.scope("first_norm"), spec.width)
    )
    groups = factory.scope("groups")
    self.groups = nnx.List(
      [Stack(groups.scope(i), group.cycle, group.repeats, spec.width, execution) for i, group in enumerate(spec.groups)]
    )
    self.final_norm = (
      None if spec.final_norm is None else spec.final_norm.build(factory.scope("final_norm"), spec.width)
    )
    adapter = spec.adapter
    self.adapter = None if adapter is None else adapter.build(factory.scope("adapter"), spec.width, execution)
    width = spec.width if adapter is None else adapter.out_width
    self.projector = spec.projector.build(factory.scope("projector"), width, out_width, execution)
    deepstack, early = factory.scope("deepstack"), spec.deepstack_projector or spec.projector
    self.deepstack = nnx.List(
      [early.build(deepstack.scope(i), spec.width, out_width, execution) for i, _ in enumerate(spec.deepstack)]
    )

  def __call__(
    self,
    inputs: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    grid: jax.Array | None = None,
  ) -> jax.Array:
    """Encodes inputs [N,...] to features [N,T',E] of the last layer; see `features`."""
    return self.features(inputs, positions, segments, rotary_positions, grid)[0]

  def features(
    self,
    inputs: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    grid: jax.Array | None = None,
  ) -> list[jax.Array]:
    """Returns the features [N,T',E] of the last layer, then those of the groups in `TowerSpec.deepstack`.

    Args:
      inputs: [N,...], in the shape that the front end takes.
      positions: [N,T] of tokens, None means 0, 1, 2, ...; or [N,T,2] of patches, row and column in their image.
      segments: [N,T]; tokens attend only within their segment. Use it for padding or for several inputs in a row.
      rotary_positions: [N,T], or [N,T,C] with C components, if RoPE uses other positions than `positions`.
      grid: [N,T,2] rows and columns of the image of each patch, for `TowerSpec.position_grid`.
    """
    execution, spec = self.execution, self.spec
    x = self.front_end(inputs.astype(execution.numerics.dtype))
    if self.class_token is not None:
      token = self.class_token[...].astype(x.dtype)
      x = jnp.concatenate([x, jnp.broadcast_to(token, (x.shape[0], 1, spec.width))], axis=1)
    if x.shape[1] > spec.length and not spec.any_size:
      raise ValueError(f"tower {spec.name}: an input has {x.shape[1]} tokens, and at most {spec.length} are expected.")
    places = positions
    if positions is None or positions.ndim == 3:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    if self.axes is not None:
      if places is None or places.ndim != 3:
        raise ValueError(f"tower {spec.name}: images of any size need `positions` [N,T,2].")
      places = places[..., ::-1]
      x = x + self.axes(places)
    if rotary_positions is None and spec.ropes:
      rotary_positions = places if spec.rotary_grid is None else _grid_positions(spec.rotary_grid, *x.shape[:2])
    context = Context.of(positions, segments, spec.ropes, execution.numerics.dtype, rotary_positions=rotary_positions)
    if self.positions is not None:
      x = x + (
        self.positions(positions)
        if spec.position_grid is None
        else self.positions.resampled(_resampled_places(spec, places, grid), spec.position_grid)
      )
    if self.first_norm is not None:
      x = self.first_norm(x)
    x, outputs = execution.sharding.constrain(x, *RESIDUAL), {}
    for i, group in enumerate(self.groups):
      x, _, _ = group(x, None, context, None)
      outputs[i] = x
    last = x if self.final_norm is None else self.final_norm(x)
    if self.class_token is not None:
      last = last[:, :-1]
    if self.adapter is not None:
      last = self.adapter(last)
    deepstack = zip(self.deepstack, spec.deepstack, strict=True)
    found = [self.projector(last), *(projector(outputs[i]) for projector, i in deepstack)]
    return [execution.sharding.constrain(features, *RESIDUAL) for features in found]


def _resampled_places(spec: TowerSpec, places: jax.Array | None, grid: jax.Array | None) -> jax.Array:
  """Where patches [N,T,2] of their images are in the table of positions, whose corners are those of an image."""
  if spec.position_grid is None or places is None or places.ndim != 3 or grid is None:
    raise ValueError(f"tower {spec.name}: images of any size need `positions` [N,T,2] and `grid` [N,T,2].")
  return places.astype(jnp.float32) * (spec.position_grid - 1) / jnp.maximum(grid - 1, 1)


def _grid_positions(side: int, inputs: int, tokens: int) -> jax.Array:
  """Column and row from 1 of the tokens of a square grid, and zeros after it, [N,T,2]."""
  number = jnp.arange(tokens, dtype=jnp.int32)
  places = jnp.stack([number % side + 1, number // side + 1], axis=-1)
  return jnp.broadcast_to(jnp.where((number < side**2)[:, None], places, 0), (inputs, tokens, 2))


def _execution(execution: ExecutionConfig, spec: TowerSpec) -> ExecutionConfig:
  """The decoder's execution changed for a tower: its own dtype and remat, no pipeline, no token reordering, splash
  only if its blocks fit."""
  attention, parts = (
    replace(execution.kernels.attention, order=None),
    execution.sharding.rules.num_shards(execution.sharding.mesh, "activation_length"),
  )
  fits = not spec.any_size and attention.blocks.fit(spec.length // parts, spec.length)
  if attention.kernel == "splash" and not fits:
    attention = replace(attention, kernel="chunked")
  return execution.replace(
    attention=attention,
    dtype=execution.tower_dtype or execution.numerics.dtype,
    pipelines=(),
    batch_split=1,
    remat=(execution.tower_remat or execution.remat[0],),
    keep_mixer_outputs=False,
    measure_activations=False,
  )
