"""What a model's engine can do on the devices that are here: prefill, generation, and a batch of requests at once."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxtext.bench.load import Load
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.inference.engine import Engine
from maxtext.inference.llm import LLM
from maxtext.inference.loading import Loaded
from maxtext.inference.sampling import SamplingParams


@dataclass(frozen=True)
class Timing:
  """One measurement.

  Attributes:
    what: in words.
    milliseconds: of one repetition, on average.
    tokens_per_second: tokens that are taken in, or written.
  """

  what: str
  milliseconds: float
  tokens_per_second: float


def bench_engine(loaded: Loaded, load: Load) -> list[Timing]:
  """Times the stages that the keys name, then all requests at once, and writes what the keys ask for."""
  c, stages = loaded.config, {"prefill": _prefill, "generate": _generate}
  asked = _words(c.inference_microbenchmark_stages)
  if unknown := [stage for stage in asked if stage not in stages]:
    raise ConfigError(f"inference_microbenchmark_stages: '{unknown[0]}' is none of {', '.join(stages)}.")
  if c.inference_microbenchmark_loop_iters < 1:
    raise ConfigError(f"inference_microbenchmark_loop_iters={c.inference_microbenchmark_loop_iters}: at least 1.")
  metadata = _metadata(c)
  loaded.engine.warm_up()
  timings = [timing for stage in asked for timing in stages[stage](c, loaded.engine)]
  timings.append(_offline(loaded, load))
  if c.inference_microbenchmark_log_file_path:
    record = {"metadata": metadata, "timings": [asdict(timing) for timing in timings]}
    _write(c.inference_microbenchmark_log_file_path, record)
  return timings


def _prefill(config: MaxTextConfig, engine: Engine) -> list[Timing]:
  """Of the lengths that prompts may have here."""
  key = f"inference_microbenchmark_prefill_lengths={config.inference_microbenchmark_prefill_lengths}"
  words = _words(config.inference_microbenchmark_prefill_lengths)
  if not all(word.isdecimal() and int(word) > 0 for word in words):
    raise ConfigError(f"{key}: write numbers of tokens, from 1 on.")
  lengths = [length for length in map(int, words) if length <= engine.longest_prompt]
  if not lengths:
    raise ConfigError(f"{key}: all are more than max_prefill_predict_length={engine.longest_prompt}.")

  def once(length: int) -> None:
    jax.block_until_ready(engine.prefilled([0] * (length + 1)))  # the last token of a prompt is not prefilled

  timings = [_timing(f"prefill of {length} tokens", config, partial(once, length), length) for length in lengths]
  return [*timings, *_samples(config, engine, lengths[-1])] if config.multi_sampling else timings


def _samples(config: MaxTextConfig, engine: Engine, length: int) -> list[Timing]:
  """Of several answers to one prompt, which is prefilled once."""
  counts, prompt = config.inference_microbenchmark_num_samples, [0] * length
  if wrong := [count for count in counts if not 0 < count <= engine.slots]:
    raise ConfigError(f"inference_microbenchmark_num_samples: {wrong[0]} is not from 1 to the {engine.slots} slots.")

  def once(count: int) -> None:
    row = engine.prefilled(prompt)
    for slot in range(count):
      engine.insert(row, slot, prompt, SamplingParams())
    jax.block_until_ready(engine.state)

  named = {f"{count} answers to {length} tokens": count for count in counts}
  return [_timing(name, config, partial(once, count), length) for name, count in named.items()]


def _generate(config: MaxTextConfig, engine: Engine) -> list[Timing]:
  everyone = [True] * engine.slots
  guessing = f", {engine.ahead} guesses behind each" if engine.ahead else ""
  return [_timing(f"step of {engine.slots} slots{guessing}", config, lambda: engine.write(everyone), engine.slots)]


def _timing(what: str, config: MaxTextConfig, once: Callable[[], Any], tokens: int) -> Timing:
  once()
  start = time.perf_counter()
  for _ in range(config.inference_microbenchmark_loop_iters):
    once()
  seconds = (time.perf_counter() - start) / config.inference_microbenchmark_loop_iters
  return Timing(what, seconds * 1e3, tokens / seconds)


def _offline(loaded: Loaded, load: Load) -> Timing:
  """All requests at once; every answer has all its tokens."""
  sampling_params = replace(loaded.sampling_params, min_tokens=load.max_tokens, max_tokens=load.max_tokens)
  llm = LLM.of(loaded)
  start = time.perf_counter()
  written = sum(len(output.token_ids) for output in llm.generate(load.prompts(), sampling_params))
  seconds = time.perf_counter() - start
  return Timing(f"{load.requests} requests at once", seconds * 1e3, written / seconds)


def _words(text: str) -> list[str]:
  return [word.strip() for word in text.split(",")]


def _write(file: str, record: dict[str, Any]) -> None:
  try:
    Path(file).expanduser().write_text(json.dumps(record, indent=2))
  except OSError as error:
    raise RunError(f"inference_microbenchmark_log_file_path={file} cannot be written: {error.strerror}.") from None


def _metadata(config: MaxTextConfig) -> Any:
  file = config.inference_metadata_file
  try:
    return json.loads(Path(file).expanduser().read_text(encoding="utf-8")) if file else {}
  except (OSError, ValueError) as error:
    raise ConfigError(f"inference_metadata_file={file} cannot be read as JSON: {error}.") from None
