"""How a benchmark shows what it found."""

import json
from collections.abc import Mapping


def show(figures: Mapping[str, float], as_json: bool) -> None:
  """Four digits of each, as one JSON object or as lines."""
  short = {name: float(f"{value:.4g}") for name, value in figures.items()}
  if as_json:
    print(json.dumps(short))
    return
  width = max(map(len, short))
  for name, value in short.items():
    print(f"{name:>{width}} {value:g}")
