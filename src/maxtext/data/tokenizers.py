"""Tokenizers: SentencePiece, Hugging Face and tiktoken vocabularies behind one class.

Each library is imported when a vocabulary of its kind is opened. Nothing here imports JAX, so that data workers start
quickly.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact
from maxtext.configs.types import TokenizerType
from maxtext.data.chat_template import BREAK, DELETE, GUARDED, Guard, remove_marks, render_template
from maxtext.data.options import TokenizerOptions
from maxtext.data.safe_paths import read_json_inside, read_text_inside, resolve_inside
from maxtext.data.special_tokens import SpecialTokenFinder

_SENTINEL = "\u263a"  # a character that no token joins with what follows

Message = Mapping[str, Any]
"""One turn of a conversation: at least "role" and "content"."""


def load_tokenizer(options: TokenizerOptions) -> "TextTokenizer":
  """Loads the tokenizer that `tokenizer_type` and `tokenizer_path` name.

  Raises:
    ConfigError: it cannot be read, the model has too few embeddings for it, or it lacks a token that a key adds.
  """
  if options.path is None:
    raise ConfigError("tokenizer_path is not set: write the path of a vocabulary, or its name on Hugging Face.")
  vocabulary = _OPEN[options.kind](options)
  check_vocab_size(options.vocab_size, vocabulary.size, f"tokenizer_path={options.path}")
  for key, enabled, token, what in (
    ("add_bos", options.add_bos, vocabulary.bos, "beginning"),
    ("add_eos", options.add_eos, vocabulary.eos, "end"),
  ):
    if enabled and token is None:
      raise ConfigError(f"tokenizer_path={options.path} has no {what}-of-sequence token: write {key}=false.")
  content = hashlib.sha256(next(iter(vocabulary.files.values())).read_bytes()).hexdigest()
  return TextTokenizer(
    options.kind.value, content, vocabulary, options.add_bos, options.add_eos, _chat_template(options, vocabulary)
  )


def adds_bos(folder: Path) -> bool | None:
  """Whether a folder's tokenizer puts a token before each document; None if its files do not say."""
  settings = read_json_inside(folder, "tokenizer_config.json")
  if isinstance(said := settings.get("add_bos_token"), bool):
    return said and settings.get("bos_token") is not None
  if not (content := read_json_inside(folder, "tokenizer.json")):
    return None
  processor = content.get("post_processor") or {}
  steps = processor.get("processors", [processor]) if isinstance(processor, Mapping) else []
  rules = [step.get("single") for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
  firsts = [rule[:1] for rule in rules if isinstance(rule, list)]
  return any(isinstance(part, Mapping) and "SpecialToken" in part for first in firsts for part in first)


def check_vocab_size(vocab_size: int, size: int, whose: str) -> None:
  """Raises `ConfigError` if a token would have no embedding. Embeddings without a token are allowed."""
  if size > vocab_size:
    raise ConfigError(
      f"{whose} has {size} tokens, {size - vocab_size} more than vocab_size={vocab_size}: "
      f"write vocab_size={size}, or a larger number that divides better."
    )


def train_tokenizer(texts: Iterable[str], size: int, characters: int, folder: Path) -> dict[str, Path]:
  """Trains a byte-level BPE vocabulary, which can encode any text, and returns {name: file in `folder`}.

  Args:
    texts: the documents.
    size: maximum number of tokens.
    characters: number of characters to train on, from the start of `texts`.
    folder: where the files are written.
  """
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  if size < (least := len(alphabet) + len(special)):
    raise ConfigError(f"vocab_size={size} is too small to train a tokenizer: it takes {least} for bytes and its ends.")
  trainer = trainers.BpeTrainer(
    vocab_size=size, special_tokens=list(special.values()), initial_alphabet=alphabet, show_progress=False
  )
  bpe = Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  bpe.train_from_iterator(_first_characters(texts, characters), trainer)
  files = {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}
  # The library itself raises no `OSError` when a disk is full.
  files["tokenizer.json"].write_text(bpe.to_str(pretty=True), encoding="utf-8")
  files["tokenizer_config.json"].write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
  return files


class Vocabulary(Protocol):
  """The interface of a vocabulary, whatever its library."""

  size: int  # one more than the largest token
  bos: int | None
  eos: int | None
  pad: int | None
  files: dict[str, Path]  # {name: file}, all that is needed to open it again; the first holds the vocabulary
  chat_template: str | None = None

  def encode(self, text: str, special: bool) -> Sequence[int]:
    """Encodes text. `special` reads the names of special tokens as such; otherwise they are plain text."""
    ...

  def encode_guarded(self, text: str) -> Sequence[int]:
    """Encodes a rendered conversation with special tokens, and removes the marks of `Guard` in users' text."""
    ...

  def special_names(self, template: str) -> Collection[str]:
    """Names that `encode` reads as special tokens in the output of this template."""
    ...

  def decode(self, tokens: list[int]) -> str:
    """Decodes tokens to text, without special tokens."""
    ...

  def name(self, token: int) -> str:
    """The name of a special token."""
    ...

  def for_grammars(self) -> tuple[str, tuple[Any, ...]]:
    """What grammar worker processes need to know the bytes of each token: the kind, and picklable values."""
    ...


@dataclass(frozen=True, eq=False)
class TextTokenizer:
  """A vocabulary, the special tokens added to each document, and a chat template."""

  kind: str
  sha256: str
  vocabulary: Vocabulary
  add_bos: bool
  add_eos: bool
  chat_template: str | None

  @property
  def vocab_size(self) -> int:
    """One more than the largest token."""
    return self.vocabulary.size

  @property
  def bos(self) -> int | None:
    """The token before a document."""
    return self.vocabulary.bos

  @property
  def eos(self) -> int | None:
    """The token after a document."""
    return self.vocabulary.eos

  @property
  def pad(self) -> int:
    """The padding token; 0 if the vocabulary has none, since padding has no effect on the loss."""
    return self.vocabulary.pad or 0

  @property
  def identity(self) -> dict[str, Any]:
    """What determines the tokens of a document: tokenizers with equal identities make the same data."""
    return {
      "kind": self.kind,
      "sha256": self.sha256,
      "vocab_size": self.vocab_size,
      "bos": self.bos if self.add_bos else None,
      "eos": self.eos if self.add_eos else None,
    }

  def encode(self, text: str, special: bool = False) -> np.ndarray:
    """Encodes a document to int32 tokens. Names of special tokens in it are plain text, unless `special`."""
    before = [self.bos] if self.add_bos else []
    after = [self.eos] if self.add_eos else []
    return np.array([*before, *self.vocabulary.encode(text, special), *after], np.int32)

  def decode(self, tokens: Iterable[int], shown: Collection[int] = ()) -> str:
    """Decodes tokens to text, without special tokens other than those in `shown`."""
    found, text = [int(token) for token in tokens], ""
    while shown and (place := next((n for n, token in enumerate(found) if token in shown), None)) is not None:
      text += self.vocabulary.decode(found[:place]) + self.vocabulary.name(found[place])
      found = found[place + 1 :]
    return text + self.vocabulary.decode(found)

  def for_grammars(self) -> tuple[str, tuple[Any, ...]]:
    """What grammar worker processes (structured outputs) need to know about the tokens, in picklable values."""
    if self.eos is None:
      raise ConfigError("The tokenizer has no end-of-sequence token, which answers of a given form end with.")
    return self.vocabulary.for_grammars()

  def chat(
    self,
    messages: Sequence[Message],
    *,
    answer: bool = False,
    expand: Callable[[str], str] | None = None,
    **values: Any,
  ) -> np.ndarray:
    """Encodes a conversation in the format of the chat template to int32 tokens.

    Special tokens come from the template only: their names in messages and values are plain text.

    Args:
      messages: the turns of the conversation.
      answer: whether to end with the opening of the assistant's next turn.
      expand: changes the rendered text, in which names of special tokens are the template's own.
      **values: other variables of the template, such as `tools`.
    """
    guarded, messages, marked = self.guarded(messages, values)
    text = self.render(messages, answer=answer, **marked)
    if expand is not None:
      text = expand(text)
    return np.array(self._encode_rendered(text, special=True, guarded=guarded), np.int32)

  def guarded(
    self, messages: Sequence[Message], values: Mapping[str, Any]
  ) -> tuple[bool, Sequence[Message], Mapping[str, Any]]:
    """Whether messages and values contain names of special tokens; and both, with those names broken up by marks."""
    if not self._guard.wanted([messages, values]):
      return False, messages, values
    messages, values = self._guard.guarded([messages, values])
    return True, messages, {**values, GUARDED: True}

  def encode_continuation(self, text: str, *, special: bool, guarded: bool = False) -> list[int]:
    """Encodes text that follows other tokens: without the space that some vocabularies put before a text.

    Args:
      text: rendered by a chat template, or plain.
      special: reads the names of special tokens as such.
      guarded: the text has the marks of `guarded`.
    """
    tokens = list(self._encode_rendered(text, special, guarded))
    if not self._adds_space:
      return tokens
    alone = list(self.vocabulary.encode(_SENTINEL, special=False))
    joined = list(self._encode_rendered(_SENTINEL + text, special, guarded))
    return joined[len(alone) :] if joined[: len(alone)] == alone else tokens

  @cached_property
  def special_ids(self) -> frozenset[int]:
    """The special tokens that the chat template may write, and the ends of a document."""
    names = self.vocabulary.special_names(self.chat_template or "")
    encoded = [self.vocabulary.encode(name, special=True) for name in names]
    ends = {token for token in (self.bos, self.eos) if token is not None}
    return frozenset({tokens[0] for tokens in encoded if len(tokens) == 1} | ends)

  def render(self, messages: Sequence[Message], *, answer: bool = False, **values: Any) -> str:
    """Renders a conversation as text; the arguments are those of `chat`."""
    if self.chat_template is None:
      raise ConfigError("The tokenizer has no chat template: write chat_template_path=FILE.jinja.")
    specials = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.vocabulary.pad}
    named = {name: self.vocabulary.name(token) for name, token in specials.items() if token is not None}
    return render_template(self.chat_template, messages=messages, add_generation_prompt=answer, **named, **values)

  def _encode_rendered(self, text: str, special: bool, guarded: bool) -> Sequence[int]:
    return self.vocabulary.encode_guarded(text) if guarded else self.vocabulary.encode(text, special)

  @cached_property
  def _adds_space(self) -> bool:
    """Whether a text begins with a space that is not in it, as in SentencePiece."""
    first = self.vocabulary.encode("a", special=False)[:1]
    return bool(first) and self.vocabulary.name(first[0]).startswith("\u2581")

  @cached_property
  def _guard(self) -> Guard:
    return Guard(self.vocabulary.special_names(self.chat_template or ""))


