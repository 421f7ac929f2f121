"""The grammar of parameter paths, as `groups/0/layers/1/mixer/query/weight`.

A path is names joined by `/`: of modules, from the decoder down, and of the variable in the last. A group is a stack of
repeated cycles of layers, and `layers/<place>` is a place in the cycle: its repeats are one array, stacked on
dimension 0. Layers that predict further tokens are at `mtp/<number>/stack/layers/0`, one of each.
"""

import re
from typing import NamedTuple

ANY_LAYER = "groups/*/layers/*"
"""A pattern (see `fits`) of the layers of groups."""

ANY_PREDICTION = "mtp/*"
"""A pattern of the modules that predict further tokens."""

_LAYER = re.compile(r"(?:towers/([^/]+)/)?groups/(\d+)/layers/(\d+)/(.*)", re.DOTALL)
_TOWER = re.compile(r"towers/([^/]+)/")
_PREDICTION = re.compile(r"mtp/(\d+)/")


class LayerPath(NamedTuple):
  """The path of a variable in a stack of layers.

  Attributes:
    group: its number in the decoder, or in the tower.
    place: the layer's number in the group's cycle.
    rest: the path from the layer down.
    tower: the name of the tower that the layer is of; empty is the decoder.
  """

  group: int
  place: int
  rest: str
  tower: str = ""

  @staticmethod
  def parse(path: str) -> "LayerPath | None":
    """None where a path is of no layer of a group."""
    found = _LAYER.match(path)
    return None if found is None else LayerPath(int(found[2]), int(found[3]), found[4], found[1] or "")

  def __str__(self) -> str:
    return self._at(self.place)

  def unstacked(self, repeat: int) -> str:
    """The path of one repeat, in checkpoints that keep each layer apart: `groups/0/layers/1.3/...` is the fourth."""
    return self._at(f"{self.place}.{repeat}")

  def _at(self, place: int | str) -> str:
    above = ("towers", self.tower) if self.tower else ()
    return join(*above, "groups", self.group, "layers", place, self.rest)


def join(*names: str | int) -> str:
  """The path of names or of paths, one below the other."""
  return "/".join(map(str, names))


def split(path: str) -> list[str]:
  """The names of a path."""
  return path.split("/")


def below(path: str) -> str:
  """A path without its first name: as of a checkpoint's `params/...`, the parameter's own."""
  return path.partition("/")[2]


def mtp_path(number: int, rest: str) -> str:
  """The path of a variable or module in the layer of a module that predicts further tokens."""
  return join("mtp", number, "stack/layers/0", rest)


def tower_name(path: str) -> str:
  """The tower that a path is of; empty is none."""
  found = _TOWER.match(path)
  return "" if found is None else found[1]


def mtp_index(path: str) -> int | None:
  """Which of the modules that predict further tokens a path is of; None where it is of none."""
  found = _PREDICTION.match(path)
  return None if found is None else int(found[1])


def one_layer(path: str, repeat: int) -> str:
  """The name of one repeat of a stacked parameter, where a program takes layers as arrays of their own."""
  return f"{path}[{repeat}]"


def fits(pattern: str, path: str) -> bool:
  """Whether a path is one that a pattern describes, in which `*` stands for a number."""
  return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def sibling(path: str, module: str) -> str:
  """The same variable of another module beside its own."""
  parent, _, leaf = path.rsplit("/", 2)
  return join(parent, module, leaf)


def module_of(path: str) -> str:
  """The name of the module that a variable is in."""
  return split(path)[-2]
