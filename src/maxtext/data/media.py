"""The places of media in prompts and conversations: the tokens that stand for them, and the files that they are from.

Training and inference take the same way: each placeholder of a rendered text becomes the tokens of its medium in
`expand_placeholders`, and `feature_places` finds those tokens and compares their number with that of the features.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.media.sources import MediaError

if TYPE_CHECKING:
  from maxtext.data.tokenizers import TextTokenizer

VISION, AUDIO = "vision", "audio"
TOWERS = {"image": VISION, "video": VISION, "audio": AUDIO}
"""Kinds of media, and the tower that encodes each."""
_DATA_URL = re.compile(r"data:[\w/+.-]*;base64,", re.ASCII)


def expand_placeholders(
  text: str, placeholders: Mapping[str, str], media: Sequence[tuple[str, str]]
) -> tuple[str, list[int]]:
  """A text with what stands for each medium in place of its placeholder.

  Args:
    text: rendered by the chat template, or written by a user.
    placeholders: of each kind of media.
    media: the kind of each, and the text that stands for it; those of a kind are in the order of the text.

  Returns:
    The text, and the numbers of the media in the order in which the text has them.
  """
  numbers = {kind: [i for i, one in enumerate(media) if one[0] == kind] for kind, _ in media}
  for kind, own in numbers.items():
    if (there := text.count(placeholders[kind])) != len(own):
      raise ConfigError(
        f"The prompt has {there} placeholders {placeholders[kind]!r} for {len(own)} {kind} parts: see "
        f"{kind}_placeholder, and whether the chat template takes them."
      )
  left = {placeholders[kind]: iter(own) for kind, own in numbers.items()}
  pattern = re.compile("|".join(map(re.escape, left)) or r"(?!)")
  order = [next(left[found]) for found in pattern.findall(text)]
  texts = iter(media[number][1] for number in order)
  return pattern.sub(lambda _: next(texts), text), order


def feature_places(tokenizer: "TextTokenizer", kind: str, name: str, tokens: np.ndarray, features: int) -> np.ndarray:
  """The places of the tokens of this name, which stand for the features of a kind of media."""
  ids = tokenizer.vocabulary.encode(name, special=True)
  places = np.flatnonzero(tokens == ids[0]) if len(ids) == 1 else np.zeros(0, int)
  if len(ids) != 1 or len(places) != features:
    raise ConfigError(
      f"The prompt has {len(places)} tokens {name!r} for {features} features of its {kind} parts: the tokenizer needs "
      f"this token, and the text must not contain its name."
    )
  return places


def media_file(source: Any) -> Any:
  """A file's bytes from a data URL; anything else as it is."""
  if not isinstance(source, str) or not source.startswith("data:"):
    return source
  head = _DATA_URL.match(source)
  if head is None:
    raise MediaError("a data URL must be base64: data:image/png;base64,...")
  try:
    return base64.b64decode(source[head.end() :], validate=True)
  except (binascii.Error, ValueError):
    raise MediaError("the data URL has no valid base64.") from None


@contextmanager
def naming_medium(name: str) -> Iterator[None]:
  """Tells which medium an error is about."""
  try:
    yield
  except (MediaError, ImportError) as error:  # the latter of a package that is not installed
    raise ConfigError(f"{name}: {error}") from None
