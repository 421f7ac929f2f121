"""What a key is, what reads it, and what it may be combined with, from the sources alone."""

import re

from maxtext.configs.checks import RULES
from maxtext.configs.errors import ConfigError
from maxtext.configs.older_names import hint
from maxtext.configs.readers import function_reads, readers_of
from maxtext.configs.refusals import REFUSALS, AlwaysSo, NoEffect, Refusal, refusals_of
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.values import default_of, plain


def explain(key: str) -> str:
  """A few lines for a person."""
  known = MaxTextConfig.model_fields
  if key not in known:
    raise ConfigError(f"'{key}' is not a key.{hint(key, known)}")
  lines = [f"{key}: {known[key].description}", f"  type     {type_of(key)}", f"  default  {plain(default_of(key))!r}"]
  for refusal in refusals_of(key):
    lines.append(f"  {_said_of(refusal)}")
  if together := checked_with(key):
    lines.append(f"  checked  together with {', '.join(together)}")
  if effects := effects_of(key):
    lines.append(f"  decides  whether these have an effect: {', '.join(effects)}")
  if readers := readers_of(key):
    lines.append(f"  read by  {', '.join(readers)}")
  return "\n".join(lines)


def _said_of(row: Refusal) -> str:
  if isinstance(row, AlwaysSo):
    return f"fixed    {row.reason}"
  if isinstance(row, NoEffect):
    return f"warns    in some combinations, because {row.reason}"
  return (
    f"refused  {'set away from its default' if row.unless is None else 'in some combinations'}, because {row.reason}"
  )


def checked_with(key: str) -> list[str]:
  """Keys whose values must suit this one's."""
  read = function_reads("configs/checks.py")
  groups = (read[rule.__name__] for rule in RULES)
  return sorted({other for group in groups if key in group for other in group if other != key})


def effects_of(key: str) -> list[str]:
  """Keys that are refused, or have no effect, unless this one has some value."""
  refusals = (refusal for refusal in REFUSALS if refusal.unless and key in refusal.unless.keys)
  return sorted({other for refusal in refusals for other in refusal.keys})


def type_of(key: str) -> str:
  """A key's type as it is written in `configs/types`."""
  info = MaxTextConfig.model_fields[key]
  annotation = info.annotation
  name = (
    annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
  )
  bounds = " ".join(re.findall(r"\w+=[-\d.]+", " ".join(map(repr, info.metadata))))
  return re.sub(r"(typing|maxtext\.configs\.types\.\w+)\.", "", f"{name} {bounds}".strip())
