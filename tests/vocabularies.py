"""Tiny real vocabularies, trained or written where a test wants them."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

SENTENCES = [
  "The quick brown fox jumps over the lazy dog.",
  "Pack my box with five dozen liquor jugs, said the 12 judges of 1984.",
  "def double(x):\n    return x + x  # twice\n",
] * 40

CHAT_TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}"
  "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def hugging_face(folder: Path, size: int = 300, texts: Iterable[str] = SENTENCES) -> Path:
  """A folder as `save_pretrained` writes it: byte-level BPE with <s>, </s>, <pad> and a chat template."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  special = [AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")]
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  tokenizer.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
  )
  tokenizer.enable_truncation(8)  # some published files carry one, which must not shorten documents
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  names = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": "<pad>"}
  said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
  (folder / "tokenizer_config.json").write_text(json.dumps(said))
  return folder


def sentence_piece(folder: Path, size: int = 400, **options: str) -> Path:
  """A `.model` file with <s> and </s>, and without padding, as Llama 2 has it."""
  import sentencepiece

  folder.mkdir(parents=True, exist_ok=True)
  text = folder / "text"
  text.write_text("\n".join(SENTENCES))
  sentencepiece.SentencePieceTrainer.train(
    input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=size, model_type="bpe", byte_fallback=True,
    minloglevel=2, **options,
  )  # fmt: skip
  return folder / "tokenizer.model"


def tiktoken(folder: Path, size: int = 262) -> Path:
  """A file of ranks: the bytes, then a few joined ones."""
  folder.mkdir(parents=True, exist_ok=True)
  words = [bytes([b]) for b in range(256)] + [b"th", b"he", b"the", b" the", b"qu", b"ox"]
  lines = (f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words[:size]))
  (folder / "tokenizer.model").write_text("".join(lines))
  return folder / "tokenizer.model"
