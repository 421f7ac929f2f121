"""Answers of a policy to tasks, with their rewards.

Tokens are never decoded and encoded again: those that the engine wrote are those that train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.inference_model import default_stop_token_ids
from maxtext.inference.multimodal import PromptEncoder, PromptMedia
from maxtext.inference.sampling import SamplingParams
from maxtext.models.model import Params
from maxtext.rl.advantages import overlong_penalties
from maxtext.rl.engines import RolloutEngine
from maxtext.rl.multi_turn import MultiTurn
from maxtext.rl.rewards import Rewards
from maxtext.rl.tasks import Task
from maxtext.rl.trajectory import Trajectory


class Policy(NamedTuple):
  """Parameters and buffers, and their version: finished updates."""

  params: Params
  version: int


@dataclass(frozen=True)
class AnswerGroup:
  """The answers to one task, with their rewards by function and in all."""

  task: Task
  answers: Sequence[Trajectory]
  parts: Mapping[str, np.ndarray]
  rewards: np.ndarray

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each answer that the policy wrote."""
    return np.array([sum(answer.is_generated) for answer in self.answers])


def rollout_sampling(config: MaxTextConfig, tokenizer: TextTokenizer) -> SamplingParams:
  """How rollouts are sampled, but for their seeds."""
  stops, stop_token_ids = tuple(config.stop_strings or ()), default_stop_token_ids(tokenizer)
  return replace(SamplingParams.of(config), stop_token_ids=stop_token_ids, stop=stops, logprobs=0)


class Answerer:
  """Asks policies, and rewards what they answer. Nothing is compiled before the first question.

  With `multi_turn`, a policy has conversations with an environment in place of one answer. `prompts` reads the images
  of tasks, which are opened when they are asked.
  """

  def __init__(
    self,
    config: MaxTextConfig,
    engine: RolloutEngine,
    rewards: Rewards,
    multi_turn: MultiTurn | None = None,
    prompts: PromptEncoder | None = None,
  ) -> None:
    self._config, self._rewards, self._multi_turn, self.engine = config, rewards, multi_turn, engine
    self._prompts = prompts

  def ask(
    self,
    policy: Policy,
    tasks: Sequence[Task],
    own: range,
    count: int,
    seed: tuple[int, ...],
    sampling_params: SamplingParams,
  ) -> list[AnswerGroup]:
    """`count` answers to each of the tasks with these numbers; which ones is a function of the policy, all the tasks
    and the seed."""
    seeds = np.random.SeedSequence(seed).generate_state(len(tasks) * count) >> 1
    seeds, tasks = seeds[own.start * count : own.stop * count], tasks[own.start : own.stop]
    if not tasks:
      return []
    asked = [task for task in tasks for _ in range(count)]
    each = [replace(sampling_params, seed=int(seed)) for seed in seeds]
    generate = partial(self.engine.generate, policy.params, policy.version)
    if self._multi_turn is None:
      media = [medium for task in tasks for medium in [self._media(task)] * count]
      outputs = generate([task.tokens for task in asked], each, media)
      answers = [Trajectory.of(output, own) for output, own in zip(outputs, media, strict=True)]
    else:
      answers = self._multi_turn(generate, asked, each)
    texts = [answer.text for answer in answers]
    parts = self._rewards([task.prompt for task in asked], texts, [task.answer for task in asked])
    by_environment = np.array([answer.reward for answer in answers])
    if self._multi_turn is not None:
      parts["environment"] = by_environment
    c, lengths = self._config, np.array([len(answer.token_ids) for answer in answers])
    longest = np.array([c.max_target_length - len(answer.prompt_token_ids) for answer in answers])
    penalties = overlong_penalties(lengths, longest, c.overlong_buffer, c.overlong_penalty)
    total = self._rewards.total(parts) + by_environment - penalties
    places = [slice(i * count, (i + 1) * count) for i in range(len(tasks))]
    return [
      AnswerGroup(task, answers[own], {name: part[own] for name, part in parts.items()}, total[own])
      for task, own in zip(tasks, places, strict=True)
    ]

  def _media(self, task: Task) -> PromptMedia | None:
    if task.messages is None:
      return None
    assert self._prompts is not None, "a task has images, and the model takes none"
    tokens, media = self._prompts.chat(task.messages, {})
    assert tuple(tokens) == task.tokens, "an image has another size than when the tasks were read"
    return media
