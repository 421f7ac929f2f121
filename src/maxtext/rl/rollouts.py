"""Rollouts as a source of batches: which policy answers which tasks for which update, whatever runs when.

The batch of update n is written by the policy after n - 1 - `off_policy_steps` updates, or by the first one. Answers
are a function of that policy, the tasks and (seed, batch), and batches that are made ahead are part of a checkpoint,
so a resumed run has the same answers. `use_agentic_rollout` makes batches in a thread while the trainer goes on, with a
copy of the policy; that changes no bit.

Each process of a run asks its share of the tasks. All of them know the outcomes of all answers, and decide alike; then
the thread that trains brings the rows together. So a batch is the same whatever the number of processes.
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
from maxtext.distributed.exchange import Exchange
from maxtext.inference.multimodal import PromptEncoder
from maxtext.observe.growing_file import GrowingFile
from maxtext.observe.metric_lines import truncate_after
from maxtext.rl.answers import Answerer, AnswerGroup, Policy, rollout_sampling
from maxtext.rl.multi_turn import MultiTurn
from maxtext.rl.outcomes import Outcomes, from_bytes, owners_of, share_of, to_bytes
from maxtext.rl.policy_batch import (
  Arrays,
  as_batch,
  gather_rows,
  policy_advantages,
  policy_arrays,
  policy_shares,
)
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
    owners: the process that has each group, where the arrays are the rows of this one alone; None if they are whole.
  """

  place: int
  arrays: Arrays
  figures: dict[str, float]
  owners: np.ndarray | None = None


class PendingRollouts:
  """A batch that is being made, maybe by a thread."""

  def __init__(self, own: Future[Rollouts], answers: int) -> None:
    self._own, self._answers = own, answers

  @staticmethod
  def of(made: Rollouts, answers: int) -> "PendingRollouts":
    """One that is made."""
    return PendingRollouts(_done(made), answers)

  @property
  def place(self) -> int:
    """That of the batch, once it is made."""
    return self._own.result().place

  def whole(self) -> Rollouts:
    """The batch, once it is made, with the rows of all processes. For the thread that trains: all processes call it in
    the same order."""
    made = self._own.result()
    if made.owners is not None:
      made = made._replace(arrays=gather_rows(made.arrays, made.owners, self._answers), owners=None)
      self._own = _done(made)
    return made


class _Answered(NamedTuple):
  """What came of tasks that were asked.

  Attributes:
    groups: of this process's share.
    outcomes: of all.
    seconds: that the slowest process took.
  """

  groups: list[AnswerGroup]
  outcomes: Outcomes
  seconds: float


class _Collected(NamedTuple):
  """Tasks that were asked for a batch.

  Attributes:
    groups: those of this process, by number.
    outcomes: of all, by number.
    order: the numbers, those that train first.
    owners: the process of each number.
    place: of the next task.
    seconds: that the answers took.
  """

  groups: dict[int, AnswerGroup]
  outcomes: Outcomes
  order: np.ndarray
  owners: np.ndarray
  place: int
  seconds: float


