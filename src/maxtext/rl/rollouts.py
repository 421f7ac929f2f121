"""Rollouts as a source of batches: which policy answers which tasks for which update, whatever runs when.

The batch of update n is written by the policy after n - 1 - `off_policy_steps` updates, or by the first one. Answers
are a function of that policy, the tasks and (seed, batch), and batches that are made ahead are part of a checkpoint,
so a resumed run has the same answers. `use_agentic_rollout` makes batches in a thread while the trainer goes on, with a
copy of the policy; that changes no bit.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.data.batch import BatchWithState, IteratorState
from maxtext.data.fingerprint import check_same_data, to_array
from maxtext.data.iterable import place_batch
from maxtext.data.options import media_options
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.multimodal import PromptEncoder
from maxtext.observe.growing_file import GrowingFile
from maxtext.observe.metric_lines import truncate_after
from maxtext.rl.advantages import is_degenerate
from maxtext.rl.answers import Answerer, AnswerGroup, Policy, rollout_sampling
from maxtext.rl.multi_turn import MultiTurn
from maxtext.rl.policy_batch import Arrays, as_batch, policy_advantages, policy_arrays
from maxtext.rl.rewards import Rewards
from maxtext.rl.sampler import rollout_engine
from maxtext.rl.tasks import Task, task_order
from maxtext.rl.trajectory import Trajectory
from maxtext.status_line import show_phase
from maxtext.training.objectives.policy import OLD, SAMPLED, token_log_probs
from maxtext.training.program import Program
from maxtext.training.state import TrainState

FILE = "rollouts.jsonl"
_WRITTEN = 2  # groups of a batch that are written to the run's folder
_KEPT = "rollouts"
_TRAINING = 0  # tells the seeds of rollouts from those of evaluations


class Rollouts(NamedTuple):
  """One batch of answers.

  Attributes:
    place: among the tasks, of the next batch.
    arrays: by name.
    figures: what was measured.
  """

  place: int
  arrays: Arrays
  figures: dict[str, float]


@dataclass
class RolloutSource:
  """The data of policy optimization.

  Attributes:
    config: the run.
    tokenizer: of the run.
    tasks: to train on.
    rewards: of answers.
    multi_turn: conversations with an environment; None asks for one answer.
    sampler_devices: those that generate; None are the trainer's.
    at_start: called once the engine can answer, before the first rollouts of a new run.
  """

  config: MaxTextConfig
  tokenizer: TextTokenizer
  tasks: Sequence[Task]
  rewards: Rewards
  multi_turn: MultiTurn | None = None
  sampler_devices: Sequence[jax.Device] | None = None
  at_start: Callable[[], None] = lambda: None
  policy: Policy = field(default_factory=lambda: Policy({}, -1))
  _loaded: Policy = field(default_factory=lambda: Policy({}, -1))
  _figures: dict[int, dict[str, float]] = field(default_factory=dict)  # by the step that they belong to
  _file: GrowingFile | None = None
  _thread: ThreadPoolExecutor | None = None
  _answerer: Answerer | None = None

  def start(self, program: Program, folder: Path) -> None:
    """Begins a run: nothing is compiled yet. What is written goes into `folder`."""
    c = self.config
    engine = rollout_engine(c, program, self.tokenizer, self.sampler_devices)
    images = media_options(c) is not None
    prompts = PromptEncoder.of(c, self.tokenizer, c.max_prefill_predict_length + 1) if images else None
    self._answerer, self._folder = Answerer(c, engine, self.rewards, self.multi_turn, prompts), folder
    if c.use_agentic_rollout:
      self._thread = ThreadPoolExecutor(1, "rollouts")
    if c.num_iterations > 1:
      temperature, tiles = rollout_sampling(c, self.tokenizer).temperature, c.num_vocab_tiling
      self._old = program.forward(
        lambda decoder, batch: token_log_probs(decoder, batch, temperature, tiles, replay=True)[0].tempered
      )

  @property
  def answerer(self) -> Answerer:
    """What asks the policy, once the run has started."""
    assert self._answerer is not None, "the run has not started"
    return self._answerer

  def follow(self, state: TrainState) -> None:
    """The policy is this state, whose arrays are used until the next step takes them over."""
    version = int(state.step) if self.policy.version < 0 else self.policy.version + 1  # without waiting for the step
    self.policy = Policy(state.params | state.buffers, version)

  def batches(
    self, batch: Any, state: IteratorState | None, split: Literal["train", "eval"]
  ) -> Iterator[BatchWithState]:
    """See `BatchSource`. A batch of rollouts is used `num_iterations` times."""
    assert split == "train", "the policy is evaluated by what it answers"
    number, iteration, ahead = _restored(state, self._about)
    if not self.policy.version:
      self.at_start()
    while True:
      for later in range(number, number + self.config.off_policy_steps + 1):
        if later not in ahead:
          ahead[later] = self._begin(later, ahead.get(later - 1))
      made = ahead[number].result()
      if self.config.num_iterations > 1 and not iteration:
        self._add_old(batch, number, made.arrays)
      while iteration < self.config.num_iterations:
        iteration += 1
        sent = self.answerer.engine.sync_metrics if iteration == 1 else {}
        self._figures[self.policy.version + 1] = made.figures | sent
        done = iteration == self.config.num_iterations
        kept = {n: rollouts for n, rollouts in ahead.items() if n > number - (not done)}
        after = partial(_state, self._about, number + done, 0 if done else iteration, made.place, kept)
        yield BatchWithState(place_batch(batch, as_batch(made.arrays), number), after)
      ahead = {n: rollouts for n, rollouts in ahead.items() if n > number} or {number: ahead[number]}
      number, iteration = number + 1, 0

  @cached_property
  def _about(self) -> dict[str, Any]:
    """What a position among the tasks depends on."""
    c = self.config
    keys = ("batch_size", "num_generations", "num_iterations", "data_shuffle_seed", "enable_data_shuffling")
    told = [(task.tokens, task.answer, *task.pictures) for task in self.tasks]
    tasks = hashlib.sha256(repr(told).encode()).hexdigest()
    return {key: getattr(c, key) for key in keys} | {"tasks": tasks}

  def figures_of(self, step: int) -> dict[str, float]:
    """What was measured of the rollouts of a step, once."""
    return self._figures.pop(step, {})

  def close(self, finished: bool = False) -> None:
    """Ends the thread, after the batch that it makes, and the processes of reward functions and environments; with
    `finished`, that of the sampler too."""
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)
    if self._answerer is not None:
      self._answerer.engine.close(finished)
    self.rewards.close()
    if self.multi_turn is not None:
      self.multi_turn.close()
    if self._file is not None:
      with suppress(OSError):
        self._file.close()

  def _begin(self, number: int, before: "Future[Rollouts] | None") -> "Future[Rollouts]":
    """Makes a batch with the current policy, or begins to. It goes on among the tasks where the one before ends."""
    if self._thread is None:
      show_phase(f"generating rollouts for update {self.policy.version + 1}")
      return _done(self._make(self.loaded_policy(), number, before))
    return self._thread.submit(self._make, self.loaded_policy(), number, before)

  def loaded_policy(self) -> Policy:
    """The policy, in arrays where the engine reads them: each version is loaded once."""
    if self._loaded.version != self.policy.version:
      params = self.answerer.engine.load(self.policy.params, self.policy.version)
      self._loaded = self.policy._replace(params=params)
    return self._loaded

  def _make(self, policy: Policy, number: int, before: "Future[Rollouts] | None") -> Rollouts:
    c, began = self.config, time.monotonic()
    groups, place = self._collect(policy, number, 0 if before is None else before.result().place)
    chosen = groups[: c.batch_size]
    advantages = policy_advantages(c, chosen)
    arrays, seconds = policy_arrays(c, chosen, advantages), time.monotonic() - began
    figures = self._measure(groups) | {
      "rollout_seconds": seconds,
      "rollout_tokens_per_second": float(sum(group.lengths.sum() for group in groups)) / seconds,
      "rollout_version": float(policy.version),
    }
    self._write(number, chosen[:_WRITTEN], advantages)
    return Rollouts(place, arrays, figures)

  def _collect(self, policy: Policy, number: int, place: int) -> tuple[list[AnswerGroup], int]:
    """Groups, those that train first, and the place of the next task. With `dynamic_sampling`, tasks are asked until
    there are enough groups from which something can be learnt."""
    c = self.config
    order = task_order(c, len(self.tasks))
    sampling = rollout_sampling(c, self.tokenizer)
    found: list[AnswerGroup] = []
    for tries in range(c.dynamic_sampling + 1):
      tasks = [self.tasks[order.document(place + i)] for i in range(c.batch_size)]
      seed = c.init_weights_seed, _TRAINING, number, tries
      found += self.answerer.ask(policy, tasks, c.num_generations, seed, sampling)
      place += c.batch_size
      useless = [bool(is_degenerate(group.rewards[None])[0]) for group in found]
      if len(found) - sum(useless) >= c.batch_size:
        break
    if c.dynamic_sampling:  # stable: the order of tasks, but for those that are replaced
      found = [group for _, group in sorted(zip(useless, found, strict=True), key=lambda pair: pair[0])]
    return found, place

  def _add_old(self, batch: Any, number: int, arrays: Arrays) -> None:
    """Adds the log-probabilities of the policy before the first of several updates."""
    placed = place_batch(batch, as_batch(arrays | {OLD: arrays[SAMPLED]}), number)
    arrays[OLD] = np.asarray(self._old(self.policy.params, placed))

  def _measure(self, groups: Sequence[AnswerGroup]) -> dict[str, float]:
    answers = [answer for group in groups for answer in group.answers]
    rewards = np.array([group.rewards for group in groups])
    parts = {_metric(name): np.mean([group.parts[name] for group in groups]) for name in groups[0].parts}
    turns = np.mean([answer.turns for answer in answers]), sum(answer.tool_errors for answer in answers)
    return {
      "reward": float(rewards.mean()),
      "reward_deviation": float(rewards.std()),
      **{name: float(mean) for name, mean in parts.items()},
      "degenerate_groups": float(is_degenerate(rewards).mean()),
      "groups": float(len(groups)),
      "answer_tokens": float(np.mean([group.lengths for group in groups])),
      "answers_cut": float(np.mean([answer.finish_reason == "length" for answer in answers])),
      "reward_failures": float(self.rewards.failures),
      **({} if self.multi_turn is None else {"turns": float(turns[0]), "tool_errors": float(turns[1])}),
    }

  def _write(self, number: int, groups: Sequence[AnswerGroup], advantages: np.ndarray) -> None:
    """Appends groups to the run's file. A run does not fail for it: what cannot be written is left out."""
    step = number * self.config.num_iterations + 1
    lines = [
      {"step": step, "prompt": group.task.prompt, "text": self._transcript(answer), "answer": group.task.answer,
       "reward": float(reward), "advantage": float(advantage), "end": answer.finish_reason}
      for group, own in zip(groups, advantages, strict=False)
      for answer, reward, advantage in zip(group.answers, group.rewards, own, strict=True)
    ]  # fmt: skip
    self._file = self._file or GrowingFile(self._folder / FILE, lambda path: truncate_after(path, step - 1))
    with suppress(OSError):
      self._file.append("".join(json.dumps(line) + "\n" for line in lines).encode())

  def _transcript(self, answer: Trajectory) -> str:
    return answer.text if answer.turns == 1 else self.tokenizer.decode(answer.token_ids)


