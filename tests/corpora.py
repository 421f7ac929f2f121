"""Small real corpora."""

import hashlib
import json

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter


def write_corpus(folder, sizes, seed=0, lengths=(1, 150), long=None, older=False):
  """A prepared corpus whose documents begin with their own number, in two tokens.

  `long` gives the tokens of some documents. The manifest of an older version lists no long documents.
  """
  folder.mkdir(parents=True, exist_ok=True)
  rng, shards, number = np.random.default_rng(seed), [], 0
  for i, size in enumerate(sizes):
    path, counts = folder / f"tokens-{i:05}-of-{len(sizes):05}.array_record", []
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for _ in range(size):
      count = (long or {}).get(number) or 2 + rng.integers(*lengths)
      document = rng.integers(0, 1000, count, dtype=np.uint16)
      document[:2] = divmod(number, 1000)
      number += 1
      counts.append(len(document))
      writer.write(document.tobytes())
    writer.close()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    tokens = sum(counts)
    entry = {"file": path.name, "documents": size, "tokens": tokens, "bytes": path.stat().st_size, "sha256": digest}
    listed = [n for place, count in enumerate(counts) if count > tokens // 128 for n in (place, count)]
    shards.append(entry | ({} if older else {"long": listed}))
  manifest = {"schema": 1, "dtype": "uint16", "documents": number, "tokens": sum(s["tokens"] for s in shards)}
  (folder / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": {}, "shards": shards}))
  return folder
