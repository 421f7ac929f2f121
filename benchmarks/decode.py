"""Our engine in turns with a hand-written JAX decode loop, and with transformers on torch.

  python -m benchmarks.decode --json

All three read one Hugging Face folder of a random Llama, decode greedily in a batch of eight from prompts of one token,
and must write the same tokens. The first token is timed from the start of a `maxtext decode` process to what it
prints, without and with a filled compilation cache. Ratios are speeds: above 1, the engine is faster. Threads of torch
that wait count as processor time, unless it has one (`--one-core`).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import bare, bare_decode
from benchmarks.figures import show
from maxtext import load_config
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.sampling import SamplingParams

PROMPT = "w1 w2 w3"


Step = Callable[[], np.ndarray]  # the next token of each row
Decode = Callable[[], Step]  # starts anew


class Timed(NamedTuple):
  """Seconds of a step, by the clock and of the processor."""

  seconds: float
  processor: float


def write_folder(folder: Path, size: bare.Size) -> None:
  """A Llama with random weights, and a vocabulary of words with numbers."""
  import torch
  from tokenizers import Tokenizer, models, pre_tokenizers
  from transformers import LlamaConfig, LlamaForCausalLM

  torch.manual_seed(0)
  config = LlamaConfig(
    vocab_size=size.vocab, hidden_size=size.width, intermediate_size=size.mlp, num_hidden_layers=size.layers,
    num_attention_heads=size.heads, head_dim=size.head_dim, rms_norm_eps=1e-5, tie_word_embeddings=False,
    max_position_embeddings=size.length, initializer_range=size.width**-0.5,
  )  # fmt: skip
  LlamaForCausalLM(config).save_pretrained(folder)
  words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size.vocab)}, unk_token="w0"))
  words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  words.save(str(folder / "tokenizer.json"))


def values_of(folder: Path, size: bare.Size, cache: Path) -> dict:
  """The same model as keys."""
  return size.keys | {
    "normalization_layer_epsilon": 1e-5,
    "max_prefill_predict_length": size.length // 2,
    "dtype": "float32",
    "load_parameters_path": str(folder),
    "source_checkpoint_layout": "safetensors",
    "tokenizer_type": "huggingface",
    "tokenizer_path": str(folder),
    "add_bos": False,
    "add_eos": False,
    "jax_cache_dir": str(cache),
  }


def ours(values: dict, size: bare.Size) -> Decode:
  """The engine that `maxtext serve` would run."""
  engine = InferenceModel.load(load_config(**values)).engine

  def start() -> Step:
    for slot in range(size.rows):
      prompt = [slot + 1]
      engine.insert(engine.prefill(prompt), slot, prompt, SamplingParams(temperature=0.0))
    active = [True] * size.rows
    return lambda: engine.decode_step(active).token_ids

  return start


def by_hand(folder: Path, size: bare.Size) -> Decode:
  """The hand-written loop; like an engine, it looks at every token."""
  params, step = bare_decode.load(folder, size), bare_decode.make_step(size)

  def start() -> Step:
    cache, tokens, position = bare_decode.init_cache(size), jnp.arange(size.rows) + 1, 0

    def one() -> np.ndarray:
      nonlocal cache, tokens, position
      cache, tokens = step(params, cache, tokens, np.int32(position))
      position += 1
      return np.asarray(tokens)

    return one

  return start


def by_transformers(folder: Path, size: bare.Size) -> Decode:
  """The loop that its `generate` runs, without what that does around it."""
  import torch
  from transformers import AutoModelForCausalLM, DynamicCache

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  def start() -> Step:
    cache, tokens = DynamicCache(config=model.config), torch.arange(size.rows)[:, None] + 1

    @torch.inference_mode()
    def one() -> np.ndarray:
      nonlocal tokens
      tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
      return tokens[:, 0].numpy()

    return one

  return start


def race(first: Decode, second: Decode, turns: int, steps: int, rest: float = 0.0) -> tuple[list[Timed], list[Timed]]:
  """Both in turns, a few steps each, with so many seconds before each turn; what they write first must be the same."""
  one, other = first(), second()
  np.testing.assert_array_equal([one() for _ in range(8)], [other() for _ in range(8)])
  times = [(timed(one, steps, rest), timed(other, steps, rest)) for _ in range(turns)]
  return [a for a, _ in times], [b for _, b in times]


def timed(step: Step, steps: int, rest: float) -> Timed:
  time.sleep(rest)
  start, worked = time.perf_counter(), time.process_time()
  for _ in range(steps):
    step()
  return Timed((time.perf_counter() - start) / steps, (time.process_time() - worked) / steps)


def first_token(values: dict) -> float:
  """Seconds from the start of a process to its first token."""
  command = [Path(sys.executable).with_name("maxtext"), "decode", *(f"{k}={v}" for k, v in values.items())]
  start = time.perf_counter()
  with subprocess.Popen(
    [*command, f"prompt={PROMPT}", "--max-tokens=1"], stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"}
  ) as process:
    assert process.stdout is not None
    shown = process.stdout.read(len(PROMPT) + 1)
    seconds = time.perf_counter() - start
    process.stdout.read()  # so that it may end in peace
  if process.returncode or not shown.startswith(PROMPT.encode()):
    raise RuntimeError(f"no token from {command}")
  return seconds


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  parser.add_argument("--turns", type=int, default=96)
  parser.add_argument("--starts", type=int, default=3, help="processes that are timed to their first token")
  parser.add_argument("--one-core", action="store_true", help="all on one core, where processor time is work alone")
  parser.add_argument("--loop", action="store_true", help="over layers, whose weights are stacked")
  parser.add_argument("--small", action="store_true", help="a toy size, to see that the benchmark runs")
  arguments = parser.parse_args()
  if arguments.one_core:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

  size = replace(bare.SMALL if arguments.small else bare.Size(), rows=8)
  with tempfile.TemporaryDirectory() as root:
    folder, cache = Path(root) / "model", Path(root) / "cache"
    write_folder(folder, size)
    values = values_of(folder, size, cache) | {"scan_layers": arguments.loop}
    cold = [first_token(values | {"jax_cache_dir": ""}) for _ in range(arguments.starts)]
    first_token(values)
    warm = [first_token(values) for _ in range(arguments.starts)]
    engine = ours(values, size)
    ours_first, bare_steps = race(engine, by_hand(folder, size), arguments.turns, 1)
    # torch's threads stay awake for a while, and would take a core from the next turn
    ours_again, torch_steps = race(engine, by_transformers(folder, size), arguments.turns // 8, 8, rest=0.5)

  def speed(times: list[Timed]) -> float:
    return 1 / statistics.median(t.seconds for t in times)

  def ratio(ours: list[Timed], others: list[Timed], kind: str) -> float:
    return statistics.median(getattr(b, kind) / getattr(a, kind) for a, b in zip(ours, others, strict=True))

  result = {"engine_steps_per_s": speed(ours_first), "bare_steps_per_s": speed(bare_steps)}
  result |= {f"ratio_to_bare_{kind}": ratio(ours_first, bare_steps, kind) for kind in Timed._fields}
  result |= {"transformers_steps_per_s": speed(torch_steps)}
  result |= {f"ratio_to_transformers_{kind}": ratio(ours_again, torch_steps, kind) for kind in Timed._fields}
  result |= {"first_token_cold_s": statistics.median(cold), "first_token_warm_s": statistics.median(warm)}
  show(result, arguments.json)


if __name__ == "__main__":
  main()
