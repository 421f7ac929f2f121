"""Offline throughput of an engine on the local devices: prefill, decode steps, and many requests at once."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxtext.bench.workload import Workload
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.inference.engine import Engine
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.llm import LLM
from maxtext.inference.sampling import SamplingParams


@dataclass(frozen=True)
class StageTiming:
  """The timing of one stage.

  Attributes:
    stage: description of the stage.
    milliseconds: mean time of one repetition.
    tokens_per_second: throughput in prompt or output tokens.
  """

  stage: str
  milliseconds: float
  tokens_per_second: float


def bench_throughput(model: InferenceModel, workload: Workload) -> list[StageTiming]:
  """Times the stages of `inference_microbenchmark_stages`, then the workload, and writes the log file if set."""
  c, stages = model.config, {"prefill": _prefill, "generate": _generate}
  names = _split(c.inference_microbenchmark_stages)
  if unknown := [stage for stage in names if stage not in stages]:
    raise ConfigError(f"inference_microbenchmark_stages: '{unknown[0]}' is not one of {', '.join(stages)}.")
  if c.inference_microbenchmark_loop_iters < 1:
    raise ConfigError(f"inference_microbenchmark_loop_iters={c.inference_microbenchmark_loop_iters}: at least 1.")
  metadata = _metadata(c)
  model.engine.warm_up()
  timings = [timing for stage in names for timing in stages[stage](c, model.engine)]
  timings.append(_workload(model, workload))
  if c.inference_microbenchmark_log_file_path:
    record = {"metadata": metadata, "timings": [asdict(timing) for timing in timings]}
    _write(c.inference_microbenchmark_log_file_path, record)
  return timings


def _prefill(config: MaxTextConfig, engine: Engine) -> list[StageTiming]:
  """Times prefill for the lengths of `inference_microbenchmark_prefill_lengths` that fit."""
  key = f"inference_microbenchmark_prefill_lengths={config.inference_microbenchmark_prefill_lengths}"
  lengths_text = _split(config.inference_microbenchmark_prefill_lengths)
  if not all(word.isdecimal() and int(word) > 0 for word in lengths_text):
    raise ConfigError(f"{key}: give numbers of tokens, at least 1.")
  lengths = [length for length in map(int, lengths_text) if length <= engine.max_prompt_len]
  if not lengths:
    raise ConfigError(f"{key}: all are more than max_prefill_predict_length={engine.max_prompt_len}.")

  def once(length: int) -> None:
    jax.block_until_ready(engine.prefill([0] * (length + 1)))  # the last prompt token is not prefilled

  timings = [_time(f"prefill {length} tokens", config, partial(once, length), length) for length in lengths]
  return [*timings, *_samples(config, engine, lengths[-1])] if config.multi_sampling else timings


def _samples(config: MaxTextConfig, engine: Engine, length: int) -> list[StageTiming]:
  """Times prefill and insert for several outputs of one prompt, which is prefilled once."""
  counts, prompt = config.inference_microbenchmark_num_samples, [0] * length
  if invalid := [count for count in counts if not 0 < count <= engine.slots]:
    raise ConfigError(
      f"inference_microbenchmark_num_samples: {invalid[0]} is not between 1 and the {engine.slots} slots."
    )

  def once(count: int) -> None:
    row = engine.prefill(prompt)
    for slot in range(count):
      engine.insert(row, slot, prompt, SamplingParams())
    jax.block_until_ready(engine.state)

  named = {f"prefill {length} tokens, n={count}": count for count in counts}
  return [_time(name, config, partial(once, count), length) for name, count in named.items()]


def _generate(config: MaxTextConfig, engine: Engine) -> list[StageTiming]:
  active = [True] * engine.slots
  draft = f", {engine.num_speculative_tokens} draft tokens" if engine.num_speculative_tokens else ""
  name = f"decode step, {engine.slots} slots{draft}"
  return [_time(name, config, lambda: engine.speculative_step(active), engine.slots)]


def _time(stage: str, config: MaxTextConfig, once: Callable[[], Any], tokens: int) -> StageTiming:
  once()
  start = time.perf_counter()
  for _ in range(config.inference_microbenchmark_loop_iters):
    once()
  seconds = (time.perf_counter() - start) / config.inference_microbenchmark_loop_iters
  return StageTiming(stage, seconds * 1e3, tokens / seconds)


def _workload(model: InferenceModel, workload: Workload) -> StageTiming:
  """Times all requests of a workload at once; each generates `output_len` tokens."""
  sampling_params = replace(model.sampling_params, min_tokens=workload.output_len, max_tokens=workload.output_len)
  llm = LLM.of(model)
  start = time.perf_counter()
  generated = sum(len(output.token_ids) for output in llm.generate(workload.prompts(), sampling_params))
  seconds = time.perf_counter() - start
  return StageTiming(f"{workload.num_prompts} requests at once", seconds * 1e3, generated / seconds)


def _split(text: str) -> list[str]:
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
