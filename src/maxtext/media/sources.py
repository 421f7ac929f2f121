"""Bytes of media, from whoever sent them."""

import importlib
import os
from types import ModuleType


class MediaError(ValueError):
  """An image, sound or video that cannot be used; the message is a sentence for whoever sent it."""


def read_bytes(source: bytes | str | os.PathLike[str], limit: int) -> bytes:
  """The bytes of a file, or those given, if they are at most `limit`; never reads more than that."""
  if isinstance(source, bytes):
    found = source
  elif not isinstance(source, str | os.PathLike):  # a number would be an open file of this process
    raise MediaError(f"A {type(source).__name__} is no file: give its path or its bytes.")
  else:
    try:
      with open(source, "rb") as file:
        found = file.read(limit + 1)
    except (OSError, ValueError) as error:  # the latter of a zero byte
      reason = getattr(error, "strerror", error)
      raise MediaError(f"The file {os.fspath(source)!r} cannot be read: {reason}.") from error
  if len(found) > limit:
    raise MediaError(f"The file is larger than the limit of {limit:,} bytes.")
  return found


def optional(module: str, extra: str) -> ModuleType:
  """A module of an optional package, or an error that says what to install."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(f"{module} cannot be imported ({error}); pip install 'maxtext[{extra}]'.") from error
