"""Converts the columns of a record to the training sequences of a conversation."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.chat_messages import template_tools
from maxtext.data.conversation_media import ConversationMedia
from maxtext.data.conversations import (
  TrainingSequence,
  completion_sequence,
  conversation_sequences,
  join_sequences,
)
from maxtext.data.documents import TokenCounts
from maxtext.data.media_columns import images_of_columns, with_column_images
from maxtext.data.options import ConversationOptions
from maxtext.data.tokenizers import TextTokenizer

PROMPT, COMPLETION, TOOLS, MESSAGES = "prompt", "completion", "tools", "messages"
CHOSEN, REJECTED = "chosen", "rejected"
_TEXT_COLUMNS = (PROMPT, COMPLETION, CHOSEN, REJECTED)  # which may hold text that looks like a list


@dataclass(frozen=True)
class ConversationEncoding:
  """Converts a column of messages, or prompt and completion, to tokens with loss weights.

  A column named `tools` holds the descriptions of tools. Values may be JSON text.

  Attributes:
    columns: the names of the columns.
    tokenizer: encodes and renders.
    most: tokens of a sequence, at most.
    truncate: a longer one is cut after its last answer that fits; otherwise it is left out.
    options: which tokens train, and the formatting function.
    formatting_func: makes a conversation of a row.
    with_roles: finds the role of each token, for showing them.
    media: finds those of a conversation; None where there are none.
    image_columns: columns of images, which a row may lack; their values follow the others.
  """

  columns: tuple[str, ...]
  tokenizer: TextTokenizer
  most: int
  truncate: bool
  options: ConversationOptions
  formatting_func: Callable[..., Any] | None
  with_roles: bool = False
  media: ConversationMedia | None = None
  image_columns: tuple[str, ...] = ()

  @staticmethod
  def of(
    columns: tuple[str, ...],
    tokenizer: TextTokenizer,
    most: int,
    truncate: bool,
    options: ConversationOptions,
    image_columns: tuple[str, ...] = (),
  ) -> "ConversationEncoding":
    """With the formatting function that the options name."""
    function = _load_function(options.formatting_func) if options.formatting_func else None
    media = None if options.media is None else ConversationMedia(options.media, tokenizer)
    return ConversationEncoding(
      columns, tokenizer, most, truncate, options, function, media=media, image_columns=image_columns
    )

  @property
  def identity(self) -> dict[str, Any]:
    """What determines the tokens."""
    template = (self.tokenizer.chat_template or "").encode()
    found: dict[str, Any] = {
      "columns": list(self.columns),
      "tokenizer": self.tokenizer.identity,
      "most": self.most,
      "truncate": self.truncate,
      "chat_template": hashlib.sha256(template).hexdigest(),
      "completion_only": self.options.completion_only,
      "chat": self.options.chat,
    }
    if self.formatting_func is not None:
      arguments = json.dumps(dict(self.options.formatting_kwargs), sort_keys=True, default=str)
      found["formatting_func"] = [self.options.formatting_func, _source(self.formatting_func), arguments]
    if self.media is not None:
      found["media"] = [repr(self.media.options), list(self.image_columns)]
    return found

  def in_folder(self, folder: str | None) -> "ConversationEncoding":
    """With paths of media relative to a folder; None where the data is in several."""
    return self if self.media is None else replace(self, media=replace(self.media, folder=folder))

  def counts(self, shards: int) -> TokenCounts:
    """A conversation is never cut."""
    return TokenCounts(None, None, whole=True)

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The sequences of a record that fit in a row, as one document; empty where no token of it trains."""
    return join_sequences(self.fitting(self.sequences(values)))

  def sequences(self, values: Sequence[Any]) -> list[TrainingSequence]:
    """The sequences of a record, however long."""
    return self.row_sequences(self.row(values))

  def row(self, values: Sequence[Any]) -> dict[str, Any]:
    """The values of a record by name, from JSON text where they are lists of messages, and formatted."""
    row = dict(zip((*self.columns, *self.image_columns), values, strict=True))
    if self.formatting_func is not None:
      row = _as_row(self._formatted(row), self.options.formatting_func)
    return {name: value if name in self.image_columns else _parsed(value, name) for name, value in row.items()}

  def row_sequences(self, row: Mapping[str, Any]) -> list[TrainingSequence]:
    """The sequences of a row."""
    if PROMPT in row and COMPLETION in row:
      return self._completion(row)
    others = (TOOLS, *self.image_columns)
    name = MESSAGES if MESSAGES in row else next((one for one in row if one not in others), "")
    return self._conversation(row.get(name), row)

  def fitting(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Those that fit in a row, or as much of them as does."""
    fit = {} if self.media is None else {"fit": self.media.fit}
    cut = [sequence.truncated(self.most, **fit) for sequence in sequences]
    return [
      found
      for sequence, found in zip(sequences, cut, strict=True)
      if found is not None and (self.truncate or found is sequence)
    ]

  def _formatted(self, row: dict[str, Any]) -> Any:
    assert self.formatting_func is not None
    try:
      return self.formatting_func(row, **self.options.formatting_kwargs)
    except Exception as error:  # of the user's own code
      raise ConfigError(
        f"formatting_func_path={self.options.formatting_func} fails with {type(error).__name__}: {error}."
      ) from error

  def _completion(self, row: Mapping[str, Any]) -> list[TrainingSequence]:
    prompt, completion = row[PROMPT], row[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
      if not self.options.chat:
        if self._column_images(row):
          raise ConfigError("images need use_chat_template=true, whose template writes where they stand.")
        only = self.options.completion_only
        return [completion_sequence(self.tokenizer, prompt, completion, only, self.with_roles)]
      prompt, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]
    if not isinstance(prompt, list) or not isinstance(completion, list):
      raise ConfigError(f"'{PROMPT}' and '{COMPLETION}' must both be texts, or both lists of messages.")
    context = [{**message, "train": False} if isinstance(message, Mapping) else message for message in prompt]
    return self._conversation([*context, *completion], row)

  def _conversation(self, messages: Any, row: Mapping[str, Any]) -> list[TrainingSequence]:
    if not isinstance(messages, list):
      raise ConfigError(
        f"{self.options.method}=true needs a column of messages, or the columns prompt and completion: set the "
        f"*_data_columns keys."
      )
    tools = template_tools(row.get(TOOLS))
    values, only = {} if tools is None else {TOOLS: tools}, self.options.completion_only
    if self.media is not None:
      messages = with_column_images(messages, self._column_images(row))
    return conversation_sequences(self.tokenizer, messages, values, only, self.with_roles, self.media)

  def _column_images(self, row: Mapping[str, Any]) -> list[Any]:
    return images_of_columns([row.get(name) for name in self.image_columns])


def _parsed(value: Any, column: str) -> Any:
  """A value, from its JSON text where that is a list; record files have no other way to hold messages."""
  if isinstance(value, bytes):
    value = value.decode(errors="replace")
  if isinstance(value, str) and value.lstrip().startswith("["):
    try:
      found = json.loads(value)
    except (ValueError, RecursionError):
      return value
    return found if column not in _TEXT_COLUMNS or _are_messages(found) else value
  if isinstance(value, np.ndarray):
    value = value.tolist()
  return list(value) if isinstance(value, tuple) else value


def _are_messages(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _as_row(found: Any, path: str) -> dict[str, Any]:
  if isinstance(found, Mapping):
    return dict(found)
  if isinstance(found, tuple) and len(found) == 2:
    return {PROMPT: found[0], COMPLETION: found[1]}
  if isinstance(found, list):
    return {MESSAGES: found}
  raise ConfigError(
    f"formatting_func_path={path} must return a list of messages, a pair of prompt and completion, or a mapping with "
    f"these names; it returned {type(found).__name__}."
  )


def _load_function(path: str) -> Callable[..., Any]:
  module, separator, name = path.replace(":", ".").rpartition(".")
  try:
    found = getattr(importlib.import_module(module), name) if separator else None
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(f"formatting_func_path={path} cannot be imported: {error}.") from None
  if not callable(found):
    raise ConfigError(
      f"formatting_func_path={path} must be the import path of a function, such as package.module.name."
    )
  return found


def _source(function: Callable[..., Any]) -> str:
  """A digest of the function's source, so that a run is not resumed with another one."""
  try:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
  except (OSError, TypeError):
    return ""
