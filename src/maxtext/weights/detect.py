"""Whether a path is a folder of weights. It imports nothing, as every command asks."""

import json
from pathlib import Path


def is_hugging_face(path: str | Path) -> bool:
  """Whether a folder of this machine has a `config.json` that names a model as Hugging Face's library does."""
  try:
    content = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(content, dict) and isinstance(content.get("model_type"), str)
