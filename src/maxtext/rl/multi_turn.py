"""Conversations of a policy with environments, many at once.

What the policy wrote is never decoded and encoded again: an observation is encoded once, and its tokens follow those
that were generated. A draw is a function of the conversation's seed and the position, so a conversation is a function
of the policy, the task, the seed and its environment, whichever others run beside it.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.conversations import ChatContinuation
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.llm import RequestOutput
from maxtext.inference.sampling import SamplingParams
from maxtext.rl.environment import EnvironmentTask, Observation
from maxtext.rl.environment_process import EnvironmentProcess, EnvironmentServer
from maxtext.rl.tasks import Task, prompt_tokens
from maxtext.rl.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
_CONCURRENCY = 32  # environments that work at once
_MOST_CHARACTERS = 64  # of an observation for each token of the longest conversation; more is not encoded

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[RequestOutput]]


class MultiTurn:
  """Conversations of at most `max_turns` answers and `max_target_length` tokens.

  Raises:
    ConfigError: there is no such environment, or the chat template cannot continue a conversation.
  """

  def __init__(self, config: MaxTextConfig, tokenizer: TextTokenizer) -> None:
    c = config
    self._config, self._tokenizer = config, tokenizer
    self._chat = ChatContinuation(tokenizer, c.environment_role, c.system_prompt) if c.use_chat_template else None
    self._longest = _MOST_CHARACTERS * c.max_target_length
    self._server = EnvironmentServer(c.rl_environment, c.environment_timeout, self._longest)

  def __call__(self, generate: Generate, tasks: Sequence[Task], params: Sequence[SamplingParams]) -> list[Trajectory]:
    """A conversation for each task, sampled by its parameters."""
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
      found = list(pool.map(lambda task: _Conversation(task, self._server.open()), tasks))
      try:
        list(pool.map(self._reset, found))
        while running := [(one, own) for one, own in zip(found, params, strict=True) if not one.finish_reason]:
          outputs = generate([one.all_token_ids for one, _ in running], [own for _, own in running])
          list(pool.map(self._step, [one for one, _ in running], outputs))
      finally:
        for one in found:
          one.environment.close()
    problems = [problem for one in found for problem in one.problems]
    if problems:
      _LOG.warning(f"maxtext: rl_environment={self._config.rl_environment} failed {len(problems)} times: {problems[0]}")
    return [one.trajectory() for one in found]

  def close(self) -> None:
    """Ends all environments."""
    self._server.close()

  def _reset(self, one: "_Conversation") -> None:
    """A conversation without a prompt is over: nothing of it trains."""
    prompt, problem, _ = one.environment.reset(EnvironmentTask(one.task.prompt, one.task.answer))
    try:
      one.prompt = one.task.tokens if prompt is None else prompt_tokens(self._config, self._tokenizer, prompt)
    except (ConfigError, TypeError, ValueError) as error:
      problem = str(error)
    if problem:
      one.problems.append(f"reset: {problem}")
      one.finish_reason = "environment"

  def _step(self, one: "_Conversation", output: RequestOutput) -> None:
    one.add_answer(output)
    value, problem, is_lost = one.environment.step(output.text)
    if problem:
      one.problems.append(problem)
    observation = Observation(problem, 0.0, False) if value is None else Observation(*value)
    one.reward += observation.reward
    if output.finish_reason == "length":
      one.finish_reason = "length"
    elif observation.done:
      one.finish_reason = "stop"
    elif is_lost:
      one.finish_reason = "environment"
    elif one.turns >= self._config.max_turns:
      one.finish_reason = "max_turns"
    else:
      self._add_observation(one, observation.text)

  def _add_observation(self, one: "_Conversation", text: str) -> None:
    """The observation, and room for an answer; or the end."""
    tokens = self._encode(text, one.token_ids[-1]) if len(text) <= self._longest else None
    if tokens is None or len(one.all_token_ids) + len(tokens) >= self._config.max_target_length:
      one.finish_reason = "length"
    else:
      one.add(tokens, is_generated=False)

  def _encode(self, text: str, last: int) -> list[int]:
    if self._chat is None:
      return self._tokenizer.encode_continuation(text, special=False)
    return self._chat(text, last)


@dataclass
class _Conversation:
  """A trajectory that grows; it runs until it has a `finish_reason`."""

  task: Task
  environment: EnvironmentProcess
  prompt: tuple[int, ...] = ()
  token_ids: list[int] = field(default_factory=list)
  is_generated: list[bool] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  routed_experts: np.ndarray | None = None
  text: str = ""
  finish_reason: str = ""
  turns: int = 0
  reward: float = 0.0
  problems: list[str] = field(default_factory=list)

  @property
  def all_token_ids(self) -> list[int]:
    return [*self.prompt, *self.token_ids]

  def add_answer(self, output: RequestOutput) -> None:
    assert output.logprobs is not None
    self.add(output.token_ids, is_generated=True, logprobs=output.logprobs)
    if output.routed_experts is not None:
      # A turn prefills those before it again, where rounding may choose otherwise: those that answers came from stay.
      known = output.routed_experts[:0] if self.routed_experts is None else self.routed_experts
      self.routed_experts = np.concatenate([known, output.routed_experts[len(known) :]])
    self.text, self.turns = output.text, self.turns + 1

  def add(self, tokens: Sequence[int], *, is_generated: bool, logprobs: Sequence[float] | None = None) -> None:
    self.token_ids += tokens
    self.is_generated += [is_generated] * len(tokens)
    self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

  def trajectory(self) -> Trajectory:
    tokens = tuple(self.token_ids), tuple(self.is_generated), tuple(self.logprobs)
    prompt, errors = self.prompt or self.task.tokens, len(self.problems)
    own = Trajectory(prompt, *tokens, self.text, self.finish_reason, self.turns, self.reward, errors)
    return replace(own, routed_experts=self.routed_experts)
