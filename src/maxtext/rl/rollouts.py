"""Rollouts: groups of answers that the current policy writes, rewarded, as batches of the train step.

Everything is a function of the policy, of the tasks and of (seed, batch, group, answer), so a resumed run goes on with
the same answers. Tokens are never decoded and encoded again: those that the engine wrote are those that train.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.iterable import place_batch
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.inference_model import default_stop_token_ids
from maxtext.inference.llm import RequestOutput
from maxtext.inference.sampling import SamplingParams
from maxtext.models.model import Params
from maxtext.observe.growing_file import GrowingFile
from maxtext.observe.metric_lines import truncate_after
from maxtext.rl.advantages import ADVANTAGES as ADVANTAGE_FUNCTIONS
from maxtext.rl.advantages import SHARES as SHARE_FUNCTIONS
from maxtext.rl.advantages import is_degenerate, overlong_penalties
from maxtext.rl.rewards import Rewards
from maxtext.rl.tasks import Task, TaskOrder
from maxtext.status_line import show_phase
from maxtext.training.live_engine import LiveEngine, engine_problem
from maxtext.training.objectives.policy import ADVANTAGES, OLD, SAMPLED, SHARES, token_log_probs
from maxtext.training.program import Program
from maxtext.training.state import TrainState

FILE = "rollouts.jsonl"
_WRITTEN = 2  # groups of a batch that are written to the run's folder
_Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class AnswerGroup:
  """The answers to one task, with their rewards by function and in all."""

  task: Task
  answers: Sequence[RequestOutput]
  parts: Mapping[str, np.ndarray]
  rewards: np.ndarray

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each answer."""
    return np.array([len(answer.token_ids) for answer in self.answers])


