"""The token table, which may serve as output head too, positions that are learned, and features of other inputs.

Shapes: B batch, S sequence, E width, V vocabulary, P positions, N features of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.param_factory import ParamFactory
from maxtext.mesh.explicit import auto_axes

_TOKENS = ("activation_embed_and_logits_batch", "activation_length")


class Embedding(nnx.Module):
  """Rows of a table [V,E], times a constant."""

  def __init__(
    self, factory: ParamFactory, vocab: int, width: int, execution: ExecutionConfig, std: float, scale: float = 1.0
  ) -> None:
    self.execution, self.scale = execution, scale
    self.table = factory("table", (vocab, width), ("vocab", "embed"), std=std)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    # Gathering the width first lets the partitioner index whole rows; it would rematerialise the table otherwise.
    table = self.execution.sharding.constrain(self.table[...].astype(self.execution.numerics.dtype), "vocab", None)
    one_hot = self.execution.kernels.one_hot_embedding
    rows = (
      jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table
      if one_hot
      else _rows(self.execution, table, tokens)
    )
    return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

  @property
  def as_head(self) -> jax.Array:
    """The table as the weight of a tied head, [E,V]."""
    return self.table[...].T


class Positions(nnx.Module):
  """Rows of a learned table [P,E], one per position; added to the tokens' rows."""

  def __init__(self, factory: ParamFactory, length: int, width: int, execution: ExecutionConfig) -> None:
    self.execution = execution
    self.table = factory("table", (length, width), (None, "embed"), std=0.02)

  def __call__(self, positions: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    table = self.execution.sharding.constrain(self.table[...].astype(self.execution.numerics.dtype), None, None)
    return _rows(self.execution, table, positions)


def _rows(execution: ExecutionConfig, table: jax.Array, index: jax.Array) -> jax.Array:
  if not execution.sharding.explicit:
    return table[index]
  shape = *index.shape, table.shape[1]
  return table.at[index].get(
    out_sharding=execution.sharding.rules.sharding(execution.sharding.mesh, (*_TOKENS, None), shape)
  )


def sinusoids(positions: jax.Array, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Fixed positions [B,S] to [B,S,E]: sines in the first half, cosines in the second, of wavelengths up to 10000."""
  half = width // 2
  frequency = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)


def feature_indices(placeholders: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
  """Which feature of its row each token takes, [B,S] int32: the first placeholder 0, the next 1, ...; -1 is none.

  It runs on the host, where tokens are known, and in the order of the text. The result may be reordered along with the
  tokens, as context parallelism does.

  Args:
    placeholders: [B,S] whether a token stands for a feature.
    counts: [B] how many features each row has; one number is that of every row.

  Raises:
    ValueError: a row has another number of placeholders than of features; it names both.
  """
  marked = np.asarray(placeholders, bool)
  for row, (places, count) in enumerate(zip(marked.sum(1), np.broadcast_to(counts, marked.shape[:1]), strict=True)):
    if places != count:
      raise ValueError(f"row {row} has {places} placeholder tokens for {count} features; they must be equal.")
  return np.where(marked, np.cumsum(marked, axis=1) - 1, -1).astype(np.int32)


def merge_features(
  embeddings: jax.Array, features: jax.Array, indices: jax.typing.ArrayLike, add: bool = False
) -> jax.Array:
  """Embeddings [B,S,E] with features [B,N,E] in the places where `indices` [B,S] are not negative.

  Args:
    indices: the number of the feature that a place takes, from `feature_indices`; several places may take the same.
    add: a feature is added to the embedding instead of taking its place.
  """
  indices = jnp.asarray(indices)

  def merged(embeddings: jax.Array, features: jax.Array, indices: jax.Array) -> jax.Array:
    index = jnp.clip(indices, 0, features.shape[1] - 1)[..., None]
    taken = jnp.take_along_axis(features, index, axis=1).astype(embeddings.dtype)
    return jnp.where((indices >= 0)[..., None], embeddings + taken if add else taken, embeddings)

  return auto_axes(merged, jax.typeof(embeddings).sharding, embeddings, features, indices)
