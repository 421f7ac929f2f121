"""Converts the columns of a record to a preference pair: the same prompt with a chosen and a rejected answer.

A labelled answer is a pair too: its other side is the answer of another row to the same prompt, by which KTO estimates
how far the model is from its reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.conversations import TrainingSequence, join_sequences
from maxtext.data.documents import LABEL, PAIRED, TokenCounts
from maxtext.data.sources.conversation_encoding import CHOSEN, COMPLETION, PROMPT, REJECTED, ConversationEncoding


@dataclass(frozen=True)
class PreferenceEncoding:
  """Converts the columns prompt, chosen and rejected, or chosen and rejected alone, to a pair of sequences.

  Without a prompt, both are whole conversations, or texts, and what they begin with in common is the prompt. Each side
  is encoded as a conversation of its own, so its tokens are those that the server would prefill and generate.

  Attributes:
    conversations: encodes each side.
    labelled: the columns are prompt, completion and label; the values of another row follow as a last one.
  """

  conversations: ConversationEncoding
  labelled: bool = False

  @property
  def columns(self) -> tuple[str, ...]:
    """The names of the columns."""
    return self.conversations.columns

  @property
  def image_columns(self) -> tuple[str, ...]:
    """The names of columns of images."""
    return self.conversations.image_columns

  @property
  def identity(self) -> dict[str, Any]:
    """What determines the tokens."""
    return {**self.conversations.identity, "pairs": True} | ({"labelled": True} if self.labelled else {})

  def in_folder(self, folder: str | None) -> "PreferenceEncoding":
    """With paths of media relative to a folder; None where the data is in several."""
    return replace(self, conversations=self.conversations.in_folder(folder))

  def counts(self, shards: int) -> TokenCounts:
    """A pair is never cut."""
    return self.conversations.counts(shards)

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The pair as one document; empty where it does not fit in a row."""
    pair = join_sequences(self.fitting(self.sequences(values)), PAIRED)
    if not self.labelled:
      return pair
    document = np.zeros(len(pair), [*pair.dtype.descr, (LABEL, np.float32)])
    for name in pair.dtype.names or ():
      document[name] = pair[name]
    if len(pair):
      is_desirable = self.conversations.row(values[:-1])[LABEL]
      document[LABEL][np.flatnonzero(pair["side"] == 0)[-1]] = 1.0 if is_desirable else -1.0
    return document

  def sequences(self, values: Sequence[Any]) -> list[TrainingSequence]:
    """The chosen and the rejected sequence, however long."""
    row = self._labelled_row(values) if self.labelled else self.conversations.row(values)
    if CHOSEN not in row or REJECTED not in row:
      raise ConfigError(
        "use_dpo=true needs the columns chosen and rejected, and prompt where they do not contain it: set the "
        "*_data_columns keys."
      )
    if row.get(PROMPT) is None:
      parts = _common_prompt(row[CHOSEN], row[REJECTED], self.conversations.options.chat)
      row |= dict(zip((PROMPT, CHOSEN, REJECTED), parts, strict=True))
    return [self._side(row, side) for side in (CHOSEN, REJECTED)]

  def _labelled_row(self, values: Sequence[Any]) -> dict[str, Any]:
    """A labelled answer as a pair with the answer of another row."""
    row, other = self.conversations.row(values[:-1]), self.conversations.row(values[-1])
    if not {PROMPT, COMPLETION, LABEL} <= row.keys() or COMPLETION not in other:
      raise ConfigError(
        "dpo_loss_type=[kto] needs the columns prompt, completion and label: set the *_data_columns keys to "
        "[prompt,completion,label]."
      )
    if row[LABEL] not in (True, False):
      raise ConfigError(f"'{LABEL}' is {row[LABEL]!r}: it must be true for a desirable answer, or false.")
    return {**row, CHOSEN: row[COMPLETION], REJECTED: other[COMPLETION]}

  def fitting(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Both, or none where one row does not hold them."""
    inputs, media = sum(len(sequence.tokens) - 1 for sequence in sequences), self.conversations.media
    fit = media is None or media.fit(*(sequence.media for sequence in sequences))
    return list(sequences) if inputs < self.conversations.most and fit else []

  def _side(self, row: Mapping[str, Any], side: str) -> TrainingSequence:
    if type(row[PROMPT]) is not type(row[side]) or not isinstance(row[side], str | list):
      raise ConfigError(
        f"'{PROMPT}' and '{side}' must both be texts, or both lists of messages; where '{side}' contains the prompt, "
        f"leave '{PROMPT}' out of the *_data_columns keys."
      )
    found = self.conversations.row_sequences({**row, COMPLETION: row[side]})
    if len(found) != 1:
      raise ConfigError(
        f"'{side}' is {len(found)} training sequences, and must be one: an answer of the assistant with a weight, and "
        f"earlier answers, if any, that the chat template repeats as they are."
      )
    if len(found[0].tokens) < 2 or not any(found[0].weights[1:]):
      raise ConfigError(f"'{side}' has no token to compare: an answer needs one, after a prompt or a first token.")
    return found[0]


def _common_prompt(chosen: Any, rejected: Any, chat: bool) -> tuple[Any, Any, Any]:
  """What both begin with, and the rest of each. A text's answers begin with the space before their first word, as a
  model writes it, unless they become turns of a chat."""
  if not (
    (isinstance(chosen, str) and isinstance(rejected, str)) or (isinstance(chosen, list) and isinstance(rejected, list))
  ):
    raise ConfigError(f"'{CHOSEN}' and '{REJECTED}' must both be texts, or both lists of messages.")
  common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
  if not common or common in (len(chosen), len(rejected)):
    raise ConfigError(
      f"'{CHOSEN}' and '{REJECTED}' must begin alike, with the prompt, and then differ; otherwise give a column prompt."
    )
  if isinstance(chosen, str):
    while common and not chosen[common - 1].isspace():  # no word is divided
      common -= 1
    if common and not chat and chosen[common - 1] == " ":
      common -= 1
  return chosen[:common], chosen[common:], rejected[common:]
