"""How much of a data set of conversations, or of preference pairs, trains, counted before a run starts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError, plural
from maxtext.data.conversation_media import media_places
from maxtext.data.documents import DataSource
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.conversation_encoding import ConversationEncoding
from maxtext.data.sources.preference_encoding import PreferenceEncoding

MOST_MEASURED = 10_000
"""Conversations of a source that are read for this; of more, so many that are evenly spread."""
_READ_AT_ONCE = 256
_OTHERS = {"video": "video", "audio": "sound"}  # than images


@dataclass
class ConversationStatistics:
  """Counts of conversations.

  Attributes:
    conversations: all of them, or all pairs.
    measured: those that the other counts are of.
    answers: of the assistant that are to be trained.
    too_long: of these, the ones that do not fit in a row with what comes before them, and are left out.
    tokens: of all sequences that fit.
    trained: of these, the ones with a weight in the loss.
    media: of all sequences that fit; None where rows have none.
  """

  conversations: int = 0
  measured: int = 0
  answers: int = 0
  too_long: int = 0
  tokens: int = 0
  trained: int = 0
  media: Counter[str] | None = None

  def describe(self, length: int, epochs: int, noun: str = "conversation") -> str:
    """One line for the console."""
    scope = "" if self.measured == self.conversations else f"of {self.measured:,} that were measured: "
    too_long = f"longer than max_target_length={length}"
    if self.media is not None:
      too_long += " or with too many media"
    left_out = f", {self.too_long:,} {too_long} and left out" if self.too_long else ""
    shown = "" if self.media is None else f"{plural(self.media['image'], 'image')}; "
    for kind, name in _OTHERS.items():
      shown += f"{plural(self.media[kind], name)}; " if self.media and self.media[kind] else ""
    return (
      f"{plural(self.conversations, noun)}; {scope}{plural(self.answers, 'answer')}{left_out}; "
      f"{shown}{plural(self.tokens, 'token')}, of which {self.trained:,} train; {plural(epochs, 'epoch')}"
    )


def measure_conversations(sources: Sequence[DataSource], method: str) -> ConversationStatistics:
  """Counts what trains in the sources. `method` is the key that asks for it.

  Raises:
    ConfigError: nothing does.
  """
  total = ConversationStatistics()
  for source in sources:
    assert isinstance(source.documents, ColumnDocuments)
    found = _measure(source.documents)
    for field in fields(total):
      own = getattr(found, field.name)
      setattr(total, field.name, own if own is None else (getattr(total, field.name) or type(own)()) + own)
  if not total.trained:
    why = (
      "all answers are longer than max_target_length, or have more media than a row has room for"
      if total.too_long
      else "no conversation has an answer of the assistant with a weight"
    )
    raise ConfigError(f"{method}=true, but no token of {plural(total.measured, 'conversation')} would train: {why}.")
  return total


def _measure(documents: ColumnDocuments) -> ConversationStatistics:
  encoding, count = documents.encoding, sum(documents.sizes)
  assert isinstance(encoding, ConversationEncoding | PreferenceEncoding)
  step = max(1, count / MOST_MEASURED)
  numbers = [int(i * step) for i in range(min(count, MOST_MEASURED))]
  making = encoding.conversations if isinstance(encoding, PreferenceEncoding) else encoding
  found = ConversationStatistics(count, len(numbers), media=None if making.media is None else Counter())
  for begin in range(0, len(numbers), _READ_AT_ONCE):
    some = numbers[begin : begin + _READ_AT_ONCE]
    for number, record in zip(some, documents.read(some), strict=True):
      try:
        sequences = encoding.sequences(documents.values(record))
      except (ConfigError, RunError) as error:
        raise type(error)(f"{documents.where(number)}: {error}") from None
      fitting = encoding.fitting(sequences)
      found.answers += sum(len(one.answers) for one in sequences)
      found.too_long += sum(len(one.answers) for one in sequences) - sum(len(one.answers) for one in fitting)
      found.tokens += sum(len(one.tokens) for one in fitting)
      if found.media is not None:
        found.media.update(medium.kind for one in fitting for medium, _ in media_places(one.media))
      found.trained += sum(weight > 0 for one in fitting for weight in one.weights[1:])
  return found
