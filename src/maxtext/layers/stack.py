"""The only place that loops over layers and decides on rematerialization: what they save for the backward pass.

A stack is R repeats of a short cycle of layers. Their parameters are stacked on dimension 0 whatever the loop, so a
checkpoint knows neither the loop nor the rematerialization.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig, RematSpec
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.param_factory import Buffer, ParamFactory, check_assigned
from maxtext.layers.pipeline import Pipeline, gathered, pipelined

Report = dict[str, jax.Array]


class DecoderLayer(Protocol):
  """A layer with its weights, one of a `Stack`."""

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    """The residual, a report, and the extended cache; `repeat` is the layer's row in stacked caches."""
    ...

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]: ...


class LayerSpec(Protocol):
  """What a stack is built from."""

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> DecoderLayer: ...


class _Kept(NamedTuple):
  """What one pass of a layer leaves behind besides x and the cache."""

  report: Report
  buffers: Any


class Stack(nnx.Module):
  """(x, per-layer inputs, per-token context, cache) to (x, per-layer reports, cache).

  Per-layer inputs and reports are lists over the cycle of pytrees with leading dimension R; a cache is a list over the
  cycle of arrays [R,...], carried through the loop and written in place. Buffers that layers assign to are updated.
  """

  def __init__(
    self,
    factory: ParamFactory,
    cycle: Sequence[LayerSpec],
    repeats: int,
    width: int,
    execution: ExecutionConfig,
    pipeline: Pipeline | None = None,
  ) -> None:
    assert repeats % len(execution.remat) == 0, "checked when the model is built"
    self.repeats, self.execution, self.pipeline = repeats, execution, pipeline
    self.layers = nnx.List(
      [spec.build(factory.scope("layers").scope(i, layers=repeats), width, execution) for i, spec in enumerate(cycle)]
    )

  def __call__(
    self, x: jax.Array, layer_inputs: list[Any] | None, context: Context, cache: list[Cache] | None
  ) -> tuple[jax.Array, list[Report], list[Cache] | None]:
    graphs, weights = zip(*(nnx.split(layer) for layer in self.layers), strict=True)
    inputs = [None] * len(graphs) if layer_inputs is None else layer_inputs
    if cache is None:
      passes = [
        [_remat(_pass(graph), policy, self.execution.scan_layers) for graph in graphs]
        for policy in self.execution.remat
      ]
    else:  # nothing is differentiated through a cache, so nothing is rematerialised with one
      passes = [[_pass(graph) for graph in graphs]]
    turns = len(passes)

    def turn(
      context: Context, carry: tuple[jax.Array, Any], xs: tuple[jax.Array, Any, Any]
    ) -> tuple[tuple[jax.Array, Any], Any]:
      (x, caches), (first, weights, inputs) = carry, xs
      kept: list[list[_Kept]] = []
      for t, cycle in enumerate(passes):
        own_weights, own_inputs = jax.tree.map(lambda w, t=t: w[t] if turns > 1 else w, (weights, inputs))
        kept.append([])
        for i, one in enumerate(cycle):
          x, caches[i], left = one(x, own_weights[i], own_inputs[i], context, caches[i], first + t)
          kept[t].append(left)
      return (x, caches), jax.tree.map(lambda *k: jnp.stack(k), *kept)

    def run(x: jax.Array, context: Context, layers: Any, caches: list[Any]) -> tuple[jax.Array, list[_Kept], list[Any]]:
      """Through consecutive layers, whose weights and inputs are stacked."""
      count = jax.tree.leaves(layers)[0].shape[0]
      # A CPU copies what is folded, even by one.
      folded = jax.tree.map(lambda w: w.reshape(count // turns, turns, *w.shape[1:]), layers) if turns > 1 else layers
      loop = jax.lax.scan if self.execution.scan_layers else _unrolled
      (x, caches), kept = loop(partial(turn, context), (x, caches), (jnp.arange(0, count, turns), *folded))
      return x, jax.tree.map(lambda w: w.reshape(count, *w.shape[2:]), kept), caches

    layers, empty = (weights, inputs), [None] * len(graphs)
    if self.pipeline is not None and cache is None:
      x, reports = self._through_stages(lambda x, c, layers: run(x, c, layers, empty)[:2], x, context, layers)
      return x, reports, None
    x, kept, caches = run(x, context, layers, empty if cache is None else list(cache))
    for layer, left in zip(self.layers, kept, strict=True):
      nnx.update(layer, left.buffers)
    return x, [left.report for left in kept], None if cache is None else caches

  def cache_specs(self, batch: int, length: int) -> list[dict[str, CacheSpec]]:
    """The cache of the stack."""
    return [{n: s.stacked(self.repeats) for n, s in layer.cache_specs(batch, length).items()} for layer in self.layers]

  def _through_stages(
    self, run: Callable[..., tuple[jax.Array, list[_Kept]]], x: jax.Array, context: Context, layers: Any
  ) -> tuple[jax.Array, list[Report]]:
    """The first layers in a pipeline, the others after it. Buffers that say how they are combined are updated."""
    assert self.pipeline is not None
    count = self.pipeline.repeats
    states = [nnx.state(layer, Buffer) for layer in self.layers]

    def outcome(x: jax.Array, context: Context, layers: Any) -> tuple[jax.Array, list[Report], list[jax.Array]]:
      x, kept = run(x, context, layers)
      return x, [left.report for left in kept], [v.get_value() for v in _assigned([left.buffers for left in kept])]

    variables = _assigned(states)
    before = [(v.get_value()[:count], v.combine) for v in variables]
    first, rest = (jax.tree.map(lambda w, cut=cut: w[cut], layers) for cut in (slice(count), slice(count, None)))
    x, reports, found = pipelined(
      self.pipeline, self.execution.sharding.mesh, outcome, x, context, first, self._ready, before
    )
    if count < self.repeats:
      x, more, others = outcome(x, context, rest)
      reports = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), reports, more)
      found = [jnp.concatenate([a, b]) for a, b in zip(found, others, strict=True)]
    for variable, value in zip(variables, found, strict=True):
      variable.set_value(value)
    for layer, state in zip(self.layers, states, strict=True):
      nnx.update(layer, state)
    return x, reports

  def _ready(self, layers: Any) -> Any:
    """Weights and inputs of a pipeline's layers, as its ticks take them."""
    assert self.pipeline is not None
    if not self.pipeline.gather_once:
      return layers

    def whole(weight: nnx.Variable) -> nnx.Variable:
      value = weight.get_value()
      return weight.replace(
        gathered(
          self.execution.sharding.mesh, self.execution.sharding.partition(value.shape[3:], *weight.axes[1:]), value
        )
      )

    weights, inputs = layers
    return jax.tree.map(whole, weights, is_leaf=lambda v: isinstance(v, nnx.Variable)), inputs


