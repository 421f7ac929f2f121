"""Conversations and preference pairs about the functions of Python's own library, for `docs/walk.md`.

  python examples/walk/conversations.py FOLDER

writes `chat.jinja`; conversations of two turns in `train.jsonl` and `held_out.jsonl`; pairs in `pairs.jsonl` and
`held_out_pairs.jsonl`.
Every twentieth function, by a hash of its signature, is held out.
"""

import ast
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
  "{% for message in messages %}"
  "{% if message.role == 'user' %}# {{ message.content }}\n{% else %}{{ message.content }}{{ eos_token }}\n{% endif %}"
  "{% endfor %}"
)


def functions() -> Iterator[tuple[str, str, str]]:
  """Signature, arguments and description of each function that has a short one."""
  seen = set()
  for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
    if {"test", "tests", "site-packages", "idlelib"} & set(file.parts):
      continue
    try:
      tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
      continue
    for node in ast.walk(tree):
      if not isinstance(node, ast.FunctionDef) or node.name in seen:
        continue
      signature, lines = f"def {node.name}({ast.unparse(node.args)}):", (ast.get_docstring(node) or "").splitlines()
      if lines and 15 <= len(lines[0]) <= 72 and lines[0].endswith(".") and lines[0].isascii() and len(signature) <= 60:
        seen.add(node.name)
        yield signature, ", ".join(arg.arg for arg in node.args.args) or "none", lines[0]


def conversation(signature: str, arguments: str, description: str, which: int) -> list[dict[str, str]]:
  """Two turns: from a description to a signature, or the other way; then the arguments."""
  turns = [(f"Describe {signature}", description), (f"Write the signature: {description}", signature)]
  asked, answer = turns[which]
  texts = [asked, answer, "Its arguments?", arguments]
  return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


def pair(signature: str, description: str) -> dict[str, Any]:
  """A description in lower case without a full stop is better than the library's own."""
  better = description[0].lower() + description[1:].rstrip(".")
  return {
    "prompt": [{"role": "user", "content": f"Describe {signature}"}],
    "chosen": [{"role": "assistant", "content": better}],
    "rejected": [{"role": "assistant", "content": description}],
  }


def main(folder: Path) -> None:
  """Writes the files."""
  files: dict[str, list[Any]] = {"train": [], "held_out": [], "pairs": [], "held_out_pairs": []}
  for signature, arguments, description in functions():
    is_held_out = zlib.crc32(signature.encode()) % 20 == 0
    for which in (0, 1):
      messages = conversation(signature, arguments, description, which)
      files["held_out" if is_held_out else "train"].append({"messages": messages})
    files["held_out_pairs" if is_held_out else "pairs"].append(pair(signature, description))
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "chat.jinja").write_text(TEMPLATE)
  for name, rows in files.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{folder / name}.jsonl: {len(rows):,} rows")


if __name__ == "__main__":
  main(Path(sys.argv[1]))
