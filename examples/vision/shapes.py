"""Pictures of shapes and digits with questions whose answers are known, to train a model on (`docs/multimodal.md`).

  python examples/vision/shapes.py FOLDER [PICTURES]

writes pictures of 32 x 32 pixels, `train.jsonl` and `held_out.jsonl` with a conversation about each, and a tokenizer
with a chat template in `tokenizer`. One picture in ten is held out.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIDE = 32
COLOURS = {
  "red": (220, 40, 40),
  "green": (30, 160, 60),
  "blue": (50, 80, 220),
  "yellow": (235, 200, 30),
  "purple": (140, 50, 170),
}
NUMBERS = ("one", "two", "three", "four")
SPECIAL = (
  "<s>",
  "</s>",
  "<start_of_turn>",
  "<end_of_turn>",
  "<start_of_image>",
  "<image_soft_token>",
  "<end_of_image>",
)
TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
  "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
  "{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def shapes(order: random.Random) -> tuple[Image.Image, dict[str, str]]:
  """One to four shapes of one kind and colour, which do not touch; and the answers to questions about them."""
  image, colour = background(order), order.choice(list(COLOURS))
  kind, count = order.choice(list(DRAW)), order.randrange(4)
  draw = ImageDraw.Draw(image)
  for column, row in order.sample([(0, 0), (1, 0), (0, 1), (1, 1)], count + 1):
    size = order.randint(9, 12)
    left, top = (16 * place + order.randint(1, 15 - size) for place in (column, row))
    DRAW[kind](draw, (left, top, left + size, top + size), COLOURS[colour])
  answers = {"which shape?": kind, "which colour?": colour, "how many?": NUMBERS[count]}
  return image, answers


def digit(order: random.Random) -> tuple[Image.Image, dict[str, str]]:
  """A digit, and the answers to questions about it."""
  image, colour, number = background(order), order.choice(list(COLOURS)), str(order.randrange(10))
  font = ImageFont.load_default(order.randint(24, 26))
  place = order.randint(7, 10), order.randint(0, 3)
  ImageDraw.Draw(image).text(place, number, fill=COLOURS[colour], font=font)
  return image, {"which digit?": number, "which colour?": colour}


def background(order: random.Random) -> Image.Image:
  """A light square."""
  level = order.randint(225, 255)
  return Image.new("RGB", (SIDE, SIDE), (level, level, level))


def triangle(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
  """With its tip above."""
  left, top, right, bottom = box
  draw.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)


DRAW = {
  "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
  "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
  "triangle": triangle,
}


def conversation(answers: dict[str, str], order: random.Random) -> list[dict[str, str]]:
  """All questions about a picture, one after the other."""
  asked = order.sample(sorted(answers.items()), len(answers))
  return [
    {"role": role, "content": text}
    for question, answer in asked
    for role, text in (("user", question), ("assistant", answer))
  ]


def pictures(count: int, seed: int = 0) -> Iterator[tuple[Image.Image, dict[str, str]]]:
  """Pictures with the answers to questions about them: half of shapes, half of digits."""
  order = random.Random(seed)
  for number in range(count):
    yield (shapes, digit)[number % 2](order)


def write_tokenizer(folder: Path, special: tuple[str, ...] = SPECIAL) -> None:
  """A token for each word and digit, and the chat template; other text is spelled by its bytes."""
  folder.mkdir(parents=True, exist_ok=True)
  bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
  bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  words = ("which", " shape?", " colour?", " digit?", "how", " many?", "user", "model", *COLOURS, *NUMBERS, *DRAW)
  bpe.add_tokens([AddedToken(word, normalized=False) for word in words])
  bpe.add_special_tokens([AddedToken(name, special=True) for name in special])
  bpe.save(str(folder / "tokenizer.json"))
  about = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(about))


def main(folder: Path, count: int = 10_000) -> None:
  """Writes the files."""
  (folder / "images").mkdir(parents=True, exist_ok=True)
  order, rows = random.Random(1), list[dict[str, Any]]()
  for number, (image, answers) in enumerate(pictures(count)):
    name = f"images/{number}.png"
    image.save(folder / name)
    rows.append({"image": name, "messages": conversation(answers, order)})
  held_out = count // 10
  for name, some in (("held_out", rows[:held_out]), ("train", rows[held_out:])):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    print(f"{folder / name}.jsonl: {len(some):,} pictures")
  write_tokenizer(folder / "tokenizer")


if __name__ == "__main__":
  main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
