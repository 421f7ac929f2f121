"""Text to tokens and back: SentencePiece, Hugging Face and tiktoken vocabularies behind one class.

Each library is imported when a vocabulary of its kind is opened. Nothing here imports JAX, so that the processes that
prepare data start quickly.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import TokenizerType

Message = Mapping[str, Any]
"""One turn of a conversation: at least "role" and "content"."""


def load_tokenizer(config: MaxTextConfig) -> "Tokenizer":
  """The tokenizer that `tokenizer_type` and `tokenizer_path` name; refused where the model has too few embeddings."""
  if config.tokenizer_path is None:
    raise ConfigError("tokenizer_path is not set: write the path of a vocabulary, or its name on Hugging Face.")
  vocabulary = _OPEN[config.tokenizer_type](config)
  refuse_larger_vocabulary(config, vocabulary.size, f"tokenizer_path={config.tokenizer_path}")
  for key, asked, token, what in (
    ("add_bos", config.add_bos, vocabulary.bos, "beginning"),
    ("add_eos", config.add_eos, vocabulary.eos, "end"),
  ):
    if asked and token is None:
      raise ConfigError(f"tokenizer_path={config.tokenizer_path} has no {what}-of-sequence token: write {key}=false.")
  content = hashlib.sha256(next(iter(vocabulary.files.values())).read_bytes()).hexdigest()
  return Tokenizer(
    config.tokenizer_type.value, content, vocabulary, config.add_bos, config.add_eos, _chat_template(config, vocabulary)
  )


def refuse_larger_vocabulary(config: MaxTextConfig, size: int, whose: str) -> None:
  """Raises where tokens would have no embedding; embeddings without a token are harmless."""
  if size > config.vocab_size:
    raise ConfigError(
      f"{whose} has {size} tokens, {size - config.vocab_size} more than vocab_size={config.vocab_size}: "
      f"write vocab_size={size}, or a larger number that divides better."
    )


def train_tokenizer(texts: Iterable[str], size: int, characters: int, folder: Path) -> dict[str, Path]:
  """Trains a byte-level BPE vocabulary, which can write any text, and returns its files in `folder` by name.

  Args:
    texts: documents, of which the first are read.
    size: tokens, at most.
    characters: where reading ends.
    folder: for the files.
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
  bpe.train_from_iterator(_first(texts, characters), trainer)
  files = {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}
  bpe.save(str(files["tokenizer.json"]))
  files["tokenizer_config.json"].write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
  return files


