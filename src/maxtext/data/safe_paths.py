"""Reading files of untrusted folders: no path may lead outside, and problems are reported by file name."""

import json
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError


def resolve_inside(folder: Path, name: str) -> Path:
  """The path of a file in the folder; raises `ConfigError` if its name or a link leads outside.

  The cache of Hugging Face's hub links the files of a snapshot to blobs of the same model, which are allowed.
  """
  here = folder.resolve()
  roots = [here, *(at.parent.parent / "blobs" for at in (here, *here.parents) if _is_snapshot(at))]
  try:
    target = (folder / name).resolve()
  except (OSError, RuntimeError, ValueError):  # a cycle of links, or an invalid name
    raise ConfigError(f"{folder} has {name!r}, which leads to no file.") from None
  if not any(target.is_relative_to(root) for root in roots):
    raise ConfigError(f"{folder} has {name!r}, which leads out of the folder to {target}: copy the file into it.")
  return folder / name


def read_text_inside(folder: Path, name: str) -> str | None:
  """The text of a file in the folder; None if there is no such file."""
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
  """The JSON object in a file of the folder; {} if there is no such file."""
  if (text := read_text_inside(folder, name)) is None:
    return {}
  try:
    content = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{folder / name} is not JSON: {error}.") from None
  if not isinstance(content, dict):
    raise ConfigError(f"{folder / name} is not a JSON object.")
  return content


def _is_snapshot(folder: Path) -> bool:
  """Whether a folder is a snapshot in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION."""
  return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
