"""Runs over packed documents of a mixture: the tokens of each step tell whether a document was lost or repeated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.campaign.child import WrongError
from benchmarks.campaign.targets import MODEL
from tests.corpora import write_corpus

_ROWS = 24  # of a batch; they divide among any number of hosts, or are filled up


class PackedRuns:
  """Runs in one folder, with the same documents."""

  def __init__(self, folder: Path) -> None:
    self._folder = folder
    corpora = [write_corpus(folder / f"corpus{n}", (37, 1, 50, 12), seed=n) for n in range(2)]
    self._mixture = ";".join(f"{corpus},{weight}" for corpus, weight in zip(corpora, (0.7, 0.3), strict=True))

  def train(self, name: str, hosts: int, steps: int, **more: object) -> list[str]:
    """The words of `maxtext` for a run of so many hosts, with a device each."""
    data = {"dataset_type": "grain", "tokenize_train_data": False, "tokenizer_path": "", "num_epoch": 10_000}
    keys = MODEL | data | {
      "vocab_size": 1024, "grain_train_files": self._mixture, "per_device_batch_size": _ROWS / hosts, "steps": steps,
      "base_output_directory": self._folder, "run_name": name, "ici_fsdp_parallelism": -1, "checkpoint_period": 5,
      "jax_cache_dir": self._folder / "compiled",
    } | more  # fmt: skip
    return ["train", *(f"{key}={value}" for key, value in keys.items())]

  def alone(self, name: str, steps: int) -> str:
    """Goes on with a run, or begins it, with one process that nothing disturbs. Returns what it prints."""
    command = [*MAXTEXT, *self.train(name, 1, steps)]
    done = subprocess.run(
      command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), check=False
    )
    if done.returncode:
      raise WrongError(f"{name} alone ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout

  def tokens(self, name: str) -> list[tuple[int, float]]:
    """Of each step."""
    lines = (self._folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["tokens"]) for row in map(json.loads, lines)]

  def expect_undisturbed(self, name: str) -> None:
    """Raises where the steps of a run have other tokens than those of a run that nothing disturbs."""
    ours = self.tokens(name)
    self.alone(f"{name}-whole", len(ours))
    if ours != self.tokens(f"{name}-whole"):
      raise WrongError(f"{name}: the tokens of its steps are not those of a run that nothing disturbs")


STEP = re.compile(r"^(?:\[\d+\] )?step +(\d+)/", re.M)
"""A line that a run prints for a step, also with the index of the process before it."""
MAXTEXT = [sys.executable, "-m", "maxtext.cli"]


def environment() -> dict[str, str]:
  """Without the library that this process has loaded, and with one device for each process."""
  return {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "XLA_FLAGS")}
