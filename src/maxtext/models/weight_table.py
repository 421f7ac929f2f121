"""Mapping between a family's parameters and its Hugging Face tensors.

A table maps patterns of parameter paths to `Weight`s. `*` in a pattern matches a number; the first match wins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxtext.layers.block import Layer
from maxtext.layers.parameter_paths import LayerPath, fits, mtp_index
from maxtext.models.spec import DecoderSpec, groups_of


@dataclass(frozen=True)
class Weight:
  """One parameter's name and layout in a Hugging Face file.

  Attributes:
    name: the tensor's name; `{layer}` and `{expert}` are their indices. Without `{expert}`, a tensor of expert weights
      has the experts as its first dimension.
    transposed: the file holds [out, in]; ours is [in..., out...], the same values transposed and reshaped.
    table: the file holds the same shape as the parameter.
    parts: modules whose outputs are concatenated in the tensor, in order; () if it holds only this one.
    inputs: sizes of the input dimensions in the file, which are one here: those of a convolution over patches.
    convolution: the file holds [channels, 1, span]; ours is [span, channels...].
    blocks: the parts are interleaved in as many blocks as this module has heads; "each": element by element; "": one
      block.
  """

  name: str
  transposed: bool = False
  table: bool = False
  parts: tuple[str, ...] = ()
  blocks: str = ""
  convolution: bool = False
  inputs: tuple[int, ...] = ()


Table = Mapping[str, Weight]


def fused(module: str, parts: Sequence[str], name: str, leaf: str = "weight", **layout: Any) -> dict[str, Weight]:
  """The table entries of several modules that share one tensor."""
  weight = Weight(name, parts=tuple(parts), **layout)
  return {f"{module}/{part}/{leaf}": weight for part in parts}


def renamed(table: Table, prefix: str, by: str) -> dict[str, Weight]:
  """The table with another beginning of the names that begin so: that of a text model within a larger one."""
  return {
    path: replace(weight, name=by + weight.name.removeprefix(prefix)) if weight.name.startswith(prefix) else weight
    for path, weight in table.items()
  }


def find(table: Table, path: str) -> Weight | None:
  """The table entry of a parameter; None if the table has none."""
  for pattern, weight in table.items():
    if fits(pattern, path):
      return weight
  return None


def of_layers(spec: DecoderSpec, entries: Callable[[Layer], Table], tower: str = "") -> dict[str, Weight]:
  """Table entries for all layers of the decoder or a tower. `entries` returns one layer's table, relative to it."""
  return {
    str(LayerPath(g, place, path, tower)): weight
    for g, group in enumerate(groups_of(spec, tower))
    for place, layer in enumerate(group.cycle)
    for path, weight in entries(layer).items()
  }


def layer_numbers(spec: DecoderSpec, path: str) -> list[int]:
  """Indices of the decoder's or tower's layers that a parameter stacks, in order; [] if it is not in a layer.

  Multi-token prediction layers are numbered after the last layer.
  """
  if (index := mtp_index(path)) is not None:
    return [sum(len(group.cycle) * group.repeats for group in spec.groups) + index]
  found = LayerPath.parse(path)
  if found is None:
    return []
  groups = groups_of(spec, found.tower)
  first = sum(len(g.cycle) * g.repeats for g in groups[: found.group])
  group = groups[found.group]
  return [first + repeat * len(group.cycle) + found.place for repeat in range(group.repeats)]
