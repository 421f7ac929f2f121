"""Train on text of your own: a tokenizer, tokenized shards, and a small Llama.

  python examples/train_on_text.py [FILE_OR_FOLDER]

Without an argument the text is a part of Python's own library. `examples/generate.py` and `examples/serve.py` use the
run that this makes.
"""

import json
import subprocess
import sys
from pathlib import Path

import maxtext

text = sys.argv[1] if len(sys.argv) > 1 else str(Path(json.__file__).parent)

# A command like any other, for which `maxtext data prepare` is the short form in a shell. Started again, it resumes.
prepare = ["data", "prepare", "--from", text, "--suffix", ".py", "--suffix", ".txt", "--to", "data/text"]
keys = ["--train-tokenizer", "vocab_size=512", "tokenizer_type=huggingface"]
subprocess.run([sys.executable, "-m", "maxtext", *prepare, *keys], check=True)

config = maxtext.load_config(
  "stdlib-llama",  # a recipe, whose keys the following ones change
  run_name="text",
  grain_train_files="data/text",
  vocab_size=512,
  base_emb_dim=64,
  base_mlp_dim=192,
  base_num_decoder_layers=2,
  base_num_query_heads=4,
  head_dim=16,
  num_epoch=4,  # the text is short
  learning_rate=5e-3,
  steps=60,
  log_period=20,
)
maxtext.train(config)
