"""Questions of GSM8K as tasks for `maxtext rl`: python examples/rl/gsm8k.py data/gsm8k [train.jsonl test.jsonl].

Without the two files, which https://github.com/openai/grade-school-math has, they are fetched from there.
"""

import json
import sys
from pathlib import Path
from urllib.request import urlopen

SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
ASK = "Think between <reasoning> and </reasoning>. Then write the answer, a number, between <answer> and </answer>."


def main(folder: Path, files: list[str]) -> None:
  """Writes train.jsonl and test.jsonl."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, given in zip(("train.jsonl", "test.jsonl"), files or [None, None], strict=True):
    text = Path(given).read_text() if given else urlopen(f"{SOURCE}/{name}").read().decode()
    tasks = [task(json.loads(line)) for line in text.splitlines() if line.strip()]
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in tasks))
    print(f"{folder / name}: {len(tasks):,} tasks")


def task(row: dict[str, str]) -> dict[str, str]:
  """A prompt with what is asked of the answer's form, and the number behind the solution's last ####."""
  _, mark, answer = row["answer"].rpartition("####")
  if not mark:
    raise SystemExit(f"a row of GSM8K has no ####: {row['answer'][:80]}")
  return {"prompt": f"{row['question'].strip()}\n\n{ASK}", "answer": answer.strip().replace(",", "")}


if __name__ == "__main__":
  main(Path(sys.argv[1]), sys.argv[2:])
