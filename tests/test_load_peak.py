"""What a process holds at most while it loads and rounds weights: what is stored, and about one layer as it was."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
import torch
import transformers

import maxtext
from maxtext.inference.inference_model import load_params
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.weights.resolve import resolve_source

LAYERS, WIDTH, MLP, HEADS, KV_HEADS = 12, 512, 2048, 8, 4
LAYER_BYTES = 2 * WIDTH * (3 * MLP + 2 * WIDTH + 2 * WIDTH * KV_HEADS // HEADS)  # in bfloat16
MOST = 1.5 * LAYER_BYTES  # of which half is for buffers of the reader and of the rounding, in float32


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
  """A model of 50 million parameters in bfloat16, as a Hugging Face folder and as a checkpoint."""
  folder = tmp_path_factory.mktemp("peak")
  config = transformers.LlamaConfig(
    vocab_size=1024, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=WIDTH // HEADS, tie_word_embeddings=False,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "folder")
  maxtext.convert(folder / "folder", folder / "checkpoint", weight_dtype="bfloat16")
  return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process what it holds")
@pytest.mark.parametrize(
  ("source", "keys"),
  [
    ("checkpoint", {"weight_format": "int8", "scan_layers": False}),
    ("checkpoint", {"weight_format": "int4", "scan_layers": True}),
    ("folder", {"weight_format": "int8", "scan_layers": False}),
  ],
)
def test_no_more_than_a_layer_is_there_besides(source, keys, sources):
  """On a CPU, where arrays of devices are memory of the process as all others are."""
  # The smallest arrays of weights are given back to the system when they are freed.
  environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  command = [sys.executable, __file__, str(sources / source), json.dumps(keys | {"weight_dtype": "bfloat16"})]
  output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
  found = json.loads(output.splitlines()[-1])
  plain = LAYERS * LAYER_BYTES
  assert found["live"] == found["stored"] < (0.56 if keys["weight_format"] == "int8" else 0.33) * plain
  assert found["held"] > 0.9 * found["stored"], "the measure sees the weights"
  assert found["peak"] < found["stored"] + MOST


def anonymous() -> int:
  """Bytes of this process that are no pages of files."""
  lines = Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(source: str, keys: dict) -> dict[str, int]:
  """Bytes of a second load, when programs are compiled and libraries are warm."""
  config = resolve_source(source, {"dataset_type": "synthetic", **keys}).config
  model = build_model(config, make_mesh(config, jax.devices()[:1]), serving=True)
  load_params(config, model)
  gc.collect()
  before, most, ended = anonymous(), [0], threading.Event()

  def watch() -> None:
    while not ended.is_set():
      most[0] = max(most[0], anonymous())
      time.sleep(0.0005)

  watcher = threading.Thread(target=watch)
  watcher.start()
  params = jax.block_until_ready(load_params(config, model))
  ended.set()
  watcher.join()
  gc.collect()
  stored, live = (sum(array.nbytes for array in arrays) for arrays in (params.values(), jax.live_arrays()))
  return {"stored": stored, "live": live, "peak": most[0] - before, "held": anonymous() - before}


if __name__ == "__main__":
  print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