class Vocabulary(Protocol):
  """What the libraries have in common."""

  size: int  # one more than the largest token
  bos: int | None
  eos: int | None
  pad: int | None
  files: dict[str, Path]  # all that is needed to open it again, by name in a folder; the first holds the vocabulary
  chat_template: str | None = None

  def encode(self, text: str, special: bool) -> Sequence[int]:
    """Tokens; the names of special tokens are read as such, or as any other text."""
    ...

  def decode(self, tokens: list[int]) -> str:
    """Text without special tokens."""
    ...

  def name(self, token: int) -> str:
    """How a special token is written."""
    ...

  def for_grammars(self, size: int) -> Any:
    """The bytes of all tokens, as llguidance takes them, among `size` logits; the end of a document ends an answer."""
    ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
  """A vocabulary, and what is added to each document."""

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
    """What fills a row; 0 where the vocabulary has nothing for it, since padding never counts."""
    return self.vocabulary.pad or 0

  @property
  def identity(self) -> dict[str, Any]:
    """What decides the tokens of a document: two tokenizers that agree in it make the same data."""
    return {
      "kind": self.kind,
      "sha256": self.sha256,
      "vocab_size": self.vocab_size,
      "bos": self.bos if self.add_bos else None,
      "eos": self.eos if self.add_eos else None,
    }

  def encode(self, text: str) -> np.ndarray:
    """The tokens of a document, int32. A special token's name in it is text: documents cannot end themselves."""
    before = [self.bos] if self.add_bos else []
    after = [self.eos] if self.add_eos else []
    return np.array([*before, *self.vocabulary.encode(text, special=False), *after], np.int32)

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of tokens, without special ones."""
    return self.vocabulary.decode([int(token) for token in tokens])

  def for_grammars(self, size: int) -> Any:
    """What llguidance must know of the tokens, for a model of `size` logits."""
    if self.eos is None:
      raise ConfigError("The tokenizer has no end-of-sequence token, which answers of a given form end with.")
    try:
      return self.vocabulary.for_grammars(size)
    except ValueError as error:
      raise ConfigError(f"Answers of a given form need tokens whose bytes are known: {error}.") from None

  def chat(self, messages: Sequence[Message], *, answer: bool = False, **values: Any) -> np.ndarray:
    """The tokens of a conversation in the model's own format, int32.

    Args:
      messages: the turns.
      answer: whether to end with the opening of the assistant's next turn.
      **values: what else the template reads, such as `tools`.
    """
    return np.array(self.vocabulary.encode(self.render(messages, answer=answer, **values), special=True), np.int32)

  def render(self, messages: Sequence[Message], *, answer: bool = False, **values: Any) -> str:
    """The same as text."""
    if self.chat_template is None:
      raise ConfigError("The tokenizer has no chat template: write chat_template_path=FILE.jinja.")
    specials = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.vocabulary.pad}
    named = {word: self.vocabulary.name(token) for word, token in specials.items() if token is not None}
    return _render(self.chat_template, messages=messages, add_generation_prompt=answer, **named, **values)


class _SentencePiece(Vocabulary):
  """A `.model` file of SentencePiece."""

  def __init__(self, config: MaxTextConfig) -> None:
    from sentencepiece import SentencePieceProcessor

    file = _find(config, "tokenizer.model", "*.model")
    try:
      self._processor = SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):
      raise _unreadable(config, "a SentencePiece model") from None
    ids = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id())
    self.bos, self.eos, self.pad = (None if token < 0 else token for token in ids)
    self.size, self.files = self._processor.get_piece_size(), {"tokenizer.model": file}

  def encode(self, text: str, special: bool) -> Sequence[int]:
    if not special or not self._control:
      return self._processor.encode(text)
    pieces = re.split(f"({'|'.join(map(re.escape, self._control))})", text)
    return [t for p in pieces if p for t in ([self._control[p]] if p in self._control else self._processor.encode(p))]

  def decode(self, tokens: list[int]) -> str:
    return self._processor.decode(tokens)

  def name(self, token: int) -> str:
    return self._processor.id_to_piece(token)

  def for_grammars(self, size: int) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(cast(Any, _Pieces(self._processor, size)))

  @cached_property
  def _control(self) -> dict[str, int]:
    """Tokens that the library itself never reads from text."""
    return {self.name(token): token for token in range(self.size) if self._processor.is_control(token)}


class _HuggingFace(Vocabulary):
  """A folder with `tokenizer.json`, and what stands beside it; or that file alone."""

  _BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

  def __init__(self, config: MaxTextConfig) -> None:
    import tokenizers

    file = _find(config, "tokenizer.json", beside=self._BESIDE)
    try:
      self._documents = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # the library raises Exception itself
      raise _unreadable(config, "a tokenizer.json of Hugging Face") from None
    self._documents.no_truncation()
    self._documents.no_padding()
    self._documents.encode_special_tokens = True
    beside = {name: path for name in self._BESIDE if (path := file.with_name(name)).exists()}
    self.files = {"tokenizer.json": file, **beside}
    said = _json_beside(file, "special_tokens_map.json") | _json_beside(file, "tokenizer_config.json")
    self.bos, self.eos, self.pad = (self._token(said.get(f"{which}_token")) for which in ("bos", "eos", "pad"))
    self.size = max(self._documents.get_vocab().values()) + 1
    template = file.with_name("chat_template.jinja")
    self.chat_template = template.read_text(encoding="utf-8") if template.exists() else _default(said)

  def encode(self, text: str, special: bool) -> Sequence[int]:
    tokenizer = self._conversations if special else self._documents
    return tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, tokens: list[int]) -> str:
    return self._documents.decode(tokens, skip_special_tokens=True)

  def name(self, token: int) -> str:
    return str(self._documents.id_to_token(token))

  def for_grammars(self, size: int) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(self._documents.to_str(), n_vocab=size, eos_token=self.eos)

  @cached_property
  def _conversations(self) -> Any:
    """Reading special tokens from text is a state of the library's object, so there are two."""
    return type(self._documents).from_str(self._documents.to_str())

  def _token(self, said: str | Mapping[str, Any] | None) -> int | None:
    """A special token is written as a string, or as an object around it."""
    name = said["content"] if isinstance(said, Mapping) else said
    return None if name is None else self._documents.token_to_id(name)


class _Tiktoken(Vocabulary):
  """A file of byte sequences and their ranks, in the layout of Meta's: their way to split, and 256 special tokens."""

  _SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
  )
  _NAMED = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>",
  )  # fmt: skip
  _SPECIAL = 256

  def __init__(self, config: MaxTextConfig) -> None:
    import tiktoken
    import tiktoken.load

    file = _find(config, "tokenizer.model", "original/tokenizer.model", "*.tiktoken")
    try:
      ranks = tiktoken.load.load_tiktoken_bpe(str(file))
    except ValueError:
      raise _unreadable(config, "a tiktoken file of base64 words and ranks") from None
    reserved = (f"<|reserved_special_token_{n}|>" for n in range(2, self._SPECIAL))
    names = [*self._NAMED, *reserved][: self._SPECIAL]
    special = {name: len(ranks) + place for place, name in enumerate(names)}
    self._encoding = tiktoken.Encoding(file.name, pat_str=self._SPLIT, mergeable_ranks=ranks, special_tokens=special)
    self._text, self.size, self.files = len(ranks), self._encoding.n_vocab, {"tokenizer.model": file}
    self.bos, self.eos, self.pad = (special[self._NAMED[place]] for place in (0, 1, 4))

  def encode(self, text: str, special: bool) -> Sequence[int]:
    return self._encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())

  def decode(self, tokens: list[int]) -> str:
    return self._encoding.decode([token for token in tokens if token < self._text])

  def name(self, token: int) -> str:
    return self._encoding.decode([token])

  def for_grammars(self, size: int) -> Any:
    from llguidance.tiktoken import lltokenizer_from_encoding

    return lltokenizer_from_encoding(self._encoding, n_vocab=size, eos_token=self.eos)


