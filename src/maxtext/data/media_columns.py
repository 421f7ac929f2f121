"""Columns of images beside the messages of a row."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.chat_messages import media_kind


def images_of_columns(values: Sequence[Any]) -> list[Any]:
  """The images in the values of columns, of which each may hold several, or none."""
  found = list[Any]()
  for value in values:
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
    found += [] if value is None else value if several else [value]
  return found


def with_column_images(messages: Sequence[Any], images: Sequence[Any]) -> list[Any]:
  """Messages in which images of a data column have their places: parts of images that name none take them in turn; what
  is left comes before the text of the first message of a user."""
  left = list(images)

  def filled(part: Any) -> Any:
    if media_kind(part) != "image" or part.get(part["type"]) is not None:
      return part
    if not left:
      raise ConfigError(f"messages have more parts of images than the {len(images)} images in the columns.")
    return {"type": "image", "image": left.pop(0)}

  found = [
    {**message, "content": list(map(filled, message["content"]))}
    if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
    else message
    for message in messages
  ]
  first = next((i for i, m in enumerate(found) if isinstance(m, Mapping) and m.get("role") == "user"), None)
  if left and first is None:
    raise ConfigError("a row has images, and no message of a user to put them in.")
  if left and first is not None:
    content = found[first].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    found[first] = {**found[first], "content": [*({"type": "image", "image": image} for image in left), *parts]}
  return found
