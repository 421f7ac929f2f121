"""The requests that benchmarks make up, for an engine or for a server."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
  """Requests that are made up.

  Attributes:
    requests: how many.
    prompt_tokens: random ones in each prompt.
    max_tokens: that each answer has.
    seed: of the prompts.
  """

  requests: int
  prompt_tokens: int
  max_tokens: int
  seed: int

  def prompts(self) -> list[list[int]]:
    """The prompts, of bytes: tokens 0 to 255, which all but the smallest vocabularies have."""
    draw = random.Random(self.seed)
    return [[draw.randrange(256) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]
