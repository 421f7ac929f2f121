"""Keys whose value is a password: who has read a run's folder, its output or a checkpoint must not have it.

Whatever writes or prints a configuration goes through here.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_KEYS = ("hf_access_token",)
REDACTED = "(redacted)"


def shown(key: str, value: Any) -> Any:
  """A key's value as anyone may read it."""
  return REDACTED if key in SECRET_KEYS and value else value


def shown_entries(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Keys with their values and origins, as anyone may read them."""
  return {
    key: {**entry, "value": shown(key, entry["value"])} if key in SECRET_KEYS else entry
    for key, entry in entries.items()
  }


def redacted_words(words: Iterable[str]) -> list[str]:
  """The words of a command, as anyone may read them."""
  return [re.sub(rf"{_ASSIGNED}.+", rf"\1{REDACTED}", word, flags=re.IGNORECASE | re.DOTALL) for word in words]


def redacted_text(text: str, *secrets: str | None) -> str:
  """A message that may quote a secret, one that is known or one that is being assigned."""
  for secret in filter(None, secrets):
    text = text.replace(secret, REDACTED)
  return re.sub(rf"{_ASSIGNED}(?!\(redacted\))\S+", rf"\1{REDACTED}", text, flags=re.IGNORECASE)


_ASSIGNED = rf"((?:{'|'.join(SECRET_KEYS)})\s*[=:]\s*)"