@dataclass
class RolloutSource:
  """The data of policy optimization.

  Attributes:
    config: the run.
    tokenizer: of the run.
    tasks: to train on.
    rewards: of answers.
    at_start: called once the engine can answer, before the first rollouts of a new run.
  """

  config: MaxTextConfig
  tokenizer: TextTokenizer
  tasks: Sequence[Task]
  rewards: Rewards
  at_start: Callable[[], None] = lambda: None
  _figures: dict[int, dict[str, float]] = field(default_factory=dict)  # by the step that they belong to
  _file: GrowingFile | None = None
  _params: Params = field(default_factory=dict)
  _version: int = 0

  def start(self, program: Program, folder: Path) -> None:
    """Begins a run: nothing is compiled yet. What is written goes into `folder`."""
    if problem := engine_problem(program):
      raise ConfigError(f"use_grpo=true: rollouts cannot be generated here: {problem}")
    c = self.config
    self._folder, self._file = folder, None
    slots = (c.batch_size if c.rollout_micro_batch_size == -1 else c.rollout_micro_batch_size) * c.num_generations
    self.engine = LiveEngine(
      program, self.tokenizer, self.sampling_params, slots, c.max_target_length, c.max_prefill_predict_length, True
    )
    if c.num_iterations > 1:
      temperature, tiles = self.sampling_params.temperature, c.num_vocab_tiling
      self._old = program.forward(
        lambda decoder, batch: token_log_probs(decoder, batch, temperature, tiles)[0].tempered
      )

  def follow(self, state: TrainState) -> None:
    """The next rollouts are of this state, whose arrays are used until the next step takes them over."""
    self._params, self._version = state.params | state.buffers, int(state.step)

  @property
  def sampling_params(self) -> SamplingParams:
    """How answers are sampled, but for their seeds."""
    stop_token_ids = default_stop_token_ids(self.tokenizer)
    sampling = SamplingParams.of(self.config)
    return replace(sampling, stop_token_ids=stop_token_ids, stop=tuple(self.config.stop_strings or ()), logprobs=0)

  def batches(
    self, batch: Any, state: IteratorState | None, split: Literal["train", "eval"]
  ) -> Iterator[BatchWithState]:
    """See `BatchSource`. A batch of rollouts is used `num_iterations` times; in between it is part of the state."""
    assert split == "train", "the policy is evaluated by what it answers"
    number, place, iteration = (int(state[name]) if state else 0 for name in ("number", "place", "iteration"))
    kept = {name: np.asarray(a) for name, a in (state or {}).items() if name.startswith(_KEPT)}
    arrays = {name.removeprefix(_KEPT): a for name, a in kept.items()}
    figures: dict[str, float] = {}
    if not self._version:
      self.at_start()
    while True:
      if not iteration:
        arrays, figures, place = self._make(batch, number, place)
      while iteration < self.config.num_iterations:
        iteration += 1
        done = iteration == self.config.num_iterations
        after = (number + 1, place, 0) if done else (number, place, iteration)
        self._figures[self._version + 1] = figures
        yield BatchWithState(place_batch(batch, _as_batch(arrays), number), partial(self._state, *after, arrays))
      number, iteration = number + 1, 0

  def _state(self, number: int, place: int, iteration: int, arrays: _Arrays) -> IteratorState:
    counts = {"number": number, "place": place, "iteration": iteration}
    kept = {f"{_KEPT}{name}": a for name, a in arrays.items()} if self.config.num_iterations > 1 else {}
    return {**{name: np.array(value, np.int64) for name, value in counts.items()}, **kept}

  def figures_of(self, step: int) -> dict[str, float]:
    """What was measured of the rollouts of a step, once; nothing where they were made before a restart."""
    return self._figures.pop(step, {})

  def _make(self, batch: Any, number: int, place: int) -> tuple[_Arrays, dict[str, float], int]:
    """The arrays of a batch, what was measured of it, and the place of the next task."""
    c, began = self.config, time.monotonic()
    show_phase(f"generating rollouts for update {self._version + 1}")
    groups, place = self._collect(number, place)
    chosen = [group for group, is_one in groups if is_one]
    generated = [length for group, _ in groups for length in group.lengths]
    rewards = np.array([group.rewards for group in chosen])
    counts = ~is_degenerate(rewards) if c.degenerate_group_masking else np.ones(len(chosen), bool)
    advantages = ADVANTAGE_FUNCTIONS[c.rl_advantage](rewards)
    lengths = np.array([group.lengths for group in chosen])
    shares = np.zeros(lengths.shape)
    if counts.any():
      longest = c.max_target_length - min(len(group.task.tokens) for group in chosen)
      shares[counts] = SHARE_FUNCTIONS[c.rl_aggregation](lengths[counts].ravel(), longest).reshape(-1, lengths.shape[1])
    arrays = _arrays(chosen, advantages, shares * shares.size, c.max_target_length)
    if c.num_iterations > 1:
      placed = place_batch(batch, _as_batch(arrays | {OLD: arrays[SAMPLED]}), number)
      arrays[OLD] = np.asarray(self._old(self._params, placed))
    seconds = time.monotonic() - began
    figures = self._measure([group for group, _ in groups])
    figures |= {"rollout_seconds": seconds, "rollout_tokens_per_second": sum(generated) / seconds}
    self._write(chosen[:_WRITTEN], advantages)
    return arrays, figures, place

  def _collect(self, number: int, place: int) -> tuple[list[tuple[AnswerGroup, bool]], int]:
    """Groups with whether they train, as many as `batch_size`, and the place of the next task. Groups from which
    nothing can be learnt are replaced as far as `dynamic_sampling` goes."""
    c = self.config
    order = TaskOrder(len(self.tasks), c.data_shuffle_seed, c.enable_data_shuffling)
    found: list[AnswerGroup] = []
    useful: list[AnswerGroup] = []
    for tries in range(c.dynamic_sampling + 1):
      tasks = [self.tasks[order(place + i)] for i in range(c.batch_size)]
      new = self.answer(tasks, c.num_generations, (c.init_weights_seed, number, tries), self.sampling_params)
      found, place = found + new, place + c.batch_size
      useful = [group for group in found if not is_degenerate(group.rewards[None])[0]]
      if len(useful) >= c.batch_size:
        break
    rest = [group for group in found if all(group is not other for other in useful)]
    chosen = [*useful, *rest][: c.batch_size] if c.dynamic_sampling else found
    return [(group, any(group is other for other in chosen)) for group in found], place

  def answer(
    self, tasks: Sequence[Task], count: int, seed: tuple[int, ...], sampling_params: SamplingParams
  ) -> list[AnswerGroup]:
    """`count` answers of the current policy to each task, with their rewards."""
    asked = [task for task in tasks for _ in range(count)]
    seeds = np.random.SeedSequence(seed).generate_state(len(asked)) >> 1
    params = [replace(sampling_params, seed=int(seed)) for seed in seeds]
    outputs = self.engine.generate(self._params, self._version, [task.tokens for task in asked], params)
    texts = [output.text for output in outputs]
    parts = self.rewards([task.prompt for task in asked], texts, [task.answer for task in asked])
    c, lengths = self.config, np.array([len(output.token_ids) for output in outputs])
    longest = np.array([c.max_target_length - len(task.tokens) for task in asked])
    total = self.rewards.total(parts) - overlong_penalties(lengths, longest, c.overlong_buffer, c.overlong_penalty)
    places = [slice(i * count, (i + 1) * count) for i in range(len(tasks))]
    return [
      AnswerGroup(task, outputs[own], {name: part[own] for name, part in parts.items()}, total[own])
      for task, own in zip(tasks, places, strict=True)
    ]

  def _measure(self, groups: Sequence[AnswerGroup]) -> dict[str, float]:
    answers = [answer for group in groups for answer in group.answers]
    every = np.array([group.rewards for group in groups])
    return {
      "reward": float(every.mean()),
      "reward_deviation": float(every.std()),
      **{
        f"reward_{''.join(c if c.isalnum() else '_' for c in name)}": float(
          np.mean([group.parts[name] for group in groups])
        )
        for name in self.rewards.functions
      },
      "degenerate_groups": float(is_degenerate(every).mean()),
      "groups": float(len(groups)),
      "answer_tokens": float(np.mean([len(answer.token_ids) for answer in answers])),
      "answers_cut": float(np.mean([answer.finish_reason == "length" for answer in answers])),
    }

  def _write(self, groups: Sequence[AnswerGroup], advantages: np.ndarray) -> None:
    """Appends groups to the run's file. A run does not fail for it: what cannot be written is left out."""
    step = self._version + 1
    lines = [
      {"step": step, "prompt": group.task.prompt, "text": answer.text, "answer": group.task.answer,
       "reward": float(reward), "advantage": float(advantage), "end": answer.finish_reason}
      for group, own in zip(groups, advantages, strict=False)
      for answer, reward, advantage in zip(group.answers, group.rewards, own, strict=True)
    ]  # fmt: skip
    self._file = self._file or GrowingFile(self._folder / FILE, lambda path: truncate_after(path, step - 1))
    with suppress(OSError):
      self._file.append("".join(json.dumps(line) + "\n" for line in lines).encode())