def _restored(state: IteratorState | None, about: dict[str, Any]) -> "tuple[int, int, dict[int, Future[Rollouts]]]":
  """The number of the next batch, how often it was used, and the batches that are made, of which the one before the
  next may be without arrays: it says where the tasks go on."""
  if state is None:
    return 0, 0, {}
  check_same_data(np.asarray(state["about"]) if "number" in state else to_array({}), about)
  number, iteration, place = (int(state[name]) for name in ("number", "iteration", "place"))
  ahead = {number - 1: _done(Rollouts(place, {}, {}))}
  numbers = sorted({int(name.split("/")[1]) for name in state if name.startswith(f"{_KEPT}/")})
  for n in numbers:
    prefix = f"{_KEPT}/{n}/"
    arrays = {name.removeprefix(prefix): np.asarray(a) for name, a in state.items() if name.startswith(prefix)}
    figures = json.loads(arrays.pop("figures").tobytes())
    ahead[n] = _done(Rollouts(int(arrays.pop("place")), arrays, figures))
  return number, iteration, ahead


def _state(
  about: dict[str, Any], number: int, iteration: int, place: int, kept: "Mapping[int, Future[Rollouts]]"
) -> IteratorState:
  """The state after an update: waits for batches that are being made."""
  counts = {"number": number, "iteration": iteration, "place": place}
  state: IteratorState = {name: np.array(value, np.int64) for name, value in counts.items()}
  state["about"] = to_array(about)
  for n, future in kept.items():
    made = future.result()
    state |= {f"{_KEPT}/{n}/{name}": a for name, a in made.arrays.items()}
    state[f"{_KEPT}/{n}/place"] = np.array(made.place, np.int64)
    state[f"{_KEPT}/{n}/figures"] = to_array(made.figures)
  return state


def _done(made: Rollouts) -> "Future[Rollouts]":
  future: Future[Rollouts] = Future()
  future.set_result(made)
  return future


def _metric(function: str) -> str:
  return "reward_" + "".join(letter if letter.isalnum() else "_" for letter in function)
