"""Expert parallelism: experts, and their hidden width, are sharded over devices, and tokens are sent to them.

Shapes: B batch, S sequence, K experts per token, E width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.expert_dispatch import Routing
from maxtext.layers.linear import Linear
from maxtext.layers.param_factory import Buffer, Combine, check_assigned
from maxtext.layers.pipeline import AXIS as STAGE
from maxtext.layers.weight_format import PlainFormat
from maxtext.mesh import explicit
from maxtext.mesh.rules import mesh_axes_of, num_shards_of

_HIDDEN = ("activation_batch", "activation_length", "activation_mlp")

# Logical axes of the experts' variables that stay sharded in the computation, and as what; others are gathered.
_COMPUTED = {"expert": "activation_expert", "expert_mlp": "activation_mlp"}


def expert_parallel(
  execution: ExecutionConfig,
  experts: nnx.Module,
  x: jax.Array,
  routing: Routing,
  count: int,
  hidden: int,
  run: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
  """The output [B,S,E] of x [B,S,E], and the number of dropped tokens on all devices.

  A device holds some of the experts, and a shard of their hidden width, as for a dense layer. With a ragged all-to-all,
  a token is sent to the devices of its experts and its outputs are sent back. Otherwise tokens are all-gathered from
  the devices that hold other experts, and outputs are reduce-scattered.

  Args:
    experts: the module, whose variables are sharded over the devices.
    count, hidden: number of experts and their hidden width.
    run: (module, x, routing, first expert, number of experts, shards of the width, mesh axes to send tokens over) to
      (x, dropped), on one device.
  """
  mesh = execution.sharding.mesh
  *tokens, widths = execution.sharding.partition((*x.shape[:2], hidden), *_HIDDEN)
  owners, parts = mesh_axes_of(execution.sharding.partition((count,), "activation_expert")[0]), mesh_axes_of(widths)
  holders = [mesh_axes_of(part) for part in tokens]
  travel = [tuple(axis for axis in axes if axis in owners) for axes in holders]
  summed = (*parts, *(axis for axis in owners if axis not in travel[0] + travel[1]))
  everyone = tuple(dict.fromkeys((*holders[0], *holders[1], *owners)))
  own = count // num_shards_of(mesh, owners)
  # Devices with different experts and the same tokens need no all-to-all.
  sent = owners if execution.kernels.experts.sends and set(owners) <= set(travel[0] + travel[1]) else ()
  if sent:
    travel = [(), ()]

  graph, state = nnx.split(experts)
  variables = nnx.to_flat_state(state)
  layers = {path: module for path, module in nnx.iter_graph(experts) if isinstance(module, Linear)}
  values = [_local_value(execution, layers, path, variable) for path, variable in variables]
  specs = [_specs(execution, variable, value) for (_, variable), value in zip(variables, values, strict=True)]
  buffers = [i for i, (_, variable) in enumerate(variables) if isinstance(variable, Buffer)]
  combined = [i for i in buffers if variables[i][1].combine is not None]

  def local(x: jax.Array, routing: Routing, values: list[jax.Array]) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    module = nnx.merge(graph, _rebuild(variables, values))
    first = jax.lax.axis_index(owners) * own if owners else 0
    for dim, axes in enumerate(travel):
      if axes:
        x, routing = jax.tree.map(lambda a, n=axes, d=dim: jax.lax.all_gather(a, n, axis=d, tiled=True), (x, routing))
    y, dropped = run(module, x, routing, first, own, num_shards_of(mesh, parts), sent)
    for dim, axes in enumerate(travel):
      if axes:
        y = jax.lax.psum_scatter(y, axes, scatter_dimension=dim, tiled=True)
    y = jax.lax.psum(y, summed) if summed else y
    dropped = jax.lax.psum(dropped, everyone) if everyone else dropped
    left = nnx.to_flat_state(nnx.state(module))
    for i in buffers:
      check_assigned(left[i][0], values[i], left[i][1])
    found = [
      _combined(variables[i][1].combine, values[i], left[i][1][...], specs[i], mesh.axis_names, holders[0] + holders[1])
      for i in combined
    ]
    return y, dropped, found

  spec = PartitionSpec(*tokens, None)
  if execution.sharding.explicit:  # reshard the inputs here; with auto axes the compiler does it
    x, routing = jax.tree.map(lambda a: explicit.reshard(a, mesh, spec), (x, routing))
    values = jax.tree.map(lambda a, own: explicit.reshard(a, mesh, own), values, specs)
  y, dropped, assigned = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(spec, spec, specs),
    out_specs=(spec, PartitionSpec(), [specs[i] for i in combined]),
    check_vma=False,
  )(x, routing, values)
  nnx.update(experts, _rebuild([variables[i] for i in combined], assigned))
  return y, dropped


def _rebuild(variables: list[Any], values: list[jax.Array]) -> Any:
  return nnx.from_flat_state(
    [(path, type(v)(value, **v.get_metadata())) for (path, v), value in zip(variables, values, strict=True)]
  )


def _specs(execution: ExecutionConfig, variable: Any, value: Any) -> Any:
  """The partition of each array that stands for a variable in the computation."""
  dimensions = variable[...].ndim
  axes = variable.axes[len(variable.axes) - dimensions :]  # a scan over layers has removed the first
  return jax.tree.map(
    lambda array: execution.sharding.partition(array.shape, *(_COMPUTED.get(axis) for axis in axes)), value
  )


def _local_value(
  execution: ExecutionConfig, layers: Mapping[tuple[Any, ...], Linear], path: tuple[Any, ...], variable: Any
) -> Any:
  """What devices gather of a variable: in the run's dtype, so that its gradient is summed over them in that dtype.
  With implementations of the matmul or a weight format, what they want of a weight, and others as they are stored."""
  if path[-1] == "weight" and path[:-1] in layers:
    return layers[path[:-1]].sent_weight()
  value = variable[...]
  plain = not execution.matmul and isinstance(execution.weight_format, PlainFormat)
  return value.astype(execution.numerics.dtype) if plain and not isinstance(variable, Buffer) else value


def _combined(
  combine: Combine | None,
  before: jax.Array,
  after: jax.Array,
  spec: PartitionSpec,
  mesh_axes: tuple[str, ...],
  holders: tuple[str, ...],
) -> jax.Array:
  """The combined value of a buffer from those that each device assigned.

  Sums and means are over devices with different tokens; devices with shards of an expert's width have the same tokens.
  Pipeline stages run different layers, so values are not combined over them.
  """
  split = {axis for part in spec for axis in mesh_axes_of(part)}
  free = tuple(axis for axis in mesh_axes if axis not in split and axis != STAGE)
  tokens = tuple(axis for axis in free if axis in holders)
  if combine == "sum" and tokens:
    after = before + jax.lax.psum(after - before, tokens)
  if combine == "mean" and tokens:
    after = jax.lax.pmean(after, tokens)
  return jax.lax.pmax(after, free)
