"""A small training run that writes down every batch it was fed, for the chaos tests to kill.

python -m tests.chaos_worker PROCESSES DEVICES FOLDER CORPUS STEPS     starts and supervises the processes of the run
python -m tests.chaos_worker train FOLDER CORPUS STEPS                 is one of them
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from tests.flags import flags

PERIOD = 2
ROWS = 8


def launch(processes: int, devices: int, *words: str) -> int:
  from maxtext.distributed.supervisor import supervise

  environment = flags(devices) | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  command = [sys.executable, "-m", "tests.chaos_worker", "train", *words]
  return supervise(command, processes, environment=environment, grace_seconds=0.2)


def train(folder: str, corpus: str, steps: str) -> None:
  import maxtext
  from maxtext import load_config
  from maxtext.training import run_data

  made = run_data.make_dataloader
  run_data.make_dataloader = lambda *args, **kwargs: written_down(made(*args, **kwargs), Path(folder))
  config = load_config(
    vocab_size=1024, base_emb_dim=16, base_mlp_dim=32, base_num_decoder_layers=1, base_num_query_heads=2,
    base_num_kv_heads=2, head_dim=8, max_target_length=32, per_device_batch_size=ROWS // 4, dtype="float32",
    ici_fsdp_parallelism=4, learning_rate=1e-2, steps=int(steps), dataset_type="grain", grain_train_files=corpus,
    tokenize_train_data=False, tokenizer_path="", num_epoch=50, base_output_directory=folder, run_name="run",
    jax_cache_dir=str(Path(folder).parent / "cache"), checkpoint_period=PERIOD, max_num_checkpoints_to_keep=2,
    log_period=1000,
  )  # fmt: skip
  maxtext.train(config)


def written_down(feed, folder: Path):
  """Passes batches on; a line per row of this process says which documents begin in it and the hash of all it holds."""
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / f"batches-{os.getpid()}.jsonl", "w", buffering=1) as file:
    for fed in feed:
      number = int(fed.iterator_state()["batches"])
      for row in rows_of(fed.batch):
        file.write(json.dumps({"batch": number, **row}) + "\n")
      yield fed


def rows_of(batch):
  import numpy as np

  names = ("inputs", "targets", "positions", "segments", "weights")
  for shards in zip(*(getattr(batch, name).addressable_shards for name in names), strict=True):
    first = shards[0].index[0].start or 0
    parts = dict(zip(names, (np.asarray(shard.data) for shard in shards), strict=True))
    for i in range(len(parts["inputs"])):
      begins = (parts["positions"][i] == 0) & (parts["segments"][i] > 0)
      documents = parts["inputs"][i][begins] * 1000 + parts["targets"][i][begins]
      digest = hashlib.sha256(b"".join(part[i].tobytes() for part in parts.values())).hexdigest()[:16]
      yield {"row": first + i, "hash": digest, "documents": documents.tolist()}


if __name__ == "__main__":
  if sys.argv[1] == "train":
    train(*sys.argv[2:])
  else:
    sys.exit(launch(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
