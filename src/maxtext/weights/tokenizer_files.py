"""Writes a run's tokenizer as Hugging Face files: `tokenizer.json` and its companion files."""

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from maxtext.checkpoint.tokenizer import TEMPLATE
from maxtext.configs.types import TokenizerType
from maxtext.data.tokenizers import TextTokenizer
from maxtext.weights.tensor_files import write_file

_CONFIG, _VOCABULARY = "tokenizer_config.json", "tokenizer.json"


def write_tokenizer(tokenizer: TextTokenizer, folder: Path) -> None:
  """Writes files from which `AutoTokenizer` encodes prompts as the run does.

  A vocabulary of another library is converted to `tokenizer.json`, and its own file is copied too.
  """
  for name, file in tokenizer.vocabulary.files.items():
    shutil.copyfile(file, folder / name)
  converted = _CONVERT[TokenizerType(tokenizer.kind)](folder)
  if converted.post_processor is None and tokenizer.add_bos and tokenizer.bos is not None:
    converted.post_processor = _prefix_template(tokenizer.vocabulary.name(tokenizer.bos), tokenizer.bos)
  write_file(folder / _VOCABULARY, [converted.to_str(pretty=True).encode()])
  existing = json.loads((folder / _CONFIG).read_text(encoding="utf-8")) if (folder / _CONFIG).exists() else {}
  tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.vocabulary.pad}
  names = {name: tokenizer.vocabulary.name(token) for name, token in tokens.items() if token is not None}
  defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  write_file(folder / _CONFIG, [_json(defaults | names | existing)])
  if tokenizer.chat_template and tokenizer.chat_template != tokenizer.vocabulary.chat_template:
    write_file(folder / TEMPLATE, [tokenizer.chat_template.encode()])


def _hugging_face(folder: Path) -> Any:
  import tokenizers

  return tokenizers.Tokenizer.from_str((folder / _VOCABULARY).read_text(encoding="utf-8"))


def _sentence_piece(folder: Path) -> Any:
  """Converts pieces, scores and normalization. There is no pre-tokenization, since a piece may contain a space."""
  import tokenizers
  from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
  from tokenizers import decoders, normalizers

  messages: Any = sentencepiece_model_pb2  # generated at import time, so it has no static types
  file = folder / "tokenizer.model"
  model = messages.ModelProto.FromString(file.read_bytes())
  pieces, unknown = [(piece.piece, piece.score) for piece in model.pieces], SentencePieceProcessor(str(file)).unk_id()
  result = tokenizers.Tokenizer(_pieces(pieces, unknown, model.trainer_spec))
  rules = model.normalizer_spec
  steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
  if rules.remove_extra_whitespaces:
    steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
  if rules.add_dummy_prefix:
    steps.append(normalizers.Prepend(_SPACE))
  result.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
  strip: list[Any] = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
  result.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
  kinds = messages.ModelProto.SentencePiece
  result.add_special_tokens(_added(p.piece for p in model.pieces if p.type in (kinds.CONTROL, kinds.UNKNOWN)))
  result.add_tokens(_added(p.piece for p in model.pieces if p.type == kinds.USER_DEFINED))
  return result


_SPACE = "\u2581"


def _pieces(pieces: list[tuple[str, float]], unknown: int, trained: Any) -> Any:
  from tokenizers import models

  if trained.model_type == trained.UNIGRAM:
    return models.Unigram(pieces, unknown, trained.byte_fallback)
  vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
  merges = []
  for piece, score in pieces:
    for cut in range(1, len(piece)):
      left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
      if left is not None and right is not None:
        merges.append((-score, left, right))
  named = [(pieces[left][0], pieces[right][0]) for _, left, right in sorted(merges)]
  return models.BPE(vocabulary, named, unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=trained.byte_fallback)


def _tiktoken(folder: Path) -> Any:
  """Converts ranks to merges. A word that is a token is encoded as it, without merges (`ignore_merges`)."""
  import tokenizers
  from tiktoken.load import load_tiktoken_bpe
  from tokenizers import decoders, models, pre_tokenizers

  from maxtext.data.tokenizers import TIKTOKEN_SPLIT, tiktoken_special

  ranks = load_tiktoken_bpe(str(folder / "tokenizer.model"))
  characters = _byte_characters()
  vocabulary = {"".join(characters[byte] for byte in word): rank for word, rank in ranks.items()}
  merges = []
  for word in sorted(ranks, key=ranks.__getitem__):
    parts = ["".join(characters[byte] for byte in part) for part in _merge_parts(ranks, word)]
    if len(parts) == 2:
      merges.append((parts[0], parts[1]))
  result = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
  result.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(TIKTOKEN_SPLIT), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  result.decoder = decoders.ByteLevel()
  result.add_special_tokens(_added(tiktoken_special(len(ranks))))
  return result


def _merge_parts(ranks: Mapping[bytes, int], word: bytes) -> list[bytes]:
  """A word's parts after all merges of lower rank. For a token, these are the two parts that merge to it."""
  parts = [word[i : i + 1] for i in range(len(word))]
  while len(parts) > 1:
    joins = [(ranks.get(a + b, ranks[word]), i) for i, (a, b) in enumerate(pairwise(parts))]
    rank, place = min(joins)
    if rank >= ranks[word]:
      break
    parts[place : place + 2] = [parts[place] + parts[place + 1]]
  return parts


def _byte_characters() -> dict[int, str]:
  """The character of each byte in byte-level BPE: the byte's own if it is printable, else one from U+0100 on."""
  printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
  others = [byte for byte in range(256) if byte not in printable]
  return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _added(names: Any) -> list[Any]:
  from tokenizers import AddedToken

  return [AddedToken(name, normalized=False) for name in names]


def _prefix_template(name: str, token: int) -> Any:
  from tokenizers.processors import TemplateProcessing

  return TemplateProcessing(
    single=f"{name}:0 $A:0", pair=f"{name}:0 $A:0 {name}:1 $B:1", special_tokens=[(name, token)]
  )


_CONVERT = {
  TokenizerType.HUGGINGFACE: _hugging_face,
  TokenizerType.SENTENCEPIECE: _sentence_piece,
  TokenizerType.TIKTOKEN: _tiktoken,
}


def _json(content: Mapping[str, Any]) -> bytes:
  return (json.dumps(content, indent=2) + "\n").encode()
