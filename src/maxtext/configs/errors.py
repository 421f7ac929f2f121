"""The errors that a user sees; their texts name the key, the value and what to write instead."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
  """A run that cannot be done as asked. The command line prints it without a traceback and exits with 2."""


class RunError(RuntimeError):
  """A run that ended itself. The command line prints it without a traceback and exits with 1."""


class ConfigWarning(UserWarning):
  """Keys that were set and have no effect."""


def nearest(word: str, known: Iterable[str]) -> str:
  """A hint for a misspelt word, as the end of a sentence; empty where nothing is close."""
  found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
  return f" Did you mean '{found[0]}'?" if found else ""


def several(count: int, what: str) -> str:
  """`1 row`, `1,130 rows`, `2 batches`."""
  return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"
