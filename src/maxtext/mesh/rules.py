"""Sharding rules: the mesh axes that each logical axis is sharded over.

Every dimension of every array has a logical axis (`LogicalAxis`). One table in the configuration maps logical axes to
mesh axes. Data parallelism, FSDP, tensor parallelism and so on differ only in the
shape of the mesh and in this table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs.errors import ConfigError, did_you_mean

LogicalAxis = Literal[
  "layers",
  "vocab",
  "embed",
  "heads",
  "kv_heads",
  "head_dim",
  "qkv",
  "narrow",
  "mlp",
  "norm",
  "latent",
  "latent_out",
  "streams",
  "memory",
  "router",
  "expert",
  "expert_embed",
  "expert_mlp",
  "activation_batch",
  "activation_embed_and_logits_batch",
  "activation_length",
  "activation_norm_length",
  "activation_embed",
  "activation_heads",
  "activation_kv_heads",
  "activation_head_dim",
  "activation_mlp",
  "activation_expert",
  "activation_vocab",
]
LOGICAL_AXES: tuple[str, ...] = get_args(LogicalAxis)


@dataclass(frozen=True)
class Rules:
  """The table, as hashable pairs (logical axis, mesh axes)."""

  pairs: tuple[tuple[str, tuple[str, ...]], ...]

  @staticmethod
  def parse(table: Any, mesh_axes: Sequence[str]) -> "Rules":
    """Parses `logical_axis_rules`; unknown and repeated names raise `ConfigError`."""
    rules: dict[str, tuple[str, ...]] = {}
    if not isinstance(table, list | tuple):
      raise ConfigError(f"logical_axis_rules={table!r} must be a list of pairs [logical axis, mesh axes].")
    for entry in table:
      name, axes = _entry(entry)
      if name not in LOGICAL_AXES:
        raise ConfigError(f"logical_axis_rules: '{name}' is not a logical axis.{did_you_mean(name, LOGICAL_AXES)}")
      if name in rules:
        raise ConfigError(f"logical_axis_rules: '{name}' occurs twice; join its mesh axes in one entry.")
      for axis in axes:
        if axis not in mesh_axes:
          hint = did_you_mean(axis, mesh_axes) or f" There are {', '.join(mesh_axes)}."
          raise ConfigError(f"logical_axis_rules: {name}: '{axis}' is not a mesh axis.{hint}")
      if len(set(axes)) < len(axes):
        raise ConfigError(f"logical_axis_rules: {name}: {list(axes)} names a mesh axis twice.")
      rules[name] = axes
    if missing := [name for name in LOGICAL_AXES if name not in rules]:
      raise ConfigError(f"logical_axis_rules lacks {', '.join(missing)}; write [] for an axis that is not sharded.")
    return Rules(tuple(rules.items()))

  def with_experts_over(self, axis: str) -> "Rules":
    """Rules in which a mesh axis shards the weights of experts by expert instead of by width."""
    table = dict(self.pairs)
    if axis not in table["expert_embed"]:
      raise ConfigError(f"shard_exp_on_fsdp=true, but logical_axis_rules does not split expert_embed over '{axis}'.")
    table["expert"] = (*table["expert"], axis)
    table["expert_embed"] = tuple(a for a in table["expert_embed"] if a != axis)
    return Rules(tuple(table.items()))

  def without_split_tokens(self) -> "Rules":
    """Rules in which the mesh axes that split hidden units do not split tokens between the matmuls."""
    table = dict(self.pairs)
    tokens, hidden = table["activation_norm_length"], table["activation_mlp"]
    table["activation_norm_length"] = tuple(a for a in tokens if a not in hidden)
    return Rules(tuple(table.items()))

  def partition(self, mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """The partition spec of an array with these logical axes.

    A dimension takes the longest prefix of its mesh axes whose product divides it, so that a model with two key heads
    still runs on eight tensor-parallel devices. A mesh axis that several dimensions name belongs to the first of them,
    in the order of the table, that takes it. Axes of size one are left out.
    """
    assert len(axes) == len(shape), (axes, shape)
    table: Mapping[str, tuple[str, ...]] = dict(self.pairs)
    order = {name: place for place, name in enumerate(table)}
    parts: list[tuple[str, ...] | None] = [None] * len(axes)
    taken: set[str] = set()
    for i in sorted((i for i, name in enumerate(axes) if name is not None), key=lambda i: order[str(axes[i])]):
      wanted = [a for a in table[str(axes[i])] if mesh.shape.get(a, 1) > 1 and a not in taken]
      parts[i] = _dividing_prefix(wanted, mesh, shape[i]) or None
      taken.update(parts[i] or ())
    return PartitionSpec(*parts)

  def mesh_axes(self, name: LogicalAxis) -> tuple[str, ...]:
    """The mesh axes of a logical axis."""
    return dict(self.pairs)[name]

  def num_shards(self, mesh: Mesh, name: LogicalAxis) -> int:
    """The number of shards of a logical axis whose size all its mesh axes divide."""
    return prod(mesh.shape.get(axis, 1) for axis in self.mesh_axes(name))

  def sharding(self, mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with these logical axes; see `partition`."""
    return NamedSharding(mesh, self.partition(mesh, axes, shape))


def mesh_axes_of(part: Any) -> tuple[str, ...]:
  """The mesh axes in one entry of a `PartitionSpec`, which may be None, a name or several names."""
  return (part,) if isinstance(part, str) else tuple(part or ())


def num_shards_of(mesh: Mesh, part: Any) -> int:
  """The number of shards of a dimension with this entry of a `PartitionSpec`."""
  return prod(mesh.shape[axis] for axis in mesh_axes_of(part))


def _entry(entry: Any) -> tuple[str, tuple[str, ...]]:
  match entry:
    case [str(name), str(axis)]:
      return name, (axis,)
    case [str(name), [*axes]] if all(isinstance(axis, str) for axis in axes):
      return name, tuple(axes)
  raise ConfigError(f"logical_axis_rules: {entry!r} is not a pair [logical axis, mesh axes].")


def _dividing_prefix(axes: Iterable[str], mesh: Mesh, size: int) -> tuple[str, ...]:
  kept: list[str] = []
  for axis in axes:
    if size % prod(mesh.shape[a] for a in (*kept, axis)):
      break
    kept.append(axis)
  return tuple(kept)
