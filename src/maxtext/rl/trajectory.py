"""What followed a prompt: the tokens of one answer, or of a conversation with an environment."""

from dataclasses import dataclass, field

import numpy as np

from maxtext.inference.llm import RequestOutput
from maxtext.inference.multimodal import PromptMedia


@dataclass(frozen=True)
class Trajectory:
  """What followed a prompt.

  Attributes:
    prompt_token_ids: the tokens of the prompt.
    token_ids: all tokens after it.
    is_generated: for each of these, whether the policy wrote it, and so trains it.
    logprobs: for each, by the engine that wrote it; 0 where the policy did not.
    text: the last answer, without the stop string or the stop token that ended it.
    finish_reason: "length" if `max_target_length` was reached.
    turns: answers.
    reward: by an environment.
    tool_errors: what failed in an environment.
    media: of the prompt; None where it is text.
    routed_experts: [tokens - 1, N] of all tokens but the last, the prompt's too; None where the engine keeps none.
  """

  prompt_token_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  is_generated: tuple[bool, ...]
  logprobs: tuple[float, ...]
  text: str
  finish_reason: str
  turns: int = 1
  reward: float = 0.0
  tool_errors: int = 0
  media: PromptMedia | None = None
  routed_experts: np.ndarray | None = field(default=None, compare=False)

  @staticmethod
  def of(output: RequestOutput, media: PromptMedia | None = None) -> "Trajectory":
    """A single answer to a prompt with these media."""
    assert output.logprobs is not None
    mask, prompt = (True,) * len(output.token_ids), output.prompt_token_ids
    return Trajectory(
      prompt,
      output.token_ids,
      mask,
      output.logprobs,
      output.text,
      output.finish_reason,
      media=media,
      routed_experts=output.routed_experts,
    )
