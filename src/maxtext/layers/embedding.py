"""Token embeddings, which may be tied to the output head, learned positions, and features of other modalities.

Shapes: B batch, S sequence, E width, V vocabulary, P positions, N features of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.quantized_weight import QuantizedFormat
from maxtext.layers.weight_format import StoredWeight
from maxtext.mesh.explicit import auto_axes

# Of rows as they are looked up. A shard of the table has rows for all tokens, so what splits it does not split those.
_ROWS = ("activation_embed_and_logits_batch", "activation_length", None)


class Embedding(nnx.Module):
  """Rows of a table [V,E], times a constant. The table may be at rest in few bits."""

  def __init__(
    self, factory: ParamFactory, vocab: int, width: int, execution: ExecutionConfig, std: float, scale: float = 1.0
  ) -> None:
    self.execution, self.scale, self.path = execution, scale, factory.module_path
    format_ = execution.weight_format
    stored = format_.table(factory, vocab, width) if isinstance(format_, QuantizedFormat) else {}
    stored = stored or {"weight": factory("table", (vocab, width), ("vocab", "embed"), std=std)}
    self.stored = tuple(stored)
    for leaf, variable in stored.items():
      setattr(self, leaf.replace("weight", "table"), variable)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    rows = self._plain_rows(tokens) if len(self.stored) == 1 else self._stored_rows(tokens)
    return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

  def _plain_rows(self, tokens: jax.Array) -> jax.Array:
    table, dtype = self.table[...], self.execution.numerics.dtype
    for one in self.execution.matmul:
      table = one.table(self.path, table, dtype)
    # All-gather the width first, so that the partitioner indexes whole rows; otherwise it replicates the table.
    table = self.execution.sharding.constrain(table.astype(dtype), "vocab", None)
    if self.execution.kernels.one_hot_embedding:
      rows = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table
      return self.execution.sharding.constrain(rows, *_ROWS)
    return _rows(self.execution, table, tokens)

  def _stored_rows(self, tokens: jax.Array) -> jax.Array:
    """Looked up before they are multiplied out, even where a plain table is multiplied by one-hot vectors."""
    format_, constrain = self.execution.weight_format, self.execution.sharding.constrain
    assert isinstance(format_, QuantizedFormat)
    arrays = {leaf: constrain(array, "vocab", None) if array.ndim else array for leaf, array in self._arrays.items()}
    return format_.rows(arrays, tokens, self.execution.numerics.dtype)

  @property
  def _arrays(self) -> dict[str, jax.Array]:
    return {leaf: getattr(self, leaf.replace("weight", "table"))[...] for leaf in self.stored}

  @property
  def as_head(self) -> jax.Array | StoredWeight:
    """The table as the weight of a tied head, [E,V]."""
    arrays = {leaf: array.T for leaf, array in self._arrays.items()}
    return arrays["weight"] if len(arrays) == 1 else StoredWeight(self.execution.weight_format, arrays)


class Positions(nnx.Module):
  """Learned position embeddings, a table [P,E]; added to the token embeddings."""

  def __init__(self, factory: ParamFactory, length: int, width: int, execution: ExecutionConfig) -> None:
    self.execution = execution
    self.table = factory("table", (length, width), (None, "embed"), std=0.02)

  def __call__(self, positions: jax.Array) -> jax.Array:
    """Looks up [B,S] to [B,S,E]."""
    table = self.execution.sharding.constrain(self.table[...].astype(self.execution.numerics.dtype), None, None)
    return _rows(self.execution, table, positions)

  def resampled(self, places: jax.Array, side: int) -> jax.Array:
    """Interpolates between the rows of the table, which is a square grid with this side, at places [B,S,2] (row and
    column, fractions allowed) to [B,S,E]; bilinear."""
    low = jnp.floor(places)
    found = jnp.zeros((), jnp.float32)
    for row in (0, 1):
      for column in (0, 1):
        corner = low + jnp.array([row, column], low.dtype)
        share = jnp.maximum(1.0 - jnp.abs(places - corner), 0.0).prod(-1, keepdims=True)
        index = jnp.clip(corner, 0, side - 1).astype(jnp.int32)
        found = found + share * self(index[..., 0] * side + index[..., 1])
    return found.astype(self.execution.numerics.dtype)


class AxisPositions(nnx.Module):
  """Learned embeddings of the columns and rows of an image, two tables [P,E]; their sum is added to the patches."""

  def __init__(self, factory: ParamFactory, length: int, width: int, execution: ExecutionConfig) -> None:
    self.execution = execution
    self.table = factory("table", (2, length, width), (None, None, "embed"), std=0.02)

  def __call__(self, places: jax.Array) -> jax.Array:
    """Looks up places [B,S,2], column and row, to [B,S,E]."""
    tables = self.execution.sharding.constrain(self.table[...].astype(self.execution.numerics.dtype), None, None, None)
    return _rows(self.execution, tables[0], places[..., 0]) + _rows(self.execution, tables[1], places[..., 1])


def _rows(execution: ExecutionConfig, table: jax.Array, index: jax.Array) -> jax.Array:
  if not execution.sharding.explicit:
    return execution.sharding.constrain(table[index], *_ROWS)
  shape = *index.shape, table.shape[1]
  return table.at[index].get(out_sharding=execution.sharding.rules.sharding(execution.sharding.mesh, _ROWS, shape))


def sinusoids(positions: jax.Array, width: int, dtype: jax.typing.DTypeLike, longest: float = 1e4) -> jax.Array:
  """Sinusoidal position embeddings, [B,S] to [B,S,E]: sines, then cosines; the longest wavelength is 2 pi `longest`."""
  half = width // 2
  frequency = longest ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(dtype)


def feature_indices(placeholders: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
  """The index of the feature that replaces each token, [B,S] int32: 0 for a row's first placeholder, then 1, ...; -1
  for other tokens.

  It runs on the host, on tokens in the order of the text. The result may be reordered along with the tokens, as context
  parallelism does.

  Args:
    placeholders: [B,S] whether a token is a placeholder for a feature.
    counts: [B] number of features of each row; one number applies to every row.

  Raises:
    ValueError: the numbers of placeholders and of features of a row differ; the message has both.
  """
  marked = np.asarray(placeholders, bool)
  for row, (places, count) in enumerate(zip(marked.sum(1), np.broadcast_to(counts, marked.shape[:1]), strict=True)):
    if places != count:
      raise ValueError(f"row {row} has {places} placeholder tokens for {count} features; they must be equal.")
  return np.where(marked, np.cumsum(marked, axis=1) - 1, -1).astype(np.int32)


def merge_features(
  embeddings: jax.Array, features: jax.Array, indices: jax.typing.ArrayLike, add: bool = False
) -> jax.Array:
  """Embeddings [B,S,E] with features [B,N,E] at the tokens whose `indices` [B,S] are not negative.

  Args:
    indices: the index of each token's feature, from `feature_indices`; several tokens may have the same.
    add: a feature is added to the embedding instead of replacing it.
  """
  indices = jnp.asarray(indices)

  def merged(embeddings: jax.Array, features: jax.Array, indices: jax.Array) -> jax.Array:
    index = jnp.clip(indices, 0, features.shape[1] - 1)[..., None]
    taken = jnp.take_along_axis(features, index, axis=1).astype(embeddings.dtype)
    return jnp.where((indices >= 0)[..., None], embeddings + taken if add else taken, embeddings)

  return auto_axes(merged, jax.typeof(embeddings).sharding, embeddings, features, indices)
