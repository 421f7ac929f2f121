"""Random requests for benchmarks, offline and online."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
  """Random requests of equal lengths.

  Attributes:
    num_prompts: number of requests.
    input_len: random tokens in each prompt.
    output_len: tokens that each request generates.
    seed: seed of the prompts.
  """

  num_prompts: int
  input_len: int
  output_len: int
  seed: int

  def prompts(self) -> list[list[int]]:
    """The prompts, of tokens 0 to 255, which all but the smallest vocabularies have."""
    rng = random.Random(self.seed)
    return [[rng.randrange(256) for _ in range(self.input_len)] for _ in range(self.num_prompts)]