def _assigned(states: list[Any]) -> list[nnx.Variable]:
  """The buffers of a cycle that say how their values are combined."""
  flat = (variable for state in states for _, variable in nnx.to_flat_state(state))
  return [variable for variable in flat if variable.combine is not None]


def _pass(graph: Any) -> Callable[..., tuple[jax.Array, Cache | None, _Kept]]:
  """One layer as a function of its arguments alone, with nothing closed over, so that it may be a pipeline's stage."""

  def run(
    x: jax.Array, weights: Any, layer_input: Any, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None, _Kept]:
    layer = nnx.merge(graph, weights)
    before = [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(layer, Buffer))]
    x, report, cache = layer(x, layer_input, context, cache, repeat)
    buffers = nnx.state(layer, Buffer)
    for (path, variable), value in zip(nnx.to_flat_state(buffers), before, strict=True):
      check_assigned(path, value, variable)
    return x, cache, _Kept(report, buffers)

  return run


def _remat(run: Callable, policy: RematSpec, scanned: bool) -> Callable:
  keep = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=policy.saved,
    names_which_can_be_offloaded=policy.offloaded,
    offload_src="device",
    offload_dst="pinned_host",
  )
  # Inside a loop the compiler cannot merge the recomputation with the forward pass, so it needs no barrier.
  return jax.checkpoint(run, policy=keep, prevent_cse=not scanned)


def _unrolled(body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
  """`jax.lax.scan` as a Python loop. Splitting once, instead of slicing per layer, keeps the gradient one concatenation
  instead of a sum of padded stacks."""
  leaves, tree = jax.tree.flatten(xs)
  count = leaves[0].shape[0]
  pieces = [jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves]
  outs = []
  for i in range(count):
    carry, out = body(carry, jax.tree.unflatten(tree, [p[i][0] for p in pieces]))
    outs.append(out)
  return carry, jax.tree.map(lambda *o: jnp.stack(o), *outs)