_KEPT = "rollouts_"
_TOKENS = ("inputs", "targets", "positions", "segments", "weights")


def _arrays(groups: Sequence[AnswerGroup], advantages: np.ndarray, shares: np.ndarray, length: int) -> _Arrays:
  """One answer a row, after its prompt, padded to the length."""
  rows = shares.size
  arrays: _Arrays = {name: np.zeros((rows, length), np.int32) for name in _TOKENS}
  arrays |= {name: np.zeros((rows, length), np.float32) for name in ("weights", ADVANTAGES, SHARES, SAMPLED)}
  answers = ((group.task, answer) for group in groups for answer in group.answers)
  for row, ((task, answer), advantage, share) in enumerate(zip(answers, advantages.flat, shares.flat, strict=True)):
    tokens = np.array([*task.tokens, *answer.token_ids], np.int32)
    used, own = len(tokens) - 1, slice(len(task.tokens) - 1, len(tokens) - 1)
    arrays["inputs"][row, :used], arrays["targets"][row, :used] = tokens[:-1], tokens[1:]
    arrays["positions"][row, :used], arrays["segments"][row, :used] = np.arange(used), 1
    arrays["weights"][row, own], arrays[ADVANTAGES][row, own], arrays[SHARES][row, own] = 1.0, advantage, share
    arrays[SAMPLED][row, own] = answer.logprobs
  return arrays


def _as_batch(arrays: _Arrays) -> Batch:
  tokens = {name: arrays[name] for name in _TOKENS}
  return Batch(**tokens, extra={name: a for name, a in arrays.items() if name not in tokens})
