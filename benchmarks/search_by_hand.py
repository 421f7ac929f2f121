"""The planner's search beside twenty configurations that a person would try, for Llama 2 7B on eight chips of v5p.

python -m benchmarks.search_by_hand [--json] [--jobs 2]     compiles all of them; half an hour on two cores
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.figures import show
from maxtext.cli.config import resolve_overrides
from maxtext.planner.search import plan_in_subprocess, search

MODEL = ("llama2-7b", "compile_topology=v5p-16", "max_target_length=4096", "dataset_type=synthetic")
MOST_COMPILES = 12
# Policy, sequences per chip, tensor parallelism.
BY_HAND = (
  ("full", 4, 1), ("full", 8, 1), ("full", 12, 1), ("full", 8, 2),
  ("minimal", 2, 1), ("minimal", 4, 1), ("minimal", 4, 2), ("save_qkv_proj", 6, 1),
  ("save_qkv_proj", 4, 1), ("save_qkv_proj", 8, 1), ("save_out_proj", 4, 1), ("save_out_proj", 8, 1),
  ("save_dot_except_mlp", 4, 1), ("save_dot_except_mlp", 8, 1), ("save_dot_except_mlpwi", 4, 1),
  ("save_dot_except_mlpwi", 6, 1), ("save_dot_with_context_except_mlp", 4, 1),
  ("save_dot_with_context_except_mlp", 6, 1), ("save_dot_with_context_except_mlp", 8, 1),
  ("save_dot_with_context_except_mlp", 4, 2),
)  # fmt: skip


def main() -> None:
  """Compiles the list, searches, and prints the best of both in tokens a second and chip."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  parser.add_argument("--jobs", type=int, default=2, help="compilations side by side")
  arguments = parser.parse_args()
  said: list[str] = []
  found = search(resolve_overrides(MODEL).config, MODEL, MOST_COMPILES, arguments.jobs, lambda line: _say(said, line))
  with ThreadPoolExecutor(arguments.jobs) as pool:
    by_hand = max(pool.map(_speed, BY_HAND))
  searched = 1 / found.seconds_per_token
  compiled = len(said) - 1  # the first line only says how many there are
  show(
    {
      "by_hand": by_hand,
      "searched": searched,
      "ratio": searched / by_hand,
      "tried": len(BY_HAND),
      "compiled": compiled,
    },
    arguments.json,
  )


def _speed(tried: tuple[str, int, int]) -> float:
  policy, batch, tensor = tried
  plan = plan_in_subprocess(
    MODEL, {"remat_policy": policy, "per_device_batch_size": batch, "ici_tensor_parallelism": tensor}
  )
  assert "refused" not in plan, plan["refused"]
  speed = plan["estimated_tokens_per_second_per_chip"] if plan["fits"] else 0.0
  _say([], f"{speed:8,.0f} tokens/s/chip  {policy} per_device_batch_size={batch} tensor={tensor}")
  return speed


def _say(said: list[str], line: str) -> None:
  said.append(line)
  print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
  main()
