"""Weights at rest in every format, for a trained run: held-out loss, bytes, and the speed of decode on this machine.

  maxtext data prepare stdlib-llama --stdlib --train-tokenizer --to data/stdlib
  maxtext train stdlib-llama grain_train_files=data/stdlib run_name=formats steps=300
  python -m benchmarks.weight_formats runs/formats

The loss is that of the run's evaluation set. The difference is that of the log-probabilities of 5,120 tokens of the
source of Python's `email` package from those of the plain model, as a root mean square: a loss may fall by chance. GPTQ
is calibrated on `json` and `asyncio`. Tokens per second are those of eight prompts at once.
"""

import argparse
import asyncio
import email
import json
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.figures import show
from maxtext import LLM, SamplingParams, evaluate, quantize

FORMATS: dict[str, dict[str, Any]] = {
  "as trained": {},
  "int8": {"weight_format": "int8"},
  "int8, and inputs": {"quantization": "int8"},
  "fp8": {"weight_format": "fp8"},
  "int4": {"weight_format": "int4", "weight_block_size": 32},
  "int4, GPTQ": {"weight_format": "int4", "weight_block_size": 32},
  "nf4": {"weight_format": "nf4"},
  "mxfp4": {"weight_format": "mxfp4"},
  "nvfp4": {"weight_format": "nvfp4"},
}


def speed(llm: LLM, rounds: int = 3) -> float:
  """Tokens per second, by the best of some rounds after one that compiles."""
  params = SamplingParams(temperature=0, max_tokens=64)
  best = 0.0
  for i in range(rounds + 1):
    start = time.perf_counter()
    outputs = llm.generate(["import os"] * 8, params)
    taken = time.perf_counter() - start
    best = max(best, sum(len(output.token_ids) for output in outputs) / taken if i else 0.0)
  return best


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("run", help="folder of a run")
  parser.add_argument("--only", nargs="*", choices=FORMATS, help="rows")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  args = parser.parse_args()
  result: dict[str, Any] = {}
  plain = log_probs(LLM(args.run))
  with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "calibration.txt"
    text.write_text(source(json) + source(asyncio))
    for name in args.only or FORMATS:
      keys, run = FORMATS[name], args.run
      if "GPTQ" in name:
        run = str(quantize(args.run, Path(folder) / "gptq", calibration=text, **keys))
      result[f"{name}: loss"] = evaluate(run, **keys)["loss"]
      llm = LLM(run, per_device_batch_size=8, scan_layers=False, **keys)
      result |= {
        f"{name}: difference": float(np.sqrt(np.mean((log_probs(llm) - plain) ** 2))),
        f"{name}: megabytes of layers": layer_bytes(llm) / 1e6,
        f"{name}: tokens/s": speed(llm),
      }
  show(result, args.json)


def source(package: ModuleType) -> str:
  """The source of a package of the standard library."""
  assert package.__file__
  return "".join(file.read_text(errors="ignore") for file in sorted(Path(package.__file__).parent.glob("*.py")))


def log_probs(llm: LLM, rows: int = 40, length: int = 128) -> np.ndarray:
  """Of the first tokens of a text, each row by itself."""
  tokens = llm.tokenizer.encode(source(email))
  return np.concatenate([llm.score(row) for row in tokens[: rows * length].reshape(rows, length)])


def layer_bytes(llm: LLM) -> int:
  """Bytes of all parameters of layers."""
  model = llm.engine.model
  return sum(s.size * s.dtype.itemsize for name, s in (model.params | model.buffers).items() if "layers/" in name)


if __name__ == "__main__":
  main()
