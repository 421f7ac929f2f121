"""The token table, which may serve as output head too.

Shapes: B batch, S sequence, E width, V vocabulary.
"""

import jax
from flax import nnx

from maxtext.layers.how import How
from maxtext.layers.make import Make


class Embedding(nnx.Module):
  """Rows of a table [V,E]."""

  def __init__(self, make: Make, vocab: int, width: int, how: How, std: float) -> None:
    self.how = how
    self.table = make("table", (vocab, width), ("vocab", "embed"), std=std)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    # Gathering the width first lets the partitioner index whole rows; it would rematerialise the table otherwise.
    table = self.how.shard(self.table[...].astype(self.how.dtype), "vocab", None)
    return table[tokens]

  @property
  def as_head(self) -> jax.Array:
    """The table as the weight of a tied head, [E,V]."""
    return self.table[...].T
