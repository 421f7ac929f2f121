"""`maxtext config explain`: what a key is, what reads it, and what it is checked with, from the sources alone."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import get_args

from maxtext.configs.checks import RULES
from maxtext.configs.errors import ConfigError
from maxtext.configs.readers import function_reads, readers_of
from maxtext.configs.renamed_keys import renamed_hint
from maxtext.configs.types import MaxTextConfig, RematPolicy
from maxtext.configs.unsupported import (
  UNSUPPORTED,
  FixedOption,
  NoEffectOption,
  UnsupportedOption,
  unsupported_options_of,
)
from maxtext.configs.values import default_of, plain_value


def explain(key: str) -> str:
  """The explanation of a key as a few lines of text."""
  known = MaxTextConfig.model_fields
  if key not in known:
    raise ConfigError(f"'{key}' is not a key.{renamed_hint(key, known)}")
  width = len("default") + 2
  lines = [f"  {label:<{width}}{text}" for label, text in facts_of(key, readers_of(key))]
  return "\n".join([f"{key}: {known[key].description}", *lines])


def facts_of(key: str, readers: Sequence[str]) -> list[tuple[str, str]]:
  """What there is to say of a key beside its description: labels, each with a text; what is empty is left out."""
  together, effects = keys_checked_with(key), keys_affected_by(key)
  facts = [
    ("type", type_of(key)),
    ("default", repr(plain_value(default_of(key)))),
    ("values", ", ".join(values_of(key))),
    *map(_describe, unsupported_options_of(key)),
    ("checked", f"together with {', '.join(together)}" if together else ""),
    ("decides", f"whether these have an effect: {', '.join(effects)}" if effects else ""),
    ("read by", ", ".join(readers)),
  ]
  return [(label, text) for label, text in facts if text]


def _describe(row: UnsupportedOption) -> tuple[str, str]:
  if isinstance(row, FixedOption):
    return "fixed", row.reason
  when = "set away from its default" if row.unless is None else "in some combinations"
  return "warns" if isinstance(row, NoEffectOption) else "error", f"{when}, because {row.reason}"


def keys_checked_with(key: str) -> list[str]:
  """Keys that are checked together with this one."""
  read = function_reads("configs/checks.py")
  groups = (read[rule.__name__] for rule in RULES)
  return sorted({other for group in groups if key in group for other in group if other != key})


def keys_affected_by(key: str) -> list[str]:
  """Keys that are unsupported, or have no effect, unless this one has some value."""
  options = (option for option in UNSUPPORTED if option.unless and key in option.unless.keys)
  return sorted({other for option in options for other in option.keys})


# Keys that are texts, in which names of an enumeration are separated by commas.
_LISTS_OF = {"remat_policy": RematPolicy}


def values_of(key: str) -> list[str]:
  """The values of an enumeration, or the names that a list of policies is made of; empty for other keys."""
  annotation = _LISTS_OF.get(key, MaxTextConfig.model_fields[key].annotation)
  kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Enum)]
  return [repr(member.value) if member.value == "" else str(member.value) for kind in kinds for member in kind]


def search_keys(words: Sequence[str]) -> dict[str, str]:
  """The keys in whose name or description every word occurs, with their descriptions.

  Those with most of the words in their names come first.
  """
  found = {}
  for key, info in MaxTextConfig.model_fields.items():
    text = f"{key} {key.replace('_', ' ')} {info.description}".lower()
    if all(word.lower() in text for word in words):
      found[key] = info.description or ""
  return dict(sorted(found.items(), key=lambda item: -sum(word.lower() in item[0] for word in words)))


def type_of(key: str) -> str:
  """A key's type as it is written in `configs/types`."""
  info = MaxTextConfig.model_fields[key]
  annotation = info.annotation
  name = (
    annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
  )
  bounds = " ".join(re.findall(r"\w+=[-\d.]+", " ".join(map(repr, info.metadata))))
  return re.sub(r"(typing|maxtext\.configs\.types\.\w+)\.", "", f"{name} {bounds}".strip())
