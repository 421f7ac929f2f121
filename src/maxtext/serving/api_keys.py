"""API keys of the server, and where they come from. Nothing here imports the server's libraries."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from maxtext.configs import ConfigError

API_KEYS = "MAXTEXT_API_KEYS"


def read_keys(environment: Mapping[str, str], file: str | None) -> tuple[str, ...]:
  """The API keys of `MAXTEXT_API_KEYS`, separated by commas, or of a file, one on each line; none where neither is.

  Where keys were meant, none or a damaged one is refused: the server would be open, or closed to who has that key.
  Messages never quote a key.
  """
  if file is None:
    if API_KEYS not in environment:
      return ()
    return _checked(API_KEYS, environment[API_KEYS].split(","))
  if API_KEYS in environment:
    raise ConfigError(f"{API_KEYS} and --api-key-file {file} both name keys: leave one out.")
  try:
    text = Path(file).expanduser().read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is no text"
    raise ConfigError(f"--api-key-file {file} cannot be read: {reason}.") from None
  return _checked(f"--api-key-file {file}", text.splitlines())


def _checked(where: str, keys: list[str]) -> tuple[str, ...]:
  if not any(keys):
    raise ConfigError(f"{where} holds no key: write one, or leave it out so that everyone may ask.")
  for place, key in enumerate(keys, 1):
    if not key or not key.isascii() or not key.isprintable() or " " in key:
      what = "is not of visible ASCII characters alone" if key else "is empty"
      raise ConfigError(f"{where}: key {place} of {len(keys)} {what}.")
  if len(set(keys)) < len(keys):
    raise ConfigError(f"{where} holds a key twice.")
  return tuple(keys)


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches an address."""
  try:
    return ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
