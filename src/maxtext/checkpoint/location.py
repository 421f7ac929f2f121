"""Where checkpoints are: on a disk, or in an object store by the same names."""

import json
import re
import sys
from importlib.util import find_spec

from etils import epath

from maxtext.checkpoint.metadata import ITEM
from maxtext.checkpoint.storage import retried
from maxtext.configs import ConfigError
from maxtext.configs.values import STORES

FOLDER = "checkpoints"
_UNFINISHED = ".orbax-checkpoint-tmp"
_METADATA = "_CHECKPOINT_METADATA"  # Orbax's own, with the time when all was there


def absolute(path: str) -> epath.Path:
  """A user's path, on a disk or in a store that Orbax knows."""
  scheme, separator, _ = path.partition("://")
  if not separator:
    return epath.Path(path).expanduser().absolute()
  if scheme not in STORES:
    raise ConfigError(f"{path} is in a store that Orbax does not know: mount the bucket and name the folder.")
  if not find_spec("gcsfs"):
    raise ConfigError(f"{path} is in a store whose library is not installed: pip install 'maxtext[gcs]'.")
  return epath.Path(path)


def failures() -> tuple[type[Exception], ...]:
  """What Orbax, TensorStore and gcsfs raise when storage fails; all else is a defect of ours."""
  gcsfs = sys.modules.get("gcsfs.retry")
  return (OSError, ValueError, RuntimeError, *((gcsfs.HttpError,) if gcsfs else ()))


def folder_of(base: str, run: str) -> epath.Path:
  """Where a run's checkpoints are; an empty base is ./runs."""
  return absolute(base or "runs") / run / FOLDER


def steps_in(folder: epath.Path) -> list[int]:
  """The finished steps under a folder, in order."""
  return sorted(int(path.name) for path in _entries(folder) if _is_step(path) and _finished(path))


def is_there(folder: epath.Path) -> bool:
  """Whether a folder holds anything."""
  return bool(_entries(folder))


def unfinished_in(folder: epath.Path) -> list[epath.Path]:
  """What saves that were interrupted have left."""
  return [path for path in _entries(folder) if _UNFINISHED in path.name or (_is_step(path) and not _finished(path))]


def locate(path: str) -> epath.Path:
  """The step that a user's path means: a step's folder, or the latest of a run or of its folder of checkpoints."""
  given = absolute(path)
  if (given / ITEM).exists():
    return given
  for folder in (given / FOLDER, given):
    if steps := steps_in(folder):
      return folder / str(steps[-1])
  other = " Its config.json is no JSON object with a model_type, as that of a Hugging Face folder is."
  described = (given / "config.json").exists()
  raise ConfigError(f"{path} is no checkpoint, and no run's folder with one in it.{other if described else ''}")


def _is_step(path: epath.Path) -> bool:
  return re.fullmatch(r"\d+", path.name) is not None


def _finished(path: epath.Path) -> bool:
  """On a disk a step gets its name when it is whole; a store cannot rename, so there Orbax writes a time into it."""
  if "://" not in str(path):
    return True
  try:
    text = retried(path, (path / _METADATA).read_text)
    return json.loads(text).get("commit_timestamp_nsecs") is not None
  except FileNotFoundError:
    return False
  except ValueError:  # damaged, not unfinished, as whoever reads it will find
    return True


def _entries(folder: epath.Path) -> list[epath.Path]:
  """Not by `exists`: that takes a disk that does not answer for one that has nothing, and the run would start anew."""
  try:
    return retried(folder, lambda: sorted(folder.iterdir()))
  except (FileNotFoundError, NotADirectoryError):
    return []
