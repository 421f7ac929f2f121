"""How many questions about held-out pictures of `shapes.py` a model answers right, and with the wrong picture.

python examples/vision/measure.py RUN FOLDER [--pictures N] [--drawing FILE]
"""

import argparse
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import maxtext

SHOWN = 12


def questions(folder: Path, pictures: int) -> list[tuple[str, str, str]]:
  """(file of the picture, question, answer), of so many held-out pictures."""
  rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()[:pictures]]
  return [
    (str(folder / row["image"]), asked["content"], answer["content"])
    for row in rows
    for asked, answer in pairwise(row["messages"])
    if asked["role"] == "user"
  ]


def answers(llm: maxtext.LLM, asked: list[tuple[str, str]]) -> list[str]:
  """To each (file of the picture, question)."""
  conversations: list[Any] = [
    [{"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": question}]}]
    for file, question in asked
  ]
  return [one.text for one in llm.chat(conversations, maxtext.SamplingParams(max_tokens=8))]


def draw(file: Path, shown: list[tuple[str, str, str, str]]) -> None:
  """Pictures, each with its question and the model's answer below; wrong ones are red."""
  side, width, height, columns = 96, 150, 150, 4
  drawing = Image.new("RGB", (columns * width, -(-len(shown) // columns) * height), "white")
  pen = ImageDraw.Draw(drawing)
  for number, (name, question, right, answer) in enumerate(shown):
    left, top = number % columns * width + (width - side) // 2, number // columns * height + 8
    with Image.open(name) as picture:
      drawing.paste(picture.resize((side, side)), (left, top))
    for text, below, colour in ((question, 6, "gray"), (answer, 22, "black" if answer == right else "red")):
      pen.text((left + side // 2, top + side + below), text, colour, anchor="ma", font_size=13)
  drawing.save(file)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("run")
  parser.add_argument("folder", type=Path)
  parser.add_argument("--pictures", type=int, default=200)
  parser.add_argument("--drawing", type=Path, help="draw some pictures with the answers")
  args = parser.parse_args()
  asked = questions(args.folder, args.pictures)
  files, texts, known = zip(*asked, strict=True)
  llm = maxtext.LLM(args.run)
  given = answers(llm, list(zip(files, texts, strict=True)))
  half = len(files) // 2
  swapped = answers(llm, list(zip(files[half:] + files[:half], texts, strict=True)))
  counts: dict[str, Counter[str]] = defaultdict(Counter)
  for text, answer, seen, other in zip(texts, known, given, swapped, strict=True):
    for question in (text, "all"):
      counts[question].update(asked=1, right=answer == seen, swapped=answer == other)
  for question, count in sorted(counts.items(), key=lambda pair: pair[0] == "all"):
    right, without = count["right"], count["swapped"] / count["asked"]
    print(f"{question:<15} {right:>4} of {count['asked']:<4} with another picture {without:.0%}")
  if args.drawing:
    draw(args.drawing, list(zip(files, texts, known, given, strict=True))[: 2 * SHOWN : 2])


if __name__ == "__main__":
  main()
