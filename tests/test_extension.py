"""A new family is one file: nothing else is touched for it to train and to exchange its weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import maxtext
from maxtext.weights.hugging_face_folder import HuggingFaceFolder

FAMILY = '''
"""Swan: local layers whose queries and keys are normed, global ones without positions, a norm after every branch."""

from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, HuggingFace
from maxtext.models.spec import cycles
from maxtext.models.weight_table import Weight


def spec(config):
  norm = standard.norm(config)
  near = standard.attention(config, window=config.sliding_window_size, qk_norm=QueryKeyNorm(norm))
  far = standard.attention(config, rope=None, gated=True)
  norms = {"mixer_post_norm": norm, "feed_forward_post_norm": norm}
  layers = tuple(standard.block(config, mixer, **norms) for mixer in (near, near, far))
  return standard.decoder(config, cycles(layers, config.base_num_decoder_layers))


WEIGHTS = standard.WEIGHTS | standard.SANDWICH | {
  f"{standard.LAYER}/mixer/gate/weight": Weight("model.layers.{layer}.self_attn.g_proj.weight", transposed=True)
}
HUGGING_FACE = HuggingFace("SwanForCausalLM", "swan", {**STANDARD, "window": "sliding_window_size"}, READS)
'''

SIZES = {
  "decoder_block": "swan", "base_emb_dim": 32, "base_mlp_dim": 64, "base_num_decoder_layers": 5,
  "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8, "sliding_window_size": 8, "vocab_size": 64,
  "max_target_length": 16,
}  # fmt: skip
RUN = {
  "per_device_batch_size": 8, "dataset_type": "synthetic", "learning_rate": 1e-2, "steps": 12, "jax_cache_dir": "",
}  # fmt: skip
COMMANDS = """
import json, sys
from maxtext.cli.main import main

for words in json.loads(sys.argv[1]):
  if code := main(words):
    sys.exit(code)
"""


@pytest.mark.slow
def test_a_family_is_one_file(tmp_path):
  package = tmp_path / "maxtext"
  shutil.copytree(Path(maxtext.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
  (package / "models/families/swan.py").write_text(FAMILY)
  (tmp_path / "swan.yml").write_text(yaml.safe_dump(SIZES | RUN))
  commands = [
    ["train", "swan.yml", "base_output_directory=runs", "run_name=swan", "metrics_file=figures.jsonl"],
    ["convert", "to-hf", "runs/swan", "out"],
    ["convert", "from-hf", "out", "parameters"],
    ["convert", "to-hf", "parameters", "again"],
  ]
  environment = os.environ | {"PYTHONPATH": str(tmp_path)}
  process = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
  done = subprocess.run(
    process, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
  )
  assert done.returncode == 0, done.stderr
  figures = map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines())
  losses = [line["loss"] for line in figures if "loss" in line]
  assert losses[-1] < losses[0] - 0.3
  out, again = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("out", "again"))
  assert out == again
  names = HuggingFaceFolder(tmp_path / "out").tensors
  assert {"model.layers.2.self_attn.g_proj.weight", "model.layers.4.self_attn.q_norm.weight"} <= names.keys()