@dataclass
class RolloutSource:
  """The data of policy optimization.

  Attributes:
    config: the run.
    tokenizer: of the run.
    tasks: to train on.
    rewards: of answers.
    exchange: what processes tell each other of their answers.
    multi_turn: conversations with an environment; None asks for one answer.
    sampler_devices: those that generate; None are the trainer's.
    at_start: called once the engine can answer, before the first rollouts of a new run.
  """

  config: MaxTextConfig
  tokenizer: TextTokenizer
  tasks: Sequence[Task]
  rewards: Rewards
  exchange: Exchange
  multi_turn: MultiTurn | None = None
  sampler_devices: Sequence[jax.Device] | None = None
  at_start: Callable[[], None] = lambda: None
  policy: Policy = field(default_factory=lambda: Policy({}, -1))
  _loaded: Policy = field(default_factory=lambda: Policy({}, -1))
  _failures: int = 0  # of reward functions, on all processes
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
    number, iteration, ahead = _restored(state, self.about, self.config.num_generations)
    if not self.policy.version:
      self.at_start()
    while True:
      for later in range(number, number + self.config.off_policy_steps + 1):
        if later not in ahead:
          ahead[later] = self._begin(later, ahead.get(later - 1))
      made = ahead[number].whole()
      self.let_go()
      if self.config.num_iterations > 1 and not iteration:
        self._add_old(batch, number, made.arrays)
      while iteration < self.config.num_iterations:
        iteration += 1
        sent = self.answerer.engine.sync_metrics if iteration == 1 else {}
        self._figures[self.policy.version + 1] = made.figures | sent
        done = iteration == self.config.num_iterations
        kept = {n: rollouts for n, rollouts in ahead.items() if n > number - (not done)}
        after = partial(_state, self.about, number + done, 0 if done else iteration, made.place, kept)
        yield BatchWithState(place_batch(batch, as_batch(made.arrays), number), after)
      ahead = {n: rollouts for n, rollouts in ahead.items() if n > number} or {number: ahead[number]}
      number, iteration = number + 1, 0

  @cached_property
  def about(self) -> dict[str, Any]:
    """What a position among the tasks depends on."""
    c = self.config
    keys = ("batch_size", "num_generations", "num_iterations", "data_shuffle_seed", "enable_data_shuffling")
    return {key: getattr(c, key) for key in keys} | {"tasks": fingerprint(self.tasks)}

  def figures_of(self, step: int) -> dict[str, float]:
    """What was measured of the rollouts of a step, once."""
    return self._figures.pop(step, {})

  def close(self, finished: bool = False, problem: str = "") -> None:
    """Ends the thread, after the batch that it makes, and the processes of reward functions and environments; with
    `finished`, that of the sampler too. Processes that wait for this one's answers are told of the problem."""
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)
    self.exchange.end(problem or "its run is over")
    if self._answerer is not None:
      self._answerer.engine.close(finished)
    self.rewards.close()
    if self.multi_turn is not None:
      self.multi_turn.close()
    if self._file is not None:
      with suppress(OSError):
        self._file.close()

  def _begin(self, number: int, before: PendingRollouts | None) -> PendingRollouts:
    """Makes a batch with the current policy, or begins to. It goes on among the tasks where the one before ends."""
    if self._thread is None:
      show_phase(f"generating rollouts for update {self.policy.version + 1}")
      return PendingRollouts.of(self._make(self.loaded_policy(), number, before), self.config.num_generations)
    own = self._thread.submit(self._make, self.loaded_policy(), number, before)
    return PendingRollouts(own, self.config.num_generations)

  def loaded_policy(self) -> Policy:
    """The policy, in arrays where the engine reads them. All processes call it in the same order."""
    if self._loaded.version != self.policy.version:
      self.let_go()
      params = self.answerer.engine.load(self.policy.params, self.policy.version)
      self._loaded = self.policy._replace(params=params)
    return self._loaded

  def let_go(self) -> None:
    """Frees the parameters of the engine if training needs their memory. A thread that generates has its own."""
    if self.answerer.engine.crowds_training:
      self._loaded = Policy({}, -1)

  def _make(self, policy: Policy, number: int, before: PendingRollouts | None) -> Rollouts:
    """A batch, with the rows of this process."""
    c = self.config
    found = self._collect(policy, number, 0 if before is None else before.place)
    chosen = found.order[: c.batch_size]
    outcomes, owners = found.outcomes.take(chosen), found.owners[chosen]
    advantages, shares = policy_advantages(c, outcomes), policy_shares(c, outcomes)
    own = {i: found.groups[n] for i, n in enumerate(chosen.tolist()) if n in found.groups}
    rows = list(own)
    arrays = policy_arrays(c, list(own.values()), advantages[rows], shares[rows])
    figures = self._measure(found.outcomes.take(found.order)) | {
      "rollout_seconds": found.seconds,
      "rollout_tokens_per_second": float(found.outcomes.lengths.sum()) / found.seconds,
      "rollout_version": float(policy.version),
    }
    self._write(number, {i: (own[i], advantages[i]) for i in rows if i < _WRITTEN})
    return Rollouts(found.place, arrays, figures, owners)

  def _collect(self, policy: Policy, number: int, place: int) -> _Collected:
    """With `dynamic_sampling`, tasks are asked until there are enough groups from which something can be learnt."""
    c = self.config
    tasks = task_order(c, len(self.tasks))
    groups: dict[int, AnswerGroup] = {}
    outcomes: list[Outcomes] = []
    seconds = 0.0
    for tries in range(c.dynamic_sampling + 1):
      asked = [self.tasks[tasks.document(place + i)] for i in range(c.batch_size)]
      answered = self._ask(policy, asked, (c.init_weights_seed, _TRAINING, number, tries))
      groups |= {tries * c.batch_size + i: g for i, g in zip(share_of(len(asked)), answered.groups, strict=True)}
      outcomes, seconds, place = [*outcomes, answered.outcomes], seconds + answered.seconds, place + c.batch_size
      whole = Outcomes.join(outcomes)
      if (~whole.is_degenerate).sum() >= c.batch_size:
        break
    # Stable: the order of tasks, but for those that are replaced.
    order = np.argsort(whole.is_degenerate if c.dynamic_sampling else np.zeros(len(whole.rewards)), kind="stable")
    return _Collected(groups, whole, order, np.tile(owners_of(c.batch_size), len(outcomes)), place, seconds)

  def _ask(self, policy: Policy, tasks: Sequence[Task], seed: tuple[int, ...]) -> _Answered:
    """Answers to the tasks, on all processes together."""
    c, began = self.config, time.monotonic()
    sampling, groups = rollout_sampling(c, self.tokenizer), list[AnswerGroup]()

    def own() -> bytes:
      groups.extend(self.answerer.ask(policy, tasks, share_of(len(tasks)), c.num_generations, seed, sampling))
      counts = {"failures": np.array(self.rewards.failures), "seconds": np.array(time.monotonic() - began)}
      return to_bytes(counts | (Outcomes.of(groups).arrays if groups else {}))

    told = [from_bytes(data) for data in self.exchange(own)]
    self._failures = sum(int(one.pop("failures")) for one in told)
    seconds = max(float(one.pop("seconds")) for one in told)
    return _Answered(groups, Outcomes.join([Outcomes.from_arrays(one) for one in told if one]), seconds)

  def _add_old(self, batch: Any, number: int, arrays: Arrays) -> None:
    """Adds the log-probabilities of the policy before the first of several updates."""
    placed = place_batch(batch, as_batch(arrays | {OLD: arrays[SAMPLED]}), number)
    arrays[OLD] = np.asarray(self._old(self.policy.params, placed))

  def _measure(self, outcomes: Outcomes) -> dict[str, float]:
    turns = {"turns": float(outcomes.turns.mean()), "tool_errors": float(outcomes.tool_errors.sum())}
    return {
      "reward": float(outcomes.rewards.mean()),
      "reward_deviation": float(outcomes.rewards.std()),
      **{_metric(name): float(part.mean()) for name, part in outcomes.parts.items()},
      "degenerate_groups": float(outcomes.is_degenerate.mean()),
      "groups": float(len(outcomes.rewards)),
      "answer_tokens": float(outcomes.lengths.mean()),
      "answers_cut": float(outcomes.is_cut.mean()),
      "reward_failures": float(self._failures),
      **({} if self.multi_turn is None else turns),
    }

  def _write(self, number: int, groups: Mapping[int, tuple[AnswerGroup, np.ndarray]]) -> None:
    """Process 0 appends groups of all processes to the run's file, by their places in the batch, with their advantages.
    A run does not fail for it: what cannot be written is left out."""
    step = number * self.config.num_iterations + 1
    own = {place: self._lines(step, *group) for place, group in groups.items()}
    told = [json.loads(data) for data in self.exchange(lambda: json.dumps(own).encode())]
    if jax.process_index():
      return
    by_place = sorted((int(place), lines) for one in told for place, lines in one.items())
    self._file = self._file or GrowingFile(self._folder / FILE, lambda path: truncate_after(path, step - 1))
    with suppress(OSError):
      self._file.append("".join(json.dumps(line) + "\n" for _, lines in by_place for line in lines).encode())

  def _lines(self, step: int, group: AnswerGroup, advantages: np.ndarray) -> list[dict[str, Any]]:
    return [
      {"step": step, "prompt": group.task.prompt, "text": self._transcript(answer), "answer": group.task.answer,
       "reward": float(reward), "advantage": float(advantage), "end": answer.finish_reason}
      for answer, reward, advantage in zip(group.answers, group.rewards, advantages, strict=True)
    ]  # fmt: skip

  def _transcript(self, answer: Trajectory) -> str:
    return answer.text if answer.turns == 1 else self.tokenizer.decode(answer.token_ids)