class _SentencePiece(Vocabulary):
  """A `.model` file of SentencePiece."""

  def __init__(self, options: TokenizerOptions) -> None:
    from sentencepiece import SentencePieceProcessor

    file = _find(options, "tokenizer.model", "*.model")
    try:
      self._processor = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):
      raise _unreadable_error(options, "a SentencePiece model") from None
    ids = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id())
    self.bos, self.eos, self.pad = (None if token < 0 else token for token in ids)
    self.size, self.files = self._processor.get_piece_size(), {"tokenizer.model": file}

  def encode(self, text: str, special: bool) -> Sequence[int]:
    if not special or not self._control:
      return self._processor.encode(text)
    return [t for p in _split(text, self._control) for t in self._piece(p)]

  def encode_guarded(self, text: str) -> Sequence[int]:
    parts = _split(text, self._control) if self._control else [text]
    return [t for p in parts for t in ([self._control[p]] if p in self._control else self._plain(p))]

  def special_names(self, template: str) -> Collection[str]:
    return {*self._control, *(name for name in self._symbols if name in template)}

  def decode(self, tokens: list[int]) -> str:
    return self._processor.decode(tokens)

  def name(self, token: int) -> str:
    return self._processor.id_to_piece(token)

  def for_grammars(self) -> tuple[str, tuple[Any, ...]]:
    return "sentencepiece", (self._processor.serialized_model_proto(),)

  def _piece(self, text: str) -> list[int]:
    return [self._control[text]] if text in self._control else self._processor.encode(text)

  def _plain(self, text: str) -> list[int]:
    """Encodes text with marks. The library finds user-defined symbols in any text, but not across separate calls."""
    chunks: list[list[str]] = [[]]
    most = max(map(len, self._symbols), default=2) - 1
    end = ""  # the last characters of the last chunk, which may begin a symbol; chunks are joined once, at the end
    for part in (remove_marks(part) for part in text.split(BREAK)):
      if self._symbols and self._joins(end, part[:most]):
        chunks.append([])
        end = ""
      chunks[-1].append(part)
      end = (end + part[-most:])[-most:]
    joined = ("".join(chunk) for chunk in chunks)
    return [token for chunk in joined if chunk for token in self._processor.encode(chunk)]

  def _joins(self, left: str, right: str) -> bool:
    """Whether joining two texts creates a symbol across their boundary."""
    return any((left + right).count(s) > left.count(s) + right.count(s) for s in self._symbols)

  @cached_property
  def _control(self) -> dict[str, int]:
    """Control tokens, which the library never finds in text."""
    return {self.name(token): token for token in range(self.size) if self._processor.is_control(token)}

  @cached_property
  def _symbols(self) -> dict[str, int]:
    """User-defined symbols in angle brackets, which some models use for turns; the library finds them in any text."""
    model = self._processor
    names = ((self.name(token), token) for token in range(self.size) if not model.is_control(token))
    return {name: token for name, token in names if re.fullmatch(r"<[^<>\s]+>", name) and self._reads(name, token)}

  def _reads(self, name: str, token: int) -> bool:
    return not self._processor.is_byte(token) and token in self._processor.encode(name)


