"""The only place that loops over layers and applies rematerialization, which decides what the backward pass saves.

A stack is R repeats of a short cycle of layers. Their parameters are stacked on dimension 0 whatever the loop, so
checkpoints depend neither on the loop nor on rematerialization.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.batch_split import join_rows, over_parts, split_rows
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig, RematSpec, Sharding
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.param_factory import Buffer, ParamFactory, check_assigned
from maxtext.layers.pipeline import Pipeline, gathered, pipelined

Report = dict[str, jax.Array]


class DecoderLayer(Protocol):
  """A layer with its weights, one of a `Stack`."""

  def __call__(
    self, x: jax.Array, layer_input: jax.Array | None, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    """The residual, auxiliary outputs, and the updated cache; `repeat` is the layer's index in stacked caches."""
    ...

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]: ...


class LayerSpec(Protocol):
  """The spec of a layer of a stack."""

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> DecoderLayer: ...


class _LayerResults(NamedTuple):
  """The results of one layer besides x and the cache."""

  aux: Report
  buffers: Any


class Stack(nnx.Module):
  """(x, per-layer inputs, per-token context, cache) to (x, per-layer auxiliary outputs, cache).

  Per-layer inputs and auxiliary outputs are lists over the cycle of pytrees with leading dimension R; a cache is a list
  over the cycle of arrays [R,...], carried through the loop and updated in place. Buffers that layers assign to are
  updated.
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
    split = cache is None and self.pipeline is None and self.execution.splits_batch(x.shape[0])
    if cache is None:
      wrap = over_parts if split else lambda layer: layer
      passes = [
        [wrap(_remat(_pass(graph), policy, self.execution.scan_layers)) for graph in graphs]
        for policy in self.execution.remat
      ]
    else:  # there are no gradients through a cache, so no rematerialization
      passes = [[_pass(graph) for graph in graphs]]
    policies = len(passes)

    def body(
      context: Context, carry: tuple[jax.Array, Any], xs: tuple[jax.Array, Any, Any, Any]
    ) -> tuple[tuple[jax.Array, Any], Any]:
      (x, caches), (first, *layers) = carry, xs
      results: list[list[_LayerResults]] = []
      for t, cycle in enumerate(passes):
        weights, inputs, numbers = jax.tree.map(lambda w, t=t: w[t] if policies > 1 else w, layers)
        results.append([])
        for i, one in enumerate(cycle):
          x, caches[i], result = one(
            x,
            _with_scattered_gradients(self.execution.sharding, weights[i]),
            inputs[i],
            context,
            caches[i],
            first + t,
            numbers[i],
          )
          results[t].append(result)
      return (x, caches), jax.tree.map(lambda *k: jnp.stack(k), *results)

    def run(x: Any, context: Any, layers: Any, caches: list[Any]) -> tuple[Any, list[_LayerResults], list[Any]]:
      """Runs consecutive layers, whose weights, inputs and numbers are stacked; `x` and `context` may be in parts."""
      count = jax.tree.leaves(layers)[0].shape[0]
      # On a CPU this reshape is a copy, even with one policy.
      folded = (
        jax.tree.map(lambda w: w.reshape(count // policies, policies, *w.shape[1:]), layers) if policies > 1 else layers
      )
      loop = jax.lax.scan if self.execution.scan_layers else _unrolled
      (x, caches), results = loop(partial(body, context), (x, caches), (jnp.arange(0, count, policies), *folded))
      return x, jax.tree.map(lambda w: w.reshape(count, *w.shape[2:]), results), caches

    # The place of each layer in the stack, for its context; it is data, since a pipeline stage has only its own layers.
    places = jnp.arange(self.repeats) * len(graphs) if context.differs_by_layer else None
    numbers = [None if places is None else places + i for i in range(len(graphs))]
    layers, empty = (weights, inputs, numbers), [None] * len(graphs)
    if self.pipeline is not None and cache is None:
      x, aux = self._through_stages(lambda x, c, layers: run(x, c, layers, empty)[:2], x, context, layers)
      return x, aux, None
    if split:
      parts = self.execution.batch_split
      layers = weights, [split_rows(a, parts, dim=1) for a in inputs], numbers
      split_x, results, caches = run(split_rows(x, parts), split_rows(context, parts), layers, empty)
      x = join_rows(split_x)
    else:
      x, results, caches = run(x, context, layers, empty if cache is None else list(cache))
    for layer, result in zip(self.layers, results, strict=True):
      nnx.update(layer, result.buffers)
    return x, [result.aux for result in results], None if cache is None else caches

  def cache_specs(self, batch: int, length: int) -> list[dict[str, CacheSpec]]:
    """The cache of the stack."""
    return [{n: s.stacked(self.repeats) for n, s in layer.cache_specs(batch, length).items()} for layer in self.layers]

  def _through_stages(
    self, run: Callable[..., tuple[jax.Array, list[_LayerResults]]], x: jax.Array, context: Context, layers: Any
  ) -> tuple[jax.Array, list[Report]]:
    """Runs the first layers in the pipeline, and the others after it. Buffers with a `combine` are updated."""
    assert self.pipeline is not None
    count = self.pipeline.repeats
    states = [nnx.state(layer, Buffer) for layer in self.layers]

    def outcome(x: jax.Array, context: Context, layers: Any) -> tuple[jax.Array, list[Report], list[jax.Array]]:
      x, results = run(x, context, layers)
      return (
        x,
        [result.aux for result in results],
        [v.get_value() for v in _assigned([result.buffers for result in results])],
      )

    variables = _assigned(states)
    before = [(v.get_value()[:count], v.combine) for v in variables]
    first, rest = (jax.tree.map(lambda w, cut=cut: w[cut], layers) for cut in (slice(count), slice(count, None)))
    x, aux, found = pipelined(
      self.pipeline, self.execution.sharding.mesh, outcome, x, context, first, self._gather_weights, before
    )
    if count < self.repeats:
      x, more, others = outcome(x, context, rest)
      aux = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), aux, more)
      found = [jnp.concatenate([a, b]) for a, b in zip(found, others, strict=True)]
    for variable, value in zip(variables, found, strict=True):
      variable.set_value(value)
    for layer, state in zip(self.layers, states, strict=True):
      nnx.update(layer, state)
    return x, aux

  def _gather_weights(self, layers: Any) -> Any:
    """Weights, inputs and numbers of a pipeline's layers; the weights gathered over FSDP where that is done once."""
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

    weights, *others = layers
    return jax.tree.map(whole, weights, is_leaf=lambda v: isinstance(v, nnx.Variable)), *others


