"""What a run of policy optimization does between updates: figures of rollouts, the mismatch guard, evaluation."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.batch import IteratorState
from maxtext.data.tokenizers import TextTokenizer
from maxtext.distributed.exchange import Exchange
from maxtext.inference.sampling import SamplingParams
from maxtext.rl.answers import AnswerGroup, Policy, rollout_sampling
from maxtext.rl.outcomes import from_bytes, share_of, to_bytes
from maxtext.rl.rewards import extract_answer
from maxtext.rl.rollouts import RolloutSource
from maxtext.rl.tasks import Task
from maxtext.status_line import show_phase
from maxtext.training.callbacks.base import Callback
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)
_EVALUATION = 1  # tells the seeds of evaluations from those of rollouts


class RolloutFigures(Callback):
  """Adds what was measured of an update's rollouts to its metrics, and ends the run where engine and trainer differ."""

  def __init__(self, source: RolloutSource, limit: float) -> None:
    self._source, self._limit = source, limit

  def due(self, step: int) -> bool:
    return True

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    metrics |= self._source.figures_of(step)
    return False

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if self._limit and metrics.get("mismatch_max", 0.0) > self._limit:
      raise RunError(
        f"the log-probability of a token differs by {metrics['mismatch_max']:.3g} between engine and trainer at step "
        f"{step}, more than mismatch_limit={self._limit:g}."
      )


def evaluation_sampling(config: MaxTextConfig, tokenizer: TextTokenizer) -> SamplingParams:
  """How answers of an evaluation are sampled; `ConfigError` for an entry of `generation_configs` that is wrong."""
  given = config.generation_configs[config.eval_sampling_strategy]
  known = ("temperature", "top_k", "top_p")
  if not isinstance(given, dict) or given.keys() - set(known):
    raise ConfigError(f"generation_configs: {config.eval_sampling_strategy}={given} may have {', '.join(known)}.")
  own = rollout_sampling(config, tokenizer)
  try:
    return SamplingParams(**given, stop_token_ids=own.stop_token_ids, stop=own.stop, logprobs=0)
  except (ConfigError, TypeError) as error:  # a number out of its range, or no number
    raise ConfigError(f"generation_configs: {config.eval_sampling_strategy}={given}: {error}") from None


class EvaluatePolicy(Callback):
  """Asks the policy tasks that it is not trained on: before the first update, every `interval` updates, at the end."""

  evaluates = True

  def __init__(self, source: RolloutSource, tasks: Sequence[Task], interval: int, last: int) -> None:
    self._source, self._tasks, self._interval, self._last = source, tasks, interval, last
    self._exchange = Exchange("evaluation")

  def due(self, step: int) -> bool:
    return step == self._last or (self._interval > 0 and step % self._interval == 0)

  def before(self) -> None:
    """Logs what the policy can do before the first update."""
    found = _as_text(self.evaluate())
    if not jax.process_index():
      _LOG.info(f"maxtext: before the first update: {found}")

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    began = time.monotonic()
    show_phase(f"evaluating step {step}")
    found = self.evaluate()
    metrics |= {f"eval_{name}": value for name, value in found.items()} | {"eval_seconds": time.monotonic() - began}
    return False

  def evaluate(self) -> dict[str, float]:
    """The share of tasks that are solved by `eval_mode`, and the mean reward, of the current policy."""
    c, policy = self._source.config, self._source.loaded_policy()
    size = c.batch_size * c.num_generations
    told: list[bytes] = []
    for i in range(0, len(self._tasks), size):
      told += self._exchange(partial(self._scores, policy, self._tasks[i : i + size], i))
    self._source.let_go()
    scores = [from_bytes(data) for data in told]
    return {
      "pass_rate": float(np.concatenate([one["solved"] for one in scores]).mean()),
      "reward": float(np.concatenate([one["rewards"] for one in scores]).mean()),
    }

  def close(self) -> None:
    self._exchange.end("its run is over")

  def _scores(self, policy: Policy, tasks: Sequence[Task], first: int) -> bytes:
    """Of this process's share of the tasks: whether each is solved, and the rewards of its answers."""
    c = self._source.config
    sampling, seed = evaluation_sampling(c, self._source.tokenizer), (c.init_weights_seed, _EVALUATION, first)
    groups = self._source.answerer.ask(policy, tasks, share_of(len(tasks)), c.num_eval_passes, seed, sampling)
    solved = np.array([is_solved(c, self._source, group) for group in groups])
    rewards = np.array([group.rewards for group in groups]).reshape(-1, c.num_eval_passes)
    return to_bytes({"solved": solved, "rewards": rewards})


def is_solved(config: MaxTextConfig, source: RolloutSource, group: AnswerGroup) -> float:
  """Whether a task is solved: by any answer (pass), by the most frequent one (maj), or which share is right
  (pass_at_1)."""
  texts = [answer.text for answer in group.answers]
  right = [
    source.rewards.is_correct(config, text, group.task.answer, {name: part[i] for name, part in group.parts.items()})
    for i, text in enumerate(texts)
  ]
  if config.eval_mode == "maj":
    said = [extract_answer(config, text) or text.strip() for text in texts]
    most = Counter(said).most_common(1)[0][0]
    return float(right[said.index(most)])
  return float(any(right)) if config.eval_mode == "pass" else float(np.mean(right))


def _as_text(found: dict[str, float]) -> str:
  return ", ".join(f"{name} {value:.3f}" for name, value in found.items())