class _HuggingFace(Vocabulary):
  """A folder with `tokenizer.json` and optional companion files, or that file alone."""

  _BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
  _LONG = 2**13  # characters; longer texts are encoded as a batch, which releases the GIL for other threads

  def __init__(self, options: TokenizerOptions) -> None:
    import tokenizers

    file = _find(options, "tokenizer.json", beside=self._BESIDE)
    try:
      self._documents = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # the library raises Exception itself
      raise _unreadable_error(options, "a tokenizer.json of Hugging Face") from None
    self._documents.no_truncation()
    self._documents.no_padding()
    self._documents.encode_special_tokens = True
    folder = file.parent
    beside = {name: path for name in self._BESIDE if (path := resolve_inside(folder, name)).exists()}
    self.files = {"tokenizer.json": file, **beside}
    settings = read_json_inside(folder, "special_tokens_map.json") | read_json_inside(folder, "tokenizer_config.json")
    self.bos, self.eos, self.pad = (self._token(folder, settings, f"{which}_token") for which in ("bos", "eos", "pad"))
    self.size = max(self._documents.get_vocab().values()) + 1
    template = read_text_inside(folder, "chat_template.jinja")
    self.chat_template = _default_template(folder, settings) if template is None else template

  def encode(self, text: str, special: bool) -> Sequence[int]:
    return self._encode(self._conversations if special else self._documents, text)

  def decode(self, tokens: list[int]) -> str:
    return self._documents.decode(tokens, skip_special_tokens=True)

  def name(self, token: int) -> str:
    return str(self._documents.id_to_token(token))

  def for_grammars(self) -> tuple[str, tuple[Any, ...]]:
    return "huggingface", (self._documents.to_str(), self.eos)

  def encode_guarded(self, text: str) -> Sequence[int]:
    return self._encode(self._guarded, text)

  def special_names(self, template: str) -> Collection[str]:
    return {token.content for token in self._documents.get_added_tokens_decoder().values() if token.special}

  @cached_property
  def _guarded(self) -> Any:
    """A tokenizer that finds special tokens in unnormalized text, and removes the marks before other normalization."""
    from tokenizers import normalizers

    content = json.loads(self._documents.to_str())
    for token in content["added_tokens"]:
      token["normalized"] = token["normalized"] and not token["special"]
    tokenizer = type(self._documents).from_str(json.dumps(content))
    marks = [normalizers.Replace(BREAK, ""), normalizers.Replace(DELETE, DELETE[0])]
    existing = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*marks, *existing])
    return tokenizer

  @cached_property
  def _conversations(self) -> Any:
    """A second tokenizer that finds special tokens in text: the library stores that mode in the object."""
    return type(self._documents).from_str(self._documents.to_str())

  def _encode(self, tokenizer: Any, text: str) -> Sequence[int]:
    if len(text) < self._LONG:
      return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

  def _token(self, folder: Path, settings: Mapping[str, Any], which: str) -> int | None:
    """The id of a special token, whose entry is a string or an object with `content`."""
    if (name := settings.get(which)) is None:
      return None
    name = name.get("content") if isinstance(name, Mapping) else name
    if not isinstance(name, str):
      raise ConfigError(f"{folder / 'tokenizer_config.json'} says {which}, but names no token.")
    return self._documents.token_to_id(name)