def fingerprint(tasks: Sequence[Task]) -> str:
  """A hash of tasks and their order."""
  told = [(task.tokens, task.answer, *task.pictures) for task in tasks]
  return hashlib.sha256(repr(told).encode()).hexdigest()


def _restored(
  state: IteratorState | None, about: dict[str, Any], answers: int
) -> tuple[int, int, dict[int, PendingRollouts]]:
  """The number of the next batch, how often it was used, and the batches that are made, of which the one before the
  next may be without arrays: it says where the tasks go on."""
  if state is None:
    return 0, 0, {}
  check_same_data(np.asarray(state["about"]) if "number" in state else to_array({}), about)
  number, iteration, place = (int(state[name]) for name in ("number", "iteration", "place"))
  ahead = {number - 1: PendingRollouts.of(Rollouts(place, {}, {}), answers)}
  numbers = sorted({int(name.split("/")[1]) for name in state if name.startswith(f"{_KEPT}/")})
  for n in numbers:
    prefix = f"{_KEPT}/{n}/"
    arrays = {name.removeprefix(prefix): np.asarray(a) for name, a in state.items() if name.startswith(prefix)}
    figures = json.loads(arrays.pop("figures").tobytes())
    ahead[n] = PendingRollouts.of(Rollouts(int(arrays.pop("place")), arrays, figures), answers)
  return number, iteration, ahead


def _state(
  about: dict[str, Any], number: int, iteration: int, place: int, kept: Mapping[int, PendingRollouts]
) -> IteratorState:
  """The state after an update: waits for batches that are being made."""
  counts = {"number": number, "iteration": iteration, "place": place}
  state: IteratorState = {name: np.array(value, np.int64) for name, value in counts.items()}
  state["about"] = to_array(about)
  for n, pending in kept.items():
    made = pending.whole()
    state |= {f"{_KEPT}/{n}/{name}": a for name, a in made.arrays.items()}
    state[f"{_KEPT}/{n}/place"] = np.array(made.place, np.int64)
    state[f"{_KEPT}/{n}/figures"] = to_array(made.figures)
  return state


def _done(made: Rollouts) -> Future[Rollouts]:
  future: Future[Rollouts] = Future()
  future.set_result(made)
  return future


def _metric(function: str) -> str:
  return "reward_" + "".join(letter if letter.isalnum() else "_" for letter in function)
