"""A run of policy optimization: its rollouts, its objective, its callbacks, in the loop of every run."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.distributed.agreement import agree
from maxtext.distributed.exchange import Exchange
from maxtext.distributed.multihost import check_joined, join
from maxtext.inference.inference_model import load_run_tokenizer
from maxtext.inference.sampling import SamplingParams
from maxtext.rl.callbacks import EvaluatePolicy, RolloutFigures, evaluation_sampling
from maxtext.rl.devices import split_devices
from maxtext.rl.multi_turn import MultiTurn
from maxtext.rl.rewards import Rewards
from maxtext.rl.rollouts import RolloutSource, fingerprint
from maxtext.rl.tasks import Task, load_tasks
from maxtext.training import run
from maxtext.training.callbacks.base import Callback
from maxtext.training.consistency import agree_on_start, description_values
from maxtext.training.objectives.policy import PolicyOptimization
from maxtext.training.preflight import check_extras
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)
_PATIENCE = 600  # seconds for the slowest process to read its tasks
_Opened = tuple[RolloutSource, list[Task]]


def train_policy(
  config: MaxTextConfig,
  *,
  optimizer: optax.GradientTransformation | None = None,
  callbacks: Sequence[Callback] = (),
  origins: Mapping[str, str] | None = None,
  config_name: str = "",
) -> TrainState:
  """Trains a policy by the rewards of its own answers, as configured; otherwise as `maxtext.training.run.train`."""
  source, held_out, updates = _prepare(config)
  figures = RolloutFigures(source, config.mismatch_limit)
  evaluate = [EvaluatePolicy(source, held_out, config.eval_interval, updates.config.steps)] if held_out else []
  for callback in evaluate:
    source.at_start = callback.before
  finished, problem = False, ""
  try:
    state = run.train(
      updates.config,
      objective=updates.objective,
      optimizer=optimizer,
      data=source,
      callbacks=[figures, *evaluate, *callbacks],
      origins=origins,
      config_name=config_name,
      devices=updates.devices,
    )
    finished = int(state.step) >= updates.config.steps
    return state
  except Exception as error:
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    raise
  finally:
    source.close(finished, problem)


def dry_run_policy(config: MaxTextConfig, *, config_name: str = "") -> list[str]:
  """The checks of a run, of its tasks and reward functions too; see `maxtext.training.run.dry_run`."""
  source, _, (updated, objective, devices, _) = _prepare(config)
  source.close()
  return run.dry_run(updated, objective=objective, data=source, config_name=config_name, devices=devices)


class PolicyUpdates(NamedTuple):
  """The updates of a policy.

  Attributes:
    config: of their run.
    objective: their loss.
    devices: those that train.
    sampler_devices: those that generate; None are the ones that train.
  """

  config: MaxTextConfig
  objective: PolicyOptimization
  devices: Sequence[jax.Device]
  sampler_devices: Sequence[jax.Device] | None


def policy_updates(config: MaxTextConfig, devices: Sequence[jax.Device]) -> PolicyUpdates:
  """The updates of a configured run on these devices, of which some may generate."""
  trainer, sampler = split_devices(config, devices)
  updates = policy_config(config, len(trainer))
  objective = PolicyOptimization.of(updates, SamplingParams.of(config).temperature)
  return PolicyUpdates(updates, objective, trainer, None if sampler == trainer else sampler)


def policy_config(config: MaxTextConfig, devices: int) -> MaxTextConfig:
  """The configuration of the updates: rows are answers, and steps are those of all batches."""
  c, rows = config, config.batch_size * config.num_generations
  micro = rows if c.train_micro_batch_size == -1 else c.train_micro_batch_size
  steps = round(c.num_batches * c.train_fraction) * c.num_iterations
  if not steps:
    raise ConfigError(f"num_batches={c.num_batches} x train_fraction={c.train_fraction} is no batch.")
  if micro % devices:
    named = "train_micro_batch_size" if c.train_micro_batch_size != -1 else "batch_size x num_generations"
    raise ConfigError(f"{named}={micro} answers do not divide among {devices} devices.")
  schedule = steps if c.learning_rate_schedule_steps in (-1, c.steps) else c.learning_rate_schedule_steps
  return c.model_copy(
    update={
      "per_device_batch_size": micro / devices,
      "gradient_accumulation_steps": rows // micro,
      "steps": steps,
      "learning_rate_schedule_steps": schedule,
      "eval_interval": -1,
      "eval_tasks": [],
    }
  )


def _prepare(config: MaxTextConfig) -> tuple[RolloutSource, list[Task], PolicyUpdates]:
  """The rollouts of a run, the tasks that it is evaluated with, and its updates."""
  check_extras(config)  # before the processes of rewards import them
  join(config)  # devices are counted
  check_joined(config)
  agree_on_start(config)
  if jax.process_count() > 1:
    _check_shares_devices(config)
  updates, opened, exchange = policy_updates(config, jax.devices()), list[_Opened](), Exchange("rollouts")

  def open_source() -> bytes:
    opened.append(_source(config, updates.sampler_devices, exchange))
    return b""

  try:
    exchange(open_source)  # what one host lacks ends the run on all of them
    [(source, held_out)] = opened
    agree("tasks", description_values(source.about | {"held_out": fingerprint(held_out)}), _PATIENCE)
  except Exception:
    for source, _ in opened:
      source.close()
    raise
  return source, held_out, updates


def _check_shares_devices(config: MaxTextConfig) -> None:
  """Raises where a run of several processes would send parameters to devices of their own."""
  c, count = config, jax.process_count()
  if c.sampler_address:
    raise ConfigError(
      f"sampler_address={c.sampler_address} generates for a trainer of one process, and this run has {count}: leave it "
      f"out, and every process generates its share."
    )
  if c.num_trainer_slices != -1:
    raise ConfigError(
      f"num_trainer_slices={c.num_trainer_slices} is for a run of one process, and this run has {count}, each of which "
      f"generates its share on its own devices: leave num_trainer_slices and num_samplers_slices out."
    )
  if c.sampler_devices_fraction != 1:
    raise ConfigError(
      f"sampler_devices_fraction={c.sampler_devices_fraction:g} is for a run of one process, and this run has {count}, "
      f"each of which generates its share on its own devices: write 1.0 for it and for trainer_devices_fraction."
    )


def _source(config: MaxTextConfig, devices: Sequence[jax.Device] | None, exchange: Exchange) -> _Opened:
  """The rollouts of a run, and the tasks that it is evaluated with."""
  tokenizer = load_run_tokenizer(config)
  tasks, held_out = (load_tasks(config, tokenizer, split) for split in ("train", "eval"))
  if not tasks:
    raise ConfigError("grain_train_files is empty: name JSON lines with prompts and answers.")
  if not held_out and config.train_fraction < 1:
    kept = max(round(len(tasks) * config.train_fraction), 1)
    tasks, held_out = tasks[:kept], tasks[kept:]
  first = config.test_batch_start_index * config.batch_size
  held_out = held_out[first : first + config.num_test_batches * config.batch_size]
  if config.eval_interval > 0 and not held_out and not jax.process_index():
    _LOG.warning(
      f"maxtext: eval_interval={config.eval_interval} evaluates nothing: there are no tasks in grain_eval_files, or in "
      f"what train_fraction and num_test_batches leave."
    )
  evaluation_sampling(config, tokenizer)
  rewards = Rewards.of(config)
  try:
    multi_turn = MultiTurn(config, tokenizer) if config.rl_environment else None
  except ConfigError:
    rewards.close()
    raise
  return RolloutSource(config, tokenizer, tasks, rewards, exchange, multi_turn, devices), held_out