# The pre-tokenization pattern of Meta's tokenizers.
TIKTOKEN_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = (
  "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
  "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
  "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
_SPECIAL = 256


def tiktoken_special(first: int) -> dict[str, int]:
  """{name: id} of the special tokens after the tokens of a tiktoken file; `first` is the first id."""
  reserved = (f"<|reserved_special_token_{n}|>" for n in range(2, _SPECIAL))
  return {name: first + place for place, name in enumerate([*_NAMED, *reserved][:_SPECIAL])}


class _Tiktoken(Vocabulary):
  """A tiktoken file of byte sequences and ranks, with Meta's pre-tokenization and 256 special tokens."""

  def __init__(self, options: TokenizerOptions) -> None:
    import tiktoken
    import tiktoken.load

    file = _find(options, "tokenizer.model", "original/tokenizer.model", "*.tiktoken")
    try:
      ranks = tiktoken.load.load_tiktoken_bpe(str(file))
    except ValueError:
      raise _unreadable_error(options, "a tiktoken file of base64 words and ranks") from None
    special = tiktoken_special(len(ranks))
    self._arguments = (file.name, TIKTOKEN_SPLIT, ranks, special)
    self._encoding = tiktoken.Encoding(file.name, pat_str=TIKTOKEN_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    self._text, self.size, self.files = len(ranks), self._encoding.n_vocab, {"tokenizer.model": file}
    self.bos, self.eos, self.pad = (special[_NAMED[place]] for place in (0, 1, 4))

  def encode(self, text: str, special: bool) -> Sequence[int]:
    return self._encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())

  def encode_guarded(self, text: str) -> Sequence[int]:
    special = self.special_names("")
    return [t for p in _split(text, special) for t in self.encode(remove_marks(p), special=p in special)]

  def special_names(self, template: str) -> Collection[str]:
    return self._encoding.special_tokens_set

  def decode(self, tokens: list[int]) -> str:
    return self._encoding.decode([token for token in tokens if token < self._text])

  def name(self, token: int) -> str:
    return self._encoding.decode([token])

  def for_grammars(self) -> tuple[str, tuple[Any, ...]]:
    return "tiktoken", (*self._arguments, self.eos)


_OPEN: dict[TokenizerType, Callable[[TokenizerOptions], Vocabulary]] = {
  TokenizerType.SENTENCEPIECE: _SentencePiece,
  TokenizerType.HUGGINGFACE: _HuggingFace,
  TokenizerType.TIKTOKEN: _Tiktoken,
}


def _split(text: str, names: Collection[str]) -> list[str]:
  """Splits text into names and the text between them."""
  edges = [edge for span in _names(frozenset(names)).spans(text) for edge in span]
  return [text[a:b] for a, b in pairwise([0, *edges, len(text)]) if a < b]


_names = lru_cache(maxsize=8)(SpecialTokenFinder)


def _first_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
  for text in texts:
    if characters <= 0:
      return
    yield text[:characters]
    characters -= len(text)


def _find(options: TokenizerOptions, *patterns: str, beside: Sequence[str] = ()) -> Path:
  """The vocabulary's file: `tokenizer_path` itself, or the first match in that local or Hugging Face folder."""
  path = Path(str(options.path)).expanduser()
  if path.is_file():
    return path
  folder = path if path.is_dir() else _download(options, [*patterns, *beside])
  for pattern in patterns:
    if found := sorted(folder.glob(pattern)):
      return resolve_inside(folder, str(found[0].relative_to(folder)))
  raise ConfigError(
    f"tokenizer_path={options.path} holds no {' or '.join(patterns)}, which tokenizer_type={options.kind.value} reads."
  )


def _download(options: TokenizerOptions, patterns: list[str]) -> Path:
  name = str(options.path)
  if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
    raise ConfigError(f"tokenizer_path={name} is no file and no folder.")
  from huggingface_hub import snapshot_download
  from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

  try:
    return Path(snapshot_download(name, allow_patterns=patterns, token=options.access_token))
  except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
    reason = redact(str(error).strip().splitlines()[0], options.access_token)
    raise ConfigError(
      f"tokenizer_path={name} is no file or folder here, and Hugging Face does not give it: {reason} "
      f"A gated name needs a token: set HF_TOKEN in the environment."
    ) from None


def _default_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
  """The chat template in `tokenizer_config.json`: one, or several by name."""
  template = settings.get("chat_template")
  try:
    if isinstance(template, list):
      template = {t["name"]: t["template"] for t in template}.get("default")
  except (KeyError, TypeError):
    template = ()
  if not isinstance(template, str | None):
    raise ConfigError(
      f"{folder / 'tokenizer_config.json'} has a chat_template that is no text and no list of named ones."
    )
  return template


def _unreadable_error(options: TokenizerOptions, expected: str) -> ConfigError:
  kinds = ", ".join(kind.value for kind in TokenizerType)
  return ConfigError(
    f"tokenizer_path={options.path} is not {expected}: change it, or tokenizer_type to what it is ({kinds})."
  )


def _chat_template(options: TokenizerOptions, vocabulary: Vocabulary) -> str | None:
  """The chat template of `chat_template_path` or `chat_template`, else the vocabulary's own."""
  if options.chat_template and options.chat_template_path:
    raise ConfigError("chat_template and chat_template_path are both set: leave one out.")
  if options.chat_template_path:
    try:
      return Path(options.chat_template_path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
      raise ConfigError(f"chat_template_path={options.chat_template_path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
      raise ConfigError(f"chat_template_path={options.chat_template_path} is not text in UTF-8.") from None
  return options.chat_template or vocabulary.chat_template
