"""Products by a calculator: a text to pre-train on, tasks, and the environment of `maxtext rl`.

python examples/rl/calculator.py data/products
"""

import random
import re
import sys
from pathlib import Path

from maxtext.rl.environment import EnvironmentTask, Observation

CHARACTERS = "0123456789*=#>"


def calculate(expression: str) -> str:
  """The tool: a product of two numbers."""
  factors = re.fullmatch(r"(\d{1,6})\*(\d{1,6})", expression)
  if not factors:
    raise ValueError(f"{expression} is no product")
  return str(int(factors[1]) * int(factors[2]))


class Calculator:
  """`#12*7>` is a call, and `84=` is read after it; what has no call is the answer, and ends the conversation.

  `stop_strings=['>']` ends a turn with a call, so that the policy does not write the result by itself.
  """

  def reset(self, task: EnvironmentTask) -> None:
    """The prompt is the task's own."""
    self._answer = task.answer

  def step(self, text: str) -> Observation:
    """Calls the tool, or rewards the answer."""
    before, mark, expression = text.partition("#")
    if mark:
      return Observation(calculate(expression) + "=", 0.0, done=False)
    return Observation("", float(before == self._answer), done=True)


def main(folder: Path) -> None:
  """Writes text.jsonl, tasks.jsonl, held_out.jsonl and a tokenizer; one product in ten is held out, of the text too.

  In the text one product in four calls the calculator, and the others guess a number.
  """
  from sums import write, write_tokenizer  # beside this file; environments do not need it

  chance = random.Random(0)
  folder.mkdir(parents=True, exist_ok=True)
  products = [(f"{a}*{b}", str(a * b)) for a in range(2, 100) for b in range(2, 100)]
  chance.shuffle(products)
  held_out, rest = products[: len(products) // 10], products[len(products) // 10 :]
  text = [
    f"{product}=#{product}>{answer}={answer}" if chance.random() < 0.25 else f"{product}={chance.randrange(10000)}"
    for product, answer in rest
  ]
  write(folder / "text.jsonl", [{"text": line} for line in text])
  for name, tasks in (("tasks", rest), ("held_out", held_out)):
    write(folder / f"{name}.jsonl", [{"prompt": f"{product}=", "answer": answer} for product, answer in tasks])
  write_tokenizer(folder / "tokenizer", CHARACTERS)
  print(f"{folder}: {len(rest):,} tasks, {len(held_out):,} held out")


if __name__ == "__main__":
  main(Path(sys.argv[1]))
