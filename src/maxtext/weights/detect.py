"""Detects Hugging Face folders. It imports little, because every command calls it."""

import json
from pathlib import Path


def is_hugging_face(path: str | Path) -> bool:
  """Whether a local folder has a `config.json` with a `model_type`."""
  try:
    content = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(content, dict) and isinstance(content.get("model_type"), str)
