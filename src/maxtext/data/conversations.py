"""Training sequences of conversations (SFT, with completion-only loss).

A token trains if and only if the server would have to generate it.

For each answer of the assistant, the prompt is what the server prefills when it is sent the messages before it, and the
rest of the sequence is the answer's own tokens up to the end of its turn. An answer that follows in the same
conversation continues the sequence if its prompt begins with all of it. Where the template changes earlier turns, for
example because it leaves their reasoning out, or where the tokens of the joined text are others, it begins a new one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.chat_messages import REASONING, template_messages
from maxtext.data.chat_template import GENERATION_BEGIN, GENERATION_END, MARK_GENERATION, remove_marks
from maxtext.data.conversation_media import ConversationMedia, PlannedMedium
from maxtext.data.documents import MEDIUM, SEGMENTED
from maxtext.data.tokenizers import TextTokenizer


@dataclass
class TrainingSequence:
  """Tokens and their loss weights.

  Attributes:
    tokens: of prompts and answers.
    weights: of each token in the loss.
    answers: [begin, end) of each answer that trains.
    roles: of each token, whose turn it is in; empty unless they were asked for.
    media: that each token stands for a feature of, None for text; empty where there are none.
  """

  tokens: list[int]
  weights: list[float]
  answers: list[tuple[int, int]]
  roles: list[str] = field(default_factory=list)
  media: list[PlannedMedium | None] = field(default_factory=list)

  def truncated(
    self, most: int, fit: Callable[[Sequence[PlannedMedium | None]], bool] = lambda media: True
  ) -> "TrainingSequence | None":
    """The sequence up to the last answer that is whole within so many tokens and whose media `fit`; None if there is
    none. So no medium is cut."""
    if len(self.tokens) <= most and fit(self.media):
      return self
    answers = [span for span in self.answers if span[1] <= most and fit(self.media[: span[1]])]
    if not answers:
      return None
    end = answers[-1][1]
    return TrainingSequence(self.tokens[:end], self.weights[:end], answers, self.roles[:end], self.media[:end])


def conversation_sequences(
  tokenizer: TextTokenizer,
  messages: Sequence[Mapping[str, Any]],
  values: Mapping[str, Any],
  completion_only: bool,
  with_roles: bool = False,
  media: ConversationMedia | None = None,
) -> list[TrainingSequence]:
  """The sequences that train all answers of the assistant.

  A message may have `train` (false takes it as context only) and `weight` (of its tokens in the loss, 1 by default).

  Args:
    tokenizer: with a chat template.
    messages: the conversation.
    values: other variables of the template, such as `tools`.
    completion_only: weight 0 for all other tokens; otherwise 1.
    with_roles: finds the role of each token, which renders every beginning of the conversation.
    media: finds those of the messages; None allows none. No token of a medium trains.
  """
  checked, found = template_messages(messages, media=media is not None), list[TrainingSequence]()
  planned = [] if media is None else media.planned(messages)

  def chat(count: int, answer: bool) -> np.ndarray:
    """The tokens of the first messages."""
    there = [medium for own in planned[:count] for medium in own]
    expand = partial(media.expanded, media=there) if media is not None and there else None
    return tokenizer.chat(checked[:count], answer=answer, expand=expand, **values)

  for number, message in enumerate(messages):
    weight = _weight(message, number)
    if checked[number]["role"] != "assistant" or not weight:
      continue
    if not number:
      raise ConfigError("messages.0: a conversation cannot begin with an answer.")
    if planned and planned[number]:
      raise ConfigError(f"messages.{number}: an answer has media, and models answer by text.")
    tokens = chat(number, answer=True)
    prompt = tokens.tolist()
    answer = answer_tokens(tokenizer, checked[: number + 1], values)
    if not _generates(tokenizer, checked[: number + 1], values, answer):
      continue
    current = found[-1] if found and prompt[: len(found[-1].tokens)] == found[-1].tokens else None
    if current is None:
      found.append(current := TrainingSequence([], [], []))
    new = prompt[len(current.tokens) :]
    current.tokens += new + answer
    current.weights += [0.0 if completion_only else 1.0] * len(new) + [weight] * len(answer)
    if media is not None and any(planned[:number]):
      there = media.of_tokens(tokens, [medium for own in planned[:number] for medium in own])
      current.media = [*there, *[None] * len(answer)]
      current.weights = [0.0 if medium else w for medium, w in zip(current.media, current.weights, strict=True)]
    current.answers.append((len(prompt), len(prompt) + len(answer)))
    if with_roles:
      roles = _prompt_roles(chat, checked[:number], prompt)
      current.roles += roles[len(current.roles) :] + ["assistant"] * len(answer)
  return found


def chat_prompt(
  tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> list[int]:
  """The tokens that are prefilled for the assistant's answer to messages: for a request, a prompt of `maxtext decode`
  or a sample. `values` are other variables of the chat template."""
  return tokenizer.chat(template_messages(messages), answer=True, **values).tolist()


def completion_sequence(
  tokenizer: TextTokenizer, prompt: str, completion: str, completion_only: bool, with_roles: bool = False
) -> TrainingSequence:
  """A plain text and its completion, as the server sees them in `/v1/completions`; their roles are these two words."""
  before = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
  after = [tokenizer.eos] if tokenizer.add_eos and tokenizer.eos is not None else []
  context = before + list(tokenizer.vocabulary.encode(prompt, special=False))
  answer = tokenizer.encode_continuation(completion, special=False) + after
  weights = [0.0 if completion_only else 1.0] * len(context) + [1.0] * len(answer)
  roles = ["prompt"] * len(context) + ["completion"] * len(answer) if with_roles else []
  return TrainingSequence(context + answer, weights, [(len(context), len(context) + len(answer))], roles)


def answer_tokens(
  tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> list[int]:
  """The tokens that the server has to generate for the last message: the answer, and the end of its turn."""
  guarded, marked, values = tokenizer.guarded(messages, values)
  prompt, whole = tokenizer.render(marked[:-1], answer=True, **values), tokenizer.render(marked, **values)
  text = whole[len(prompt) :] if whole.startswith(prompt) else _after_opening(prompt, whole, marked[-1])
  tokens = tokenizer.encode_continuation(text, special=True, guarded=guarded)
  ends = [place for place, token in enumerate(tokens) if token in tokenizer.special_ids]
  if ends:
    return tokens[: ends[-1] + 1]  # what follows, such as a line break, belongs to the next prompt
  return tokens + ([tokenizer.eos] if tokenizer.add_eos and tokenizer.eos is not None else [])


class ChatContinuation:
  """The tokens between two answers of a conversation: the chat template's for a message, and the next opening.

  They follow the tokens of the first answer, which are not encoded again. The template must write every beginning of a
  conversation in the same way when more follows.

  Args:
    tokenizer: with a chat template.
    role: of the messages.
    system: the system message, if any.

  Raises:
    ConfigError: the template changes earlier turns, or ends them with no token of its own.
  """

  def __init__(self, tokenizer: TextTokenizer, role: str, system: str = "") -> None:
    before = [{"role": "system", "content": system}] if system else []
    messages = [*before, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    self._tokenizer, self._role, self._messages = tokenizer, role, template_messages(messages)
    self._messages[-1] |= dict.fromkeys((REASONING[0], REASONING[-1]), "c")
    answer = answer_tokens(tokenizer, self._messages, {})
    self._end, self._begin = answer[-1], [*tokenizer.chat(self._messages[:-1], answer=True).tolist(), *answer]
    if self._end not in tokenizer.special_ids:
      raise ConfigError("The chat template ends an answer with no special token, so that no message can follow it.")
    message = self._message("d")
    twice = tokenizer.chat([*self._messages, message, self._messages[-1], message], answer=True).tolist()
    if twice != [*self._begin, *self("d"), *answer, *self("d")]:
      raise self._error

  def __call__(self, text: str, last: int | None = None) -> list[int]:
    """The tokens of a message with this text. `last` is the last token of the answer before it: where that is not the
    end of a turn, it comes first."""
    tokens = self._tokenizer.chat([*self._messages, self._message(text)], answer=True).tolist()
    if tokens[: len(self._begin)] != self._begin:
      raise self._error
    return [*([self._end] if last not in (None, self._end) else []), *tokens[len(self._begin) :]]

  def _message(self, text: str) -> dict[str, Any]:
    return template_messages([{"role": self._role, "content": text}])[0]

  @property
  def _error(self) -> ConfigError:
    return ConfigError(
      f"The chat template changes earlier turns where a message of the role '{self._role}' follows an answer, so that "
      f"tokens would not be those that were generated: write another role, or chat_template_path=FILE.jinja."
    )


def join_sequences(sequences: Sequence[TrainingSequence], kind: np.dtype = SEGMENTED) -> np.ndarray:
  """The sequences as one document, whose last field numbers them; empty where there are none."""
  media = [(MEDIUM, object)] if any(sequence.media for sequence in sequences) else []
  document = np.zeros(sum(len(sequence.tokens) for sequence in sequences), [*kind.descr, *media])
  end = 0
  for number, sequence in enumerate(sequences):
    here, end = slice(end, end + len(sequence.tokens)), end + len(sequence.tokens)
    document["token"][here], document["weight"][here] = sequence.tokens, sequence.weights
    document[kind.descr[-1][0]][here] = number
    if sequence.media:
      document[MEDIUM][here] = sequence.media
  return document


def _prompt_roles(
  chat: Callable[[int, bool], np.ndarray], messages: Sequence[Mapping[str, Any]], prompt: list[int]
) -> list[str]:
  """The role of each token of a prompt: that of the message which adds it to the tokens of the messages before.

  Where a beginning of the conversation has other tokens than the prompt begins with, its messages cannot be told apart
  from the next, and their tokens have all their roles, as in 'system+user'. The opening of the answer is the
  assistant's. `chat` has the tokens of so many messages, without an opening if the second argument is false.
  """
  found, open_roles = list[str](), list[str]()
  for count, message in enumerate(messages, 1):
    open_roles.append(message["role"])
    try:
      tokens = chat(count, False).tolist()
    except ConfigError:  # a template may reject what is no whole conversation, such as a system message alone
      continue
    if len(found) <= len(tokens) and prompt[: len(tokens)] == tokens:
      found += ["+".join(dict.fromkeys(open_roles))] * (len(tokens) - len(found))
      open_roles.clear()
  return found + ["+".join(dict.fromkeys(open_roles)) or "assistant"] * (len(prompt) - len(found))


def _generates(
  tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], answer: list[int]
) -> bool:
  """Whether the last message trains by the template's own marks, `{% generation %}`, if it has any.

  Raises:
    ConfigError: the marked text of the last answer is not what the server would generate.
  """
  if "endgeneration" not in (tokenizer.chat_template or ""):
    return True
  _, marked, values = tokenizer.guarded(messages, values)
  text = tokenizer.render(marked, **values, **{MARK_GENERATION: True})
  before = tokenizer.render(marked[:-1], **values, **{MARK_GENERATION: True}).count(GENERATION_BEGIN)
  spans = [part.partition(GENERATION_END)[0] for part in text.split(GENERATION_BEGIN)[1:]][before:]
  named, generated = (tokenizer.decode(tokens).strip() for tokens in (_tokens(tokenizer, "".join(spans)), answer))
  if spans and remove_marks(named) != generated:
    raise ConfigError(
      f"The {{% generation %}} marks of the chat template name {named!r} as an answer, of which the server would "
      f"generate {generated!r}: move the marks, or leave them out."
    )
  return bool(spans)


def _tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
  return tokenizer.encode_continuation(text, special=True)


def _weight(message: Mapping[str, Any], number: int) -> float:
  train, weight = message.get("train"), message.get("weight")
  if not isinstance(train, bool | None):
    raise ConfigError(f"messages.{number}.train: it must be true or false.")
  if not isinstance(weight, int | float | None) or isinstance(weight, bool):
    raise ConfigError(f"messages.{number}.weight: it must be a number.")
  found = 1.0 if weight is None else float(weight)
  if not 0 <= found < float("inf"):
    raise ConfigError(f"messages.{number}.weight: it must be a finite number from 0 on.")
  return 0.0 if train is False else found


def _after_opening(prompt: str, whole: str, message: Mapping[str, Any]) -> str:
  """The answer's text where a prompt ends with an opening that a finished turn does not have, such as `<think>`.

  The server generates what comes after the opening: the rest of the reasoning, and the answer.
  """
  opening = re.search(r"<(\w+)>\s*\Z", prompt)
  content, reasoning = message["content"].rstrip(), message.get(REASONING[0])
  if opening and whole.startswith(before := prompt[: opening.start()]):
    closing = f"</{opening[1]}>"
    if reasoning is not None:
      content = f"{opening[0]}{reasoning}\n{closing}\n\n{content}"
    visible, turn = content.rpartition(closing)[2].strip(), whole[len(before) :]
    if content.startswith(opening[0]) and visible in turn:
      return content[len(opening[0]) :] + turn[turn.index(visible) + len(visible) :]
  raise ConfigError(
    f"The chat template opens an answer with {prompt[-20:]!r}, which it does not write for a finished one: give each "
    f"answer its {REASONING[0]}, or set the template's variable that turns this off."
  )
