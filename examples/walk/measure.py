"""How often a model's answers have the form that it was taught, on held-out prompts of `conversations.py`.

python examples/walk/measure.py RUN FOLDER [PROMPTS]
"""

import json
import re
import sys
from pathlib import Path

import maxtext


def is_signature(answer: str) -> bool:
  """Whether it is the first line of a function, and nothing else; a small model's names need not be names."""
  return re.fullmatch(r"def [^()]+\(.*\):", answer) is not None


def is_description(answer: str) -> bool:
  """Whether it is one line that ends as a sentence does."""
  return answer.endswith(".") and "\n" not in answer and len(answer) > 8


def is_preferred(answer: str) -> bool:
  """Whether it begins in lower case and has no full stop, as the better answers do."""
  return answer[:1].islower() and not answer.endswith(".") and "\n" not in answer


def main(run: str, folder: Path, most: int = 100) -> None:
  """Prints the rates, of so many prompts of each kind."""
  rows = [json.loads(line)["messages"][0] for line in (folder / "held_out.jsonl").read_text().splitlines()]
  asked = {
    "signature": [row for row in rows if row["content"].startswith("Write")][:most],
    "description": [row for row in rows if row["content"].startswith("Describe")][:most],
  }
  llm = maxtext.LLM(run, chat_template_path=str(folder / "chat.jinja"), max_prefill_predict_length=64)
  params = maxtext.SamplingParams(max_tokens=40)
  answers = {
    kind: [one.text.strip() for one in llm.chat([[row] for row in prompts], params)] for kind, prompts in asked.items()
  }
  forms = {"signature": ("signature", is_signature), "description": ("description", is_description),
           "preferred": ("description", is_preferred)}  # fmt: skip
  for name, (kind, test) in forms.items():
    print(f"{name:<12} {sum(map(test, answers[kind])):>3} of {len(answers[kind])}")
  for kind, texts in answers.items():
    print(f"{asked[kind][0]['content']!r} -> {texts[0]!r}")


if __name__ == "__main__":
  main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
