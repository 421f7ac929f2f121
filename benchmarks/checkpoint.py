"""What a checkpoint costs: how long a save holds up the loop, and how much memory a restore takes.

  python -m benchmarks.checkpoint --json

A state of the given size is saved in the background and, in turn, while the loop waits; each is in a process of its own
that has done one save before, and the state is read back in a fresh one. Memory is the largest resident size beyond
that of the process when it has read a state of a thousandth of the size.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--json", action="store_true")
  parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.child:
    what, folder = arguments.child
    print(json.dumps({"save": _save, "restore": _restore}[what](Path(folder), arguments.gib, arguments.rounds)))
    return
  with tempfile.TemporaryDirectory() as folder:
    saved = _child("save", folder, arguments.gib, arguments.rounds)
    restored = _child("restore", folder, arguments.gib, 1)
  found = saved | restored
  found["blocked_share"] = round(found["async_blocked_seconds"] / found["sync_seconds"], 4)
  found["restore_memory_ratio"] = round(found["restore_peak_bytes"] / found["state_bytes"], 3)
  print(json.dumps(found, indent=1) if arguments.json else "\n".join(f"{k:<24} {v}" for k, v in found.items()))


def _child(what: str, folder: str, gib: float, rounds: int) -> dict:
  command = [sys.executable, "-m", "benchmarks.checkpoint", "--child", what, folder, "--gib", str(gib)]
  command += ["--rounds", str(rounds)]
  done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
  return json.loads(done.stdout.splitlines()[-1])


def _save(folder: Path, gib: float, rounds: int) -> dict:
  from etils import epath

  from maxtext.checkpoint.options import checkpoint_options
  from maxtext.checkpoint.writer import Writer

  config, abstract = _state(gib)
  options = checkpoint_options(config)
  small = Writer(options, epath.Path(folder / "small"), {})
  small.save(1, _filled(_state(gib / 1000)[1]), {})
  small.close()
  state = _filled(abstract)
  seconds: dict[bool, list[float]] = {True: [], False: []}
  blocked: list[float] = []
  writers = {
    background: Writer(
      dataclasses.replace(options, asynchronous=background, keep=1), epath.Path(folder / str(background)), {}
    )
    for background in (True, False)
  }
  for turn in range(rounds + 1):
    for background, writer in writers.items():
      start = time.perf_counter()
      writer.save(turn + 1, state, {})
      returned = time.perf_counter() - start
      writer.wait()
      assert writer.last == turn + 1, "the save failed"
      seconds[background].append(time.perf_counter() - start)
      blocked += [returned] if background else []
  for writer in writers.values():
    writer.close()
  return {
    "state_bytes": sum(leaf.nbytes for leaf in state.values()),
    "sync_seconds": round(statistics.median(seconds[False][1:]), 3),
    "async_seconds": round(statistics.median(seconds[True][1:]), 3),
    "async_blocked_seconds": round(statistics.median(blocked[1:]), 3),
  }


def _restore(folder: Path, gib: float, rounds: int) -> dict:
  from etils import epath

  from maxtext.checkpoint.options import restore_options
  from maxtext.checkpoint.restore import resume

  config, abstract = _state(gib)
  options = restore_options(config)
  resume(options, epath.Path(folder / "small"), _state(gib / 1000)[1])
  before = _peak()
  start = time.perf_counter()
  found = resume(options, epath.Path(folder / "False"), abstract)
  assert found is not None
  return {"restore_seconds": round(time.perf_counter() - start, 3), "restore_peak_bytes": _peak() - before}


def _state(gib: float) -> tuple:
  """Thirty-two arrays of one size on one device; values that do not compress, as weights do not."""
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from maxtext import load_config

  config = load_config(dataset_type="synthetic", enable_checkpointing=True)
  where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
  rows = max(1, int(gib * 2**30 / 32 / 4 / 4096))
  return config, {f"w{i}": jax.ShapeDtypeStruct((rows, 4096), np.float32, sharding=where) for i in range(32)}


def _filled(abstract: dict) -> dict:
  import jax

  def values(seed: int, like) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), like.shape, like.dtype)

  return {name: jax.device_put(values(i, like), like.sharding) for i, (name, like) in enumerate(abstract.items())}


def _peak() -> int:
  import resource

  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
  main()
