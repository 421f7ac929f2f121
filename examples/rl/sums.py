"""Sums of two numbers, a text to pre-train on and tasks for `maxtext rl`: python examples/rl/sums.py data/sums.

Of every three sums in the text one is right, and two are too large by one: who learns from it can add, and mostly does
not. That is what rewards can change.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "0123456789+="


def main(folder: Path) -> None:
  """Writes text.jsonl, tasks.jsonl, held_out.jsonl and a tokenizer; one sum in ten is held out, of the text too."""
  folder.mkdir(parents=True, exist_ok=True)
  order = random.Random(0)
  sums = [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
  order.shuffle(sums)
  held_out, rest = sums[: len(sums) // 10], sums[len(sums) // 10 :]
  text = [{"text": f"{prompt}{int(answer) + error}"} for prompt, answer in rest for error in (0, 1, 1)]
  order.shuffle(text)
  write(folder / "text.jsonl", text)
  for name, tasks in (("tasks", rest), ("held_out", held_out)):
    write(folder / f"{name}.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in tasks])
  write_tokenizer(folder / "tokenizer")
  print(f"{folder}: {len(rest):,} tasks, {len(held_out):,} held out")


def write(path: Path, rows: list[dict[str, str]]) -> None:
  """One JSON object a line."""
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer(folder: Path, characters: str = CHARACTERS) -> None:
  """A token for each character."""
  folder.mkdir(exist_ok=True)
  vocabulary = {"<eos>": 0, "<unk>": 1} | {c: i + 2 for i, c in enumerate(characters)}
  tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
  tokenizer.save(str(folder / "tokenizer.json"))
  names = {"eos_token": "<eos>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
