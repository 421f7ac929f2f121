"""The token table, which may serve as output head too, and positions that are learned.

Shapes: B batch, S sequence, E width, V vocabulary, P positions.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.how import How
from maxtext.layers.make import Make

_TOKENS = ("activation_embed_and_logits_batch", "activation_length")


class Embedding(nnx.Module):
  """Rows of a table [V,E], times a constant."""

  def __init__(self, make: Make, vocab: int, width: int, how: How, std: float, scale: float = 1.0) -> None:
    self.how, self.scale = how, scale
    self.table = make("table", (vocab, width), ("vocab", "embed"), std=std)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    # Gathering the width first lets the partitioner index whole rows; it would rematerialise the table otherwise.
    table = self.how.shard(self.table[...].astype(self.how.dtype), "vocab", None)
    one_hot = self.how.one_hot_embedding
    rows = (
      jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table if one_hot else _rows(self.how, table, tokens)
    )
    return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

  @property
  def as_head(self) -> jax.Array:
    """The table as the weight of a tied head, [E,V]."""
    return self.table[...].T


class Positions(nnx.Module):
  """Rows of a learned table [P,E], one per position; added to the tokens' rows."""

  def __init__(self, make: Make, length: int, width: int, how: How) -> None:
    self.how = how
    self.table = make("table", (length, width), (None, "embed"), std=0.02)

  def __call__(self, positions: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    table = self.how.shard(self.table[...].astype(self.how.dtype), None, None)
    return _rows(self.how, table, positions)


def _rows(how: How, table: jax.Array, index: jax.Array) -> jax.Array:
  if not how.explicit:
    return table[index]
  shape = *index.shape, table.shape[1]
  return table.at[index].get(out_sharding=how.rules.sharding(how.mesh, (*_TOKENS, None), shape))


def sinusoids(positions: jax.Array, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Fixed positions [B,S] to [B,S,E]: sines in the first half, cosines in the second, of wavelengths up to 10000."""
  half = width // 2
  frequency = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)