def _with_scattered_gradients(sharding: Sharding, weights: Any) -> Any:
  """The weights of one layer; see `Sharding.with_scattered_gradient`."""

  def one(weight: nnx.Variable) -> nnx.Variable:
    if not isinstance(weight, nnx.Param):
      return weight
    return weight.replace(sharding.with_scattered_gradient(weight.get_value(), *weight.axes[1:]))

  return (
    jax.tree.map(one, weights, is_leaf=lambda v: isinstance(v, nnx.Variable)) if sharding.reduce_scatter else weights
  )


def _assigned(states: list[Any]) -> list[nnx.Variable]:
  """The buffers of a cycle with a `combine`."""
  flat = (variable for state in states for _, variable in nnx.to_flat_state(state))
  return [variable for variable in flat if variable.combine is not None]


def _pass(graph: Any) -> Callable[..., tuple[jax.Array, Cache | None, _LayerResults]]:
  """One layer as a function that closes over no array, so that it can run in a pipeline stage."""

  def run(
    x: jax.Array,
    weights: Any,
    layer_input: Any,
    context: Context,
    cache: Cache | None,
    repeat: jax.Array,
    number: jax.Array | None,
  ) -> tuple[jax.Array, Cache | None, _LayerResults]:
    layer = nnx.merge(graph, weights)
    before = [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(layer, Buffer))]
    x, aux, cache = layer(x, layer_input, context.of_layer(number), cache, repeat)
    buffers = nnx.state(layer, Buffer)
    for (path, variable), value in zip(nnx.to_flat_state(buffers), before, strict=True):
      check_assigned(path, value, variable)
    return x, cache, _LayerResults(aux, buffers)

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
