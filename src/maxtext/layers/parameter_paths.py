"""The grammar of parameter paths, as `groups/0/layers/1/mixer/query/weight`.

A path is names joined by `/`: of modules, from the decoder down, and of the variable in the last. A group is a stack of
repeated cycles of layers, and `layers/<place>` is an index in the cycle: its repeats are one array, stacked on
dimension 0. The layers of multi-token prediction are at `mtp/<number>/stack/layers/0`, one per module.
"""

import re
from typing import NamedTuple

ANY_LAYER = "groups/*/layers/*"
"""A pattern (see `fits`) of the layers of groups."""

ANY_PREDICTION = "mtp/*"
"""A pattern of the modules of multi-token prediction."""

_LAYER = re.compile(r"(?:towers/([^/]+)/)?groups/(\d+)/layers/(\d+)/(.*)", re.DOTALL)
_TOWER = re.compile(r"towers/([^/]+)/")
_PREDICTION = re.compile(r"mtp/(\d+)/")


class LayerPath(NamedTuple):
  """The path of a variable in a stack of layers.

  Attributes:
    group: its number in the decoder, or in the tower.
    place: the layer's index in the group's cycle.
    rest: the path from the layer down.
    tower: the name of the layer's tower; empty for the decoder.
  """

  group: int
  place: int
  rest: str
  tower: str = ""

  @staticmethod
  def parse(path: str) -> "LayerPath | None":
    """The parts of a path; None if it is not of a layer of a group."""
    found = _LAYER.match(path)
    return None if found is None else LayerPath(int(found[2]), int(found[3]), found[4], found[1] or "")

  def __str__(self) -> str:
    return self._at(self.place)

  def unstacked(self, repeat: int) -> str:
    """The path of one repeat, in checkpoints of unstacked layers: `groups/0/layers/1.3/...` is the fourth."""
    return self._at(f"{self.place}.{repeat}")

  def _at(self, place: int | str) -> str:
    above = ("towers", self.tower) if self.tower else ()
    return join(*above, "groups", self.group, "layers", place, self.rest)


def join(*names: str | int) -> str:
  """Joins names or paths to one path."""
  return "/".join(map(str, names))


def split(path: str) -> list[str]:
  """The names of a path."""
  return path.split("/")


def below(path: str) -> str:
  """A path without its first name, as the path of a parameter from that of a checkpoint, `params/...`."""
  return path.partition("/")[2]


def mtp_path(number: int, rest: str) -> str:
  """The path of a variable or module in the layer of a module of multi-token prediction."""
  return join("mtp", number, "stack/layers/0", rest)


def tower_name(path: str) -> str:
  """The tower of a path; empty if it is not of a tower."""
  found = _TOWER.match(path)
  return "" if found is None else found[1]


def mtp_index(path: str) -> int | None:
  """The index of the multi-token prediction module of a path; None if it is not of one."""
  found = _PREDICTION.match(path)
  return None if found is None else int(found[1])


def one_layer(path: str, repeat: int) -> str:
  """The name of one repeat of a stacked parameter, for programs that take unstacked layers."""
  return f"{path}[{repeat}]"


def outputs_first(path: str) -> str:
  """The name of a matrix that is stored as [outputs, inputs], for programs that take it so."""
  return f"{path}.T"


def all_layers(path: str) -> str:
  """The stacked parameter of which a name may be one repeat."""
  return re.sub(r"\[\d+\]$", "", path)


def is_one_layer(path: str) -> bool:
  """Whether a name is that of one repeat of a stacked parameter."""
  return path.endswith("]")


def fits(pattern: str, path: str) -> bool:
  """Whether a path matches a pattern, in which `*` is any number."""
  return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def sibling(path: str, module: str) -> str:
  """The path of the same variable in a sibling module."""
  parent, _, leaf = path.rsplit("/", 2)
  return join(parent, module, leaf)


def module_of(path: str) -> str:
  """The name of the module that a variable is in."""
  return split(path)[-2]
