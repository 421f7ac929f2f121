"""Decode steps of a batch whose rows have LoRA adapters, in turns with those of an engine without any.

  python -m benchmarks.multi_lora --json

A random Llama of 58 million parameters, 32 rows, 32 adapters of rank 16 on all its linear layers. Ratios are speeds
beside the engine without adapters: below 1, adapters cost something. The rows of the base must get the same
log-probabilities from both engines.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from benchmarks import bare
from benchmarks.figures import show
from maxtext import load_config
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.inference_model import make_engine
from maxtext.inference.sampling import SamplingParams
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model

ADAPTERS, RANK = 32, 16
Step = Callable[[], np.ndarray]  # the log-probability of each row's next token


def engines(keys: dict) -> dict[str, Callable[[], Step]]:
  """By the adapters in the batch: what starts an engine anew."""
  config = load_config(**keys)
  model = build_model(config, make_mesh(config))
  params = model.unstack_layers(jax.jit(model.init)(0)[0])
  manager = AdapterManager(config, AdapterOptions(max_loras=ADAPTERS, max_lora_rank=RANK))
  plain, adapted = (make_engine(config, model, params, adapters=adapters) for adapters in (None, manager))
  rng = np.random.default_rng(0)
  for slot in range(1, ADAPTERS + 1):
    # An engine's own paths, since a folder would have to be written first.
    shapes = {path: (struct.shape[0], *struct.shape[2:]) for path, struct in adapted.tables.items()}
    adapted.write_adapter(slot, {path: rng.normal(0, 0.02, shape) for path, shape in shapes.items()})

  def start(engine, slots: list[int]) -> Step:
    for row, adapter in enumerate(slots):
      engine.insert(engine.prefill([row + 1], adapter), row, [row + 1], SamplingParams(temperature=0.0), (), adapter)
    active = [True] * len(slots)
    return lambda: engine.decode_step(active).logprobs

  rows = config.per_device_batch_size
  batches = {"none": [0] * int(rows), "one": [1] * int(rows), "all": [1 + row % ADAPTERS for row in range(int(rows))]}
  return {"without": lambda: start(plain, batches["none"])} | {
    name: lambda slots=slots: start(adapted, slots) for name, slots in batches.items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  parser.add_argument("--turns", type=int, default=24)
  parser.add_argument("--loop", action="store_true", help="over layers, whose weights are stacked")
  parser.add_argument("--small", action="store_true", help="a toy size, to see that the benchmark runs")
  arguments = parser.parse_args()

  size = replace(bare.SMALL if arguments.small else bare.Size(), rows=32)
  keys = size.keys | {
    "max_prefill_predict_length": 16, "dtype": "float32", "scan_layers": arguments.loop, "jax_cache_dir": "",
    "dataset_type": "synthetic",
  }  # fmt: skip
  starts = engines(keys)
  without, base = starts["without"](), starts["none"]()
  np.testing.assert_array_equal([without() for _ in range(8)], [base() for _ in range(8)])
  result = {}
  for name in ("none", "one", "all"):
    steps = starts["without"](), starts[name]()
    times = [[_timed(step) for step in steps] for _ in range(arguments.turns)][2:]
    result |= {
      f"step_ms_{name}": 1e3 * statistics.median(own for _, own in times),
      f"ratio_{name}": statistics.median(plain / own for plain, own in times),
    }
  show({"step_ms_without": 1e3 * statistics.median(plain for plain, _ in times)} | result, arguments.json)


def _timed(step: Step) -> float:
  start = time.perf_counter()
  step()
  return time.perf_counter() - start


if __name__ == "__main__":
  main()
