"""Small real corpora."""

import hashlib
import json

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter


def write_corpus(folder, sizes, seed=0, lengths=(1, 150)):
  """A prepared corpus whose documents begin with their own number, in two tokens."""
  folder.mkdir(parents=True, exist_ok=True)
  rng, shards, number = np.random.default_rng(seed), [], 0
  for i, size in enumerate(sizes):
    path, tokens = folder / f"tokens-{i:05}-of-{len(sizes):05}.array_record", 0
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for _ in range(size):
      document = rng.integers(0, 1000, 2 + rng.integers(*lengths), dtype=np.uint16)
      document[:2] = divmod(number, 1000)
      number, tokens = number + 1, tokens + len(document)
      writer.write(document.tobytes())
    writer.close()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    shards.append(
      {"file": path.name, "documents": size, "tokens": tokens, "bytes": path.stat().st_size, "sha256": digest}
    )
  manifest = {"schema": 1, "dtype": "uint16", "documents": number, "tokens": sum(s["tokens"] for s in shards)}
  (folder / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": {}, "shards": shards}))
  return folder
