"""Where checkpoints are: on a disk, or in an object store by the same names."""

import re

from etils import epath

from maxtext.checkpoint.record import ITEM
from maxtext.configs import ConfigError

FOLDER = "checkpoints"
_UNFINISHED = ".orbax-checkpoint-tmp"


def steps_in(folder: epath.Path) -> list[int]:
  """The finished steps under a folder, in order."""
  return sorted(int(path.name) for path in _entries(folder) if re.fullmatch(r"\d+", path.name))


def unfinished_in(folder: epath.Path) -> list[epath.Path]:
  """What saves that were interrupted have left."""
  return [path for path in _entries(folder) if _UNFINISHED in path.name]


def locate(path: str) -> epath.Path:
  """The step that a user's path means: a step's folder, or the latest of a run or of its folder of checkpoints."""
  given = epath.Path(path).expanduser()
  if "://" not in path:
    given = given.absolute()
  try:
    if (given / ITEM).exists():
      return given
  except ImportError:
    raise ConfigError(f"{path} is in a store whose library is not installed: pip install 'maxtext[gcs]'.") from None
  for folder in (given / FOLDER, given):
    if steps := steps_in(folder):
      return folder / str(steps[-1])
  raise ConfigError(f"{path} is no checkpoint, and no run's folder with one in it.")


def _entries(folder: epath.Path) -> list[epath.Path]:
  return sorted(folder.iterdir()) if folder.exists() else []
