"""The only place that loops over layers and decides what they keep for the backward pass.

A stack is R repeats of a short cycle of layers. Their parameters are stacked on dimension 0 whatever the loop, so a
checkpoint knows neither the loop nor the rematerialisation.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.cache import Cache
from maxtext.layers.context import Context
from maxtext.layers.how import How, Remat
from maxtext.layers.make import Make

Report = dict[str, jax.Array]


class LayerSpec(Protocol):
  """What a stack is built from."""

  def build(self, make: Make, width: int, how: How) -> Any:
    """A layer: (x, layer_input, context, cache, repeat) to (x, report, cache), with `cache_shapes`."""
    ...


class Stack(nnx.Module):
  """(x, per-layer inputs, per-token context, cache) to (x, per-layer reports, cache).

  Per-layer inputs and reports are lists over the cycle of pytrees with leading dimension R; a cache is a list over the
  cycle of arrays [R,...], carried through the loop and written in place.
  """

  def __init__(self, make: Make, cycle: Sequence[LayerSpec], repeats: int, width: int, how: How) -> None:
    assert repeats % len(how.remat) == 0, "checked with the configuration"
    self.repeats, self.how = repeats, how
    self.layers = nnx.List([spec.build(make.at("layers").at(i, repeats), width, how) for i, spec in enumerate(cycle)])

  def __call__(
    self, x: jax.Array, layer_inputs: Any, context: Context, cache: list[Cache] | None
  ) -> tuple[jax.Array, list[Report], list[Cache] | None]:
    graph, weights = nnx.split(self.layers)
    turns = len(self.how.remat)

    def cycle(
      x: jax.Array, weights: Any, layer_inputs: Any, context: Context, cache: list[Cache] | None, repeat: jax.Array
    ) -> tuple[jax.Array, list[Report], list[Cache] | None]:
      reports, caches = [], []
      for i, layer in enumerate(nnx.merge(graph, weights)):
        own_input = None if layer_inputs is None else layer_inputs[i]
        x, report, own_cache = layer(x, own_input, context, None if cache is None else cache[i], repeat)
        reports.append(report)
        caches.append(own_cache)
      return x, reports, None if cache is None else caches

    # Nothing is differentiated through a cache, so nothing is rematerialised with one.
    steps = [cycle if cache is not None else _remat(cycle, policy, self.how.scan) for policy in self.how.remat]

    def turn(carry: tuple[jax.Array, Any], xs: tuple[jax.Array, Any, Any]) -> tuple[tuple[jax.Array, Any], Any]:
      (x, cache), (first, weights, layer_inputs) = carry, xs
      reports = []
      for i, step in enumerate(steps):
        own_weights, own_inputs = (jax.tree.map(lambda w, i=i: w[i], tree) for tree in (weights, layer_inputs))
        x, report, cache = step(x, own_weights, own_inputs, context, cache, first + i)
        reports.append(report)
      return (x, cache), jax.tree.map(lambda *r: jnp.stack(r), *reports)

    def fold(w: jax.Array) -> jax.Array:
      return w.reshape(self.repeats // turns, turns, *w.shape[1:])

    def unfold(w: jax.Array) -> jax.Array:
      return w.reshape(self.repeats, *w.shape[2:])

    xs = (jnp.arange(0, self.repeats, turns), *jax.tree.map(fold, (weights, layer_inputs)))
    loop = jax.lax.scan if self.how.scan else _unrolled
    (x, cache), reports = loop(turn, (x, cache), xs)
    return x, jax.tree.map(unfold, reports), cache

  def cache_shapes(self, batch: int, length: int) -> list[dict[str, tuple[int, ...]]]:
    """The cache of the stack."""
    return [{n: (self.repeats, *s) for n, s in layer.cache_shapes(batch, length).items()} for layer in self.layers]


def _remat(step: Callable, policy: Remat, scanned: bool) -> Callable:
  keep = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=policy.saved,
    names_which_can_be_offloaded=policy.offloaded,
    offload_src="device",
    offload_dst="pinned_host",
  )
  # Inside a loop the compiler cannot merge the recomputation with the forward pass, so it needs no barrier.
  return jax.checkpoint(step, policy=keep, prevent_cse=not scanned)


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
