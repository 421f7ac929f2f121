"""A new family is one file: nothing else is touched for it to train and to exchange its weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import maxtext

FAMILY = '''
"""Swan: local layers whose queries and keys are normed, global ones without positions, a norm after every branch."""

from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
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
'''

KEYS = """
decoder_block: swan
base_emb_dim: 32
base_mlp_dim: 64
base_num_decoder_layers: 5
base_num_query_heads: 4
base_num_kv_heads: 2
head_dim: 8
sliding_window_size: 8
vocab_size: 64
max_target_length: 16
per_device_batch_size: 8
dataset_type: synthetic
learning_rate: 1.0e-2
steps: 12
jax_cache_dir: ""
"""

PROGRAM = """
import sys, jax, numpy as np, maxtext
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model, weight_table
from maxtext.weights.hugging_face import from_tensors, to_tensors

config = maxtext.load_config("swan.yml", base_output_directory="runs", metrics_file="figures.jsonl")
model = build_model(config, make_mesh(config, jax.devices()[:1]))
table = weight_table(config, model.spec)
params = {name: np.asarray(value) for name, value in jax.jit(model.init)(0)[0].items()}
tensors = to_tensors(model, table, params)
assert "model.layers.2.self_attn.g_proj.weight" in tensors and "model.layers.4.self_attn.q_norm.weight" in tensors
back = from_tensors(model, table, tensors)
assert back.keys() == params.keys() and all((back[name] == params[name]).all() for name in params)
maxtext.train(config)
"""


def test_a_family_is_one_file(tmp_path):
  package = tmp_path / "maxtext"
  shutil.copytree(Path(maxtext.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
  (package / "models/families/swan.py").write_text(FAMILY)
  (tmp_path / "swan.yml").write_text(KEYS)
  environment = os.environ | {"PYTHONPATH": str(tmp_path)}
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  losses = [
    json.loads(line)["loss"] for line in (tmp_path / "figures.jsonl").read_text().splitlines() if "loss" in line
  ]
  assert losses[-1] < losses[0] - 0.3
