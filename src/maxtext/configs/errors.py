"""Errors for users. Their messages name the key, the value and what to write instead."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
  """An invalid or unsupported configuration. The command line prints it without a traceback and exits with 2."""


class RunError(RuntimeError):
  """A failure of a run. The command line prints it without a traceback and exits with 1."""


class ConfigWarning(UserWarning):
  """Keys that were set and have no effect."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
  """A hint for a misspelt word, as the end of a sentence; empty where nothing is close."""
  found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
  return f" Did you mean '{found[0]}'?" if found else ""


def plural(count: int, what: str) -> str:
  """`1 row`, `1,130 rows`, `2 batches`, `2 epochs`."""
  return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('tch') else 's'}"
