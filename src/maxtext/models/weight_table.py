"""How a family's Hugging Face tensors correspond to its parameters.

A table maps patterns of parameter paths, in which `*` stands for a number, to `Weight`s; the first that fits counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxtext.layers.block import Layer
from maxtext.layers.parameter_paths import LayerPath, fits, mtp_index
from maxtext.models.spec import DecoderSpec, groups_of


@dataclass(frozen=True)
class Weight:
  """One parameter's name and layout in a Hugging Face file.

  Attributes:
    name: the tensor's name; `{layer}` and `{expert}` count. Without `{expert}` a tensor holds all of them, first.
    transposed: the file holds [out, in]; ours is [in..., out...], the same numbers transposed and reshaped.
    table: the file holds it in the shape it has here, all dimensions apart.
    parts: modules, in order, whose outputs stand side by side in the tensor; () where it holds this one alone.
    convolution: the file holds [channels, 1, span]; ours is [span, channels...].
    blocks: the parts alternate in blocks, as many as this module has heads; "each": number by number; "": one block.
  """

  name: str
  transposed: bool = False
  table: bool = False
  parts: tuple[str, ...] = ()
  blocks: str = ""
  convolution: bool = False


Table = Mapping[str, Weight]


def fused(module: str, parts: Sequence[str], name: str, leaf: str = "weight", **layout: Any) -> dict[str, Weight]:
  """The entries of several modules that share one tensor."""
  weight = Weight(name, parts=tuple(parts), **layout)
  return {f"{module}/{part}/{leaf}": weight for part in parts}


def find(table: Table, path: str) -> Weight | None:
  """The entry of a parameter."""
  for pattern, weight in table.items():
    if fits(pattern, path):
      return weight
  return None


def of_layers(spec: DecoderSpec, own: Callable[[Layer], Table], tower: str = "") -> dict[str, Weight]:
  """Entries for every layer of the decoder, or of a tower, by what it is; their paths start at the layer."""
  return {
    str(LayerPath(g, place, path, tower)): weight
    for g, group in enumerate(groups_of(spec, tower))
    for place, layer in enumerate(group.cycle)
    for path, weight in own(layer).items()
  }


def layer_numbers(spec: DecoderSpec, path: str) -> list[int]:
  """Which layers of the whole decoder, or tower, a parameter holds, in order; none for one that is not of a layer.

  Layers that predict further tokens are counted after the last one.
  """
  if (number := mtp_index(path)) is not None:
    return [sum(len(group.cycle) * group.repeats for group in spec.groups) + number]
  found = LayerPath.parse(path)
  if found is None:
    return []
  groups = groups_of(spec, found.tower)
  first = sum(len(group.cycle) * group.repeats for group in groups[: found.group])
  own = groups[found.group]
  return [first + repeat * len(own.cycle) + found.place for repeat in range(own.repeats)]
