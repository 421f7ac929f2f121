"""The data of a packed run: beside plain Grain on the same shards, and the share of a step spent waiting for it.

  python -m benchmarks.data --json

Shards have 25,000 records, which Grain reads one at a time; both make rows of the same length from one process, and the
two take turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grain
import jax
import numpy as np

from maxtext import MaxTextConfig, load_config
from maxtext.bench.dataloader import abstract_batch, measure_throughput
from maxtext.configs.derived import global_batch_size
from maxtext.data.options import data_options
from maxtext.mesh.devices import make_mesh
from maxtext.training.callbacks.base import Callback
from maxtext.training.loop import run_loop
from maxtext.training.program import Program
from tests.corpora import write_corpus

LENGTH, ROWS = 2048, 64
MODEL = {
  "base_emb_dim": 256, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 64, "base_mlp_dim": 1024,
  "base_num_decoder_layers": 4, "vocab_size": 1024, "dtype": "float32", "jax_cache_dir": "", "attention": "chunked",
}  # fmt: skip


def configured(folder: Path, **changes) -> MaxTextConfig:
  data = {"dataset_type": "grain", "grain_train_files": str(folder), "num_epoch": 1000}
  return load_config(**MODEL | data | changes)


def plain_grain(folder: Path, threads: int) -> Iterator[dict[str, np.ndarray]]:
  """Grain's own pipeline: shuffle, read, pack by first fit, batch."""
  shards = [str(path) for path in sorted(folder.glob("*.array_record"))]

  def tokens(record: bytes) -> dict[str, np.ndarray]:
    document = np.frombuffer(record, np.uint16).astype(np.int32)
    return {"inputs": document[:-1], "targets": document[1:]}

  documents = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(shards)).shuffle(seed=0).map(tokens)
  packed = grain.experimental.FirstFitPackIterDataset(
    documents.repeat().to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500)),
    length_struct={"inputs": LENGTH, "targets": LENGTH},
    num_packing_bins=ROWS,
  )
  return iter(packed.batch(ROWS))


def grain_speed(folder: Path, threads: int, seconds: float) -> float:
  batches = plain_grain(folder, threads)
  jax.block_until_ready(jax.device_put(next(batches)))
  start, tokens = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    batch = next(batches)
    jax.block_until_ready(jax.device_put(batch))
    tokens += int((batch["inputs_segment_ids"] > 0).sum())
  return tokens / (time.perf_counter() - start)


class Waiting(Callback):
  """Seconds of steps, and of waiting for input in them; without the first, which compiles."""

  def __init__(self) -> None:
    self.steps: list[tuple[float, float]] = []

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step > 2:
      self.steps.append((figures["step_time_seconds"], figures["data_wait_seconds"]))


def waiting_share(folder: Path, steps: int, workers: int) -> float:
  config = configured(folder, max_target_length=512, per_device_batch_size=8, grain_worker_count=workers)
  program, waiting = Program.of(config, make_mesh(config, jax.devices()[:1])), Waiting()
  run_loop(program.step, program.init(), program.feed(), range(steps), [waiting])
  return sum(waited for _, waited in waiting.steps) / sum(seconds for seconds, _ in waiting.steps)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
  parser.add_argument("--steps", type=int, default=30, help="of the packed run")
  parser.add_argument("--json", action="store_true")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as scratch:
    folder = write_corpus(Path(scratch, "corpus"), [25_000] * 4, lengths=(100, 900))
    alone = configured(folder, max_target_length=LENGTH, per_device_batch_size=ROWS, grain_worker_count=0)
    batch = abstract_batch((global_batch_size(alone, jax.device_count()), LENGTH))
    ours, theirs = [], []
    for _ in range(arguments.rounds):
      # More reading threads than cores make Grain slower here, so it has its choice.
      theirs.append(max(grain_speed(folder, threads, arguments.seconds) for threads in (1, 16)))
      ours.append(measure_throughput(data_options(alone), batch, arguments.seconds).tokens_per_second)
    found = {
      "tokens_per_second": round(statistics.median(ours)),
      "grain_tokens_per_second": round(statistics.median(theirs)),
      "times_grain": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
      "waiting_share": {f"{n} reader processes": round(waiting_share(folder, arguments.steps, n), 5) for n in (0, 1)},
    }
  print(json.dumps(found) if arguments.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
  main()
