"""Train from Python: a small Llama on an iterable of tokens, then its loss on other tokens.

python examples/train.py
"""

from collections.abc import Iterator

import numpy as np

import maxtext
from maxtext.data.iterable import IterableBatches

ROWS, LENGTH = 8, 64


def batches(seed: int, count: int) -> Iterator[np.ndarray]:
  """Sequences that count upwards from a random start: [rows, length + 1] tokens each, inputs and the token after."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    yield (rng.integers(0, 100, (ROWS, 1)) + np.arange(LENGTH + 1)) % 100


# Keys complete in an editor, and a type checker knows their types: `maxtext.ConfigKeys` has them all. A file, a recipe
# or a model's name can come first: `load_config("llama3.1-8b", ...)`.
config = maxtext.load_config(
  run_name="counting",
  base_emb_dim=64,
  base_mlp_dim=128,
  base_num_decoder_layers=2,
  base_num_query_heads=4,
  base_num_kv_heads=2,
  head_dim=16,
  vocab_size=100,
  max_target_length=LENGTH,
  per_device_batch_size=ROWS,  # with one device; `data` gives the rows of all devices
  dataset_type="synthetic",  # not read, because `data` is given
  dtype="float32",
  learning_rate=1e-2,
  steps=30,
  log_period=10,
)

# Functions, because a resumed run begins at the first batch again and skips those that it has used.
data = IterableBatches(train=lambda: batches(seed=0, count=1000), evaluation=lambda: batches(seed=1, count=4))
state = maxtext.train(config, data=data)  # started again, it resumes, and ends at once when all steps are done
print(f"step {int(state.step)}, {sum(array.size for array in state.params.values()):,} parameters")

found = maxtext.evaluate("runs/counting", data=data)
print(f"evaluation loss {found['loss']:.3f} over {found['tokens']:,.0f} tokens")
