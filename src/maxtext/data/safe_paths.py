"""Files of folders that may be a stranger's: none that is elsewhere is read, and what is wrong in one is said."""

import json
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError


def resolve_inside(folder: Path, name: str) -> Path:
  """A file of the folder; one that is elsewhere, by its name or by a link, is refused.

  The cache of Hugging Face's hub links the files of a snapshot to the blobs of the same model, which belong to it.
  """
  here = folder.resolve()
  roots = [here, *(at.parent.parent / "blobs" for at in (here, *here.parents) if _is_snapshot(at))]
  try:
    target = (folder / name).resolve()
  except (OSError, RuntimeError, ValueError):  # links in a circle, or no name of a file
    raise ConfigError(f"{folder} has {name!r}, which leads to no file.") from None
  if not any(target.is_relative_to(root) for root in roots):
    raise ConfigError(f"{folder} has {name!r}, which leads out of the folder to {target}: copy the file into it.")
  return folder / name


def read_text_inside(folder: Path, name: str) -> str | None:
  """The text of a file of the folder; None where there is none."""
  file = resolve_inside(folder, name)
  try:
    return file.read_text(encoding="utf-8")
  except FileNotFoundError:
    return None
  except OSError as error:
    raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
  except UnicodeDecodeError:
    raise ConfigError(f"{file} is not text in UTF-8.") from None


def read_json_inside(folder: Path, name: str) -> dict[str, Any]:
  """The object in a file of the folder; {} where there is none."""
  if (text := read_text_inside(folder, name)) is None:
    return {}
  try:
    content = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{folder / name} is not JSON: {error}.") from None
  if not isinstance(content, dict):
    raise ConfigError(f"{folder / name} is not an object of JSON.")
  return content


def _is_snapshot(folder: Path) -> bool:
  """Whether a folder is one of the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION."""
  return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
