"""Reads the API keys of the server. Nothing here imports the server's libraries."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from maxtext.configs import ConfigError

API_KEYS = "MAXTEXT_API_KEYS"


def read_api_keys(environment: Mapping[str, str], file: str | None) -> tuple[str, ...]:
  """The API keys of `MAXTEXT_API_KEYS`, separated by commas, or of a file with one on each line; () without either.

  An empty list and an invalid key raise `ConfigError`: the server would be open to everyone, or closed to the owner of
  that key. Messages never quote a key.
  """
  if file is None:
    if API_KEYS not in environment:
      return ()
    return _validate(API_KEYS, environment[API_KEYS].split(","))
  if API_KEYS in environment:
    raise ConfigError(f"{API_KEYS} and --api-key-file {file} both give API keys: leave one out.")
  try:
    text = Path(file).expanduser().read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
    raise ConfigError(f"--api-key-file {file} cannot be read: {reason}.") from None
  return _validate(f"--api-key-file {file}", text.splitlines())


def _validate(where: str, keys: list[str]) -> tuple[str, ...]:
  if not any(keys):
    raise ConfigError(f"{where} contains no key: add one, or leave it out to accept every client.")
  for number, key in enumerate(keys, 1):
    if not key or not key.isascii() or not key.isprintable() or " " in key:
      problem = "has characters other than visible ASCII" if key else "is empty"
      raise ConfigError(f"{where}: key {number} of {len(keys)} {problem}.")
  if len(set(keys)) < len(keys):
    raise ConfigError(f"{where} contains a key twice.")
  return tuple(keys)


def is_loopback(host: str) -> bool:
  """Whether an address is reachable from this machine only."""
  try:
    return ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
