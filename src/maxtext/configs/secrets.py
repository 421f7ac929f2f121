"""Keys whose values are secret. They must not appear in a run's folder, its output or its checkpoints.

Everything that writes or prints a configuration uses these functions.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

SECRET_KEYS = ("hf_access_token",)
REDACTED = "(redacted)"


def redact_value(key: str, value: Any) -> Any:
  """A key's value, or `REDACTED` for a secret."""
  return REDACTED if key in SECRET_KEYS and value else value


def redact_entries(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Keys with their values and origins, without secrets."""
  return {
    key: {**entry, "value": redact_value(key, entry["value"])} if key in SECRET_KEYS else entry
    for key, entry in entries.items()
  }


def redact_arguments(words: Iterable[str]) -> list[str]:
  """The arguments of a command, without secrets; a key may have been written as a flag, with its value behind it."""
  found, secret = [], False
  for word in words:
    assigned = re.sub(rf"{_ASSIGNMENT}.+", rf"\1{REDACTED}", word, flags=re.IGNORECASE | re.DOTALL)
    found.append(REDACTED if secret else assigned)
    secret = re.fullmatch(rf"--?(?:{_NAMES})", word, flags=re.IGNORECASE) is not None
  return found


def redact(text: str, *secrets: str | None) -> str:
  """A message without secrets: those that are given, and values in assignments to secret keys."""
  for secret in filter(None, secrets):
    text = text.replace(secret, REDACTED)
  return re.sub(rf"{_ASSIGNMENT}(?!\(redacted\))\S+", rf"\1{REDACTED}", text, flags=re.IGNORECASE)


_NAMES = "|".join(key.replace("_", "[-_]") for key in SECRET_KEYS)
_ASSIGNMENT = rf"((?:{_NAMES})\s*[=:]\s*)"
