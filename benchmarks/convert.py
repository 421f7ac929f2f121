"""Memory and time of converting a checkpoint of several GiB, both ways, in processes of their own.

`python -m benchmarks.convert --json` makes a Hugging Face folder of made-up bfloat16 weights, converts it to a
checkpoint of ours and back, and prints the most memory that either process held and its seconds for each GiB of the
folder. It needs three times the size on disk, which it frees, sees that every byte comes back, and fails if a process
held more than the largest table or layer and 2 GiB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from maxtext.configs.loader import load_config, parse_assignments
from maxtext.models.build import abstract_model, weight_table
from maxtext.weights.config_json import hugging_face_class
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.tensor_files import make_header, write_file
from maxtext.weights.tensor_layout import tensor_layouts

WORDS = ["model_name=llama3.1-8b", "override_model_config=true", "weight_dtype=bfloat16"]
LAYER, TABLE = 436_224_000, 128256 * 4096 * 2  # bytes of one
MOST = max(LAYER, TABLE) / 2**30 + 2  # GiB that a conversion may hold, whatever the model's size
BLOCK = 1 << 22  # numbers made at once: a child would inherit the most that this process ever held


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
  parser.add_argument("--gib", type=float, default=8, help="size of the folder (default 8)")
  parser.add_argument("--folder", default=None, help="where to work (default the temporary folder)")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
    figures = measure(Path(work), arguments.gib)
  if arguments.json:
    print(json.dumps(figures))
    return
  for name, value in figures.items():
    print(f"{name:<34} {value:.2f}")


def measure(work: Path, gib: float) -> dict[str, float]:
  """Makes the folder, converts it there and back, and compares what comes back."""
  layers = max(1, round((gib * 2**30 - 2 * TABLE) / LAYER))
  words = [*WORDS, f"base_num_decoder_layers={layers}"]
  size = make_folder(work / "hf", words) / 2**30
  figures = {"gib": size}
  for way, source, target, extra in (("from-hf", "hf", "params", words), ("to-hf", "params", "back", [])):
    seconds, usage = timed(["convert", way, str(work / source), str(work / target), *extra])
    figures |= {
      f"{way} seconds per GiB": seconds / size,
      f"{way} processor seconds per GiB": (usage.ru_utime + usage.ru_stime) / size,
      f"{way} resident GiB": usage.ru_maxrss / 2**20,
    }
    assert usage.ru_maxrss / 2**20 < MOST, figures
  came, went = (HuggingFaceFolder(work / name).tensors for name in ("hf", "back"))
  assert came.keys() == went.keys()
  assert all(np.array_equal(came[name].read().view(np.uint8), went[name].read().view(np.uint8)) for name in came)
  return figures


def make_folder(folder: Path, words: list[str]) -> int:
  """Weights that differ everywhere; returns their bytes."""
  config = load_config(**parse_assignments(words), dataset_type="synthetic")
  model = abstract_model(config)
  tensors = tensor_layouts(model, weight_table(config, model.spec))
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(hugging_face_class(config).config(config)))
  rng, dtype = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16)

  def content():
    yield make_header({name: (tensor.shape, dtype) for name, tensor in tensors.items()})
    for tensor in tensors.values():
      for left in range(prod(tensor.shape), 0, -BLOCK):
        yield rng.standard_normal(min(left, BLOCK), np.float32).astype(dtype).view(np.uint8).data

  write_file(folder / "model.safetensors", content())
  return (folder / "model.safetensors").stat().st_size


def timed(command: list[str]) -> tuple[float, resource.struct_rusage]:
  """Seconds, and what the process used."""
  start = time.perf_counter()
  process = subprocess.Popen([sys.executable, "-m", "maxtext.cli", *command], stdout=subprocess.DEVNULL)
  _, status, usage = os.wait4(process.pid, 0)
  assert status == 0, command
  return time.perf_counter() - start, usage


if __name__ == "__main__":
  main()
