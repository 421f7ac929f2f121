"""The engine of a run's rollouts, as configured, and the process that is one for another process's run."""

from collections.abc import Sequence

import jax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.inference_model import load_run_tokenizer
from maxtext.logs import setup_logging
from maxtext.models.model import Model
from maxtext.rl.answers import rollout_sampling
from maxtext.rl.devices import check_room, process_model, sampler_model
from maxtext.rl.engines import (
  ProcessEngine,
  RolloutEngine,
  SeparateEngine,
  SharedEngine,
  check_same_model,
  engine_slots,
  generates_ahead,
)
from maxtext.rl.remote import RemoteEngine, serve_rollouts
from maxtext.training.compilation_cache import compilation_cache
from maxtext.training.live_engine import LiveEngine, model_problem
from maxtext.training.objectives.policy import replayed_experts
from maxtext.training.preflight import check_hardware
from maxtext.training.program import Program


def rollout_engine(
  config: MaxTextConfig, program: Program, tokenizer: TextTokenizer, devices: Sequence[jax.Device] | None
) -> RolloutEngine:
  """The engine of a run: on `devices`, with the trainer's arrays (None), or in another process (`sampler_address`).
  Each of several processes has one on its own devices.

  Raises:
    ConfigError: the engine cannot run this model on this mesh.
  """
  c = config
  if not c.sampler_address and devices is None and (problem := model_problem(program)):
    raise ConfigError(f"use_grpo=true: rollouts cannot be generated here: {problem}")
  if c.sampler_address:
    return RemoteEngine(c, program.model)
  if jax.process_count() > 1:
    mesh = program.model.execution.sharding.mesh
    model = process_model(c, mesh)
    check_same_model(program.model.params | program.model.buffers, model.params | model.buffers)
    check_room(c, program, model)
    return ProcessEngine(_live(c, model, tokenizer, jax.process_count()), model, mesh)
  if devices is None:
    return SharedEngine(_live(c, program.model, tokenizer), keep=generates_ahead(c))
  model = sampler_model(c, devices)
  check_same_model(program.model.params | program.model.buffers, model.params | model.buffers)
  return SeparateEngine(_live(c, model, tokenizer), model, c.reshard_chunk_size)


def sample(config: MaxTextConfig) -> None:
  """Generates rollouts for the trainer that connects to `sampler_address`, on all devices of this process."""
  setup_logging()
  if not config.sampler_address:
    raise ConfigError("--sampler waits for a trainer at an address: set sampler_address=HOST:PORT.")
  check_hardware(config)
  with compilation_cache(config):
    model = sampler_model(config, jax.devices())
    serve_rollouts(config, model, _live(config, model, load_run_tokenizer(config)))


def _live(config: MaxTextConfig, model: Model, tokenizer: TextTokenizer, engines: int = 1) -> LiveEngine:
  c, sampling = config, rollout_sampling(config, tokenizer)
  longest = c.max_target_length
  prompt = longest - 1 if c.rl_environment else c.max_prefill_predict_length  # a turn follows those before it
  slots, keep = engine_slots(c, engines), replayed_experts(c) > 0
  return LiveEngine(
    c, model, tokenizer, sampling, slots, longest, prompt, multi_sampling=True, keep_routed_experts=keep
  )