class _Pieces:
  """A SentencePiece vocabulary as llguidance's `TokenizerWrapper` describes one; what is no token has no bytes."""

  is_tokenizer_wrapper = True

  def __init__(self, processor: Any, size: int) -> None:
    count = processor.get_piece_size()
    self.bos_token_id, self.eos_token_id = processor.bos_id(), processor.eos_id()
    self.special_token_ids = [
      t for t in range(count) if processor.is_control(t) or processor.is_unknown(t) or processor.is_unused(t)
    ]
    self.tokens = [self._bytes(processor, token) for token in range(count)] + [b""] * (size - count)
    self._processor = processor

  def __call__(self, text: str) -> list[int]:
    return self._processor.encode(text)

  @staticmethod
  def _bytes(processor: Any, token: int) -> bytes:
    piece = processor.id_to_piece(token)
    return bytes([int(piece[3:-1], 16)]) if processor.is_byte(token) else piece.replace("\u2581", " ").encode()


_OPEN: dict[TokenizerType, Callable[[MaxTextConfig], Vocabulary]] = {
  TokenizerType.SENTENCEPIECE: _SentencePiece,
  TokenizerType.HUGGINGFACE: _HuggingFace,
  TokenizerType.TIKTOKEN: _Tiktoken,
}


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
  for text in texts:
    if characters <= 0:
      return
    yield text[:characters]
    characters -= len(text)


def _find(config: MaxTextConfig, *patterns: str, beside: Sequence[str] = ()) -> Path:
  """The vocabulary's file: `tokenizer_path` itself, or the first match in that folder, here or on Hugging Face."""
  path = Path(str(config.tokenizer_path)).expanduser()
  if path.is_file():
    return path
  folder = path if path.is_dir() else _download(config, [*patterns, *beside])
  for pattern in patterns:
    if found := sorted(folder.glob(pattern)):
      return found[0]
  raise ConfigError(
    f"tokenizer_path={config.tokenizer_path} holds no {' or '.join(patterns)}, which "
    f"tokenizer_type={config.tokenizer_type.value} reads."
  )


def _download(config: MaxTextConfig, patterns: list[str]) -> Path:
  name = str(config.tokenizer_path)
  if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
    raise ConfigError(f"tokenizer_path={name} is no file and no folder.")
  from huggingface_hub import snapshot_download
  from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

  try:
    return Path(snapshot_download(name, allow_patterns=patterns, token=config.hf_access_token))
  except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
    reason = str(error).strip().splitlines()[0]
    raise ConfigError(
      f"tokenizer_path={name} is no file or folder here, and Hugging Face does not give it: {reason} "
      f"A gated name needs hf_access_token."
    ) from None


def _json_beside(file: Path, name: str) -> dict[str, Any]:
  path = file.with_name(name)
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _default(said: Mapping[str, Any]) -> str | None:
  """The chat template in `tokenizer_config.json`: one, or several by name."""
  template = said.get("chat_template")
  return {t["name"]: t["template"] for t in template}.get("default") if isinstance(template, list) else template


def _unreadable(config: MaxTextConfig, form: str) -> ConfigError:
  kinds = ", ".join(kind.value for kind in TokenizerType)
  return ConfigError(
    f"tokenizer_path={config.tokenizer_path} is not {form}: change it, or tokenizer_type to what it is ({kinds})."
  )


def _chat_template(config: MaxTextConfig, vocabulary: Vocabulary) -> str | None:
  """The one that was written, the one in the file that was named, or the vocabulary's own."""
  if config.chat_template and config.chat_template_path:
    raise ConfigError("chat_template and chat_template_path say the same thing twice: leave one out.")
  if config.chat_template_path:
    try:
      return Path(config.chat_template_path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
      raise ConfigError(f"chat_template_path={config.chat_template_path} cannot be read: {error.strerror}.") from None
  return config.chat_template or vocabulary.chat_template


def _render(template: str, **values: Any) -> str:
  """A template in the dialect that Hugging Face's own library runs."""
  import jinja2
  from jinja2.ext import loopcontrols
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

  jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
  jinja.filters["tojson"] = to_json
  jinja.globals["raise_exception"] = refuse
  jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
  try:
    return jinja.from_string(template).render(**values)
  except jinja2.TemplateError as error:
    raise ConfigError(f"The chat template refuses this conversation: {error}.") from None
