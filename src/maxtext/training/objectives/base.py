"""The contract of an objective: its batch, the frozen models it needs, and a loss that knows step and randomness."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxtext.checkpoint.metadata import Criterion
from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Batch
from maxtext.models.decoder import Decoder

Metrics = dict[str, jax.Array]

EVALUATION = 2**31
"""Tells the random keys of an evaluation from those of a training step, whose parts are micro-batches."""
BATCH, LENGTH = "batch", "length"
"""Logical axes of a batch's arrays, which `input_data_sharding_logical_axes` maps to the mesh. Arrays with a length are
put in context-parallel order before the objective sees them."""


@dataclass(frozen=True)
class Field:
  """One array of a batch.

  Attributes:
    shape: its shape; the first dimension is the rows of the batch.
    dtype: its dtype.
    axes: the logical axis of each dimension: `BATCH` for the first, `LENGTH` for the second where that runs over the
      tokens of a row, else a name of `logical_axis_rules`, or None for a dimension that is not split.
  """

  shape: tuple[int, ...]
  dtype: jax.typing.DTypeLike
  axes: tuple[str | None, ...]


def token_field(rows: int, length: int, dtype: jax.typing.DTypeLike = jnp.int32) -> Field:
  """A value for each token: [rows, length]."""
  return Field((rows, length), dtype, (BATCH, LENGTH))


def token_batch(rows: int, length: int) -> Batch:
  """The batch that the configured data makes, as fields; synthetic data leaves `segments` out."""
  tokens = token_field(rows, length)
  return Batch(tokens, tokens, tokens, tokens, token_field(rows, length, jnp.float32))


@dataclass(frozen=True)
class FrozenModel:
  """A model that takes part in the loss and is not trained: a reference, a teacher.

  Its parameters are those that a new run of its configuration would start from, and they are found again in the same
  way when a run is resumed: from `load_parameters_path`, from `load_full_state_path`, or by `init_weights_seed`. They
  are on the devices once, sharded by the same rules as the trained ones. No optimizer state belongs to them and no
  checkpoint contains them, so the files that they come from must stay as they are for as long as the run may resume.

  Attributes:
    config: the model and its parameters; None is the run's own, so that the model stays at the run's initial
      parameters. Keys that do not describe the model or its parameters have no effect.
  """

  config: MaxTextConfig | None = None


@dataclass(frozen=True)
class Models:
  """The models of a loss.

  Attributes:
    decoder: the model that is trained.
    frozen: the objective's frozen models, by name.
  """

  decoder: Decoder
  frozen: Mapping[str, Decoder] = field(default_factory=dict)


class StepContext:
  """Where a run stands when the loss is computed.

  Attributes:
    step: finished updates, as a traced number.
    uses_key: whether a key was asked for.
  """

  def __init__(self, step: jax.typing.ArrayLike = 0, seed: int = 0, *parts: jax.typing.ArrayLike) -> None:
    """`parts` tells apart what happens within a step: the number of the micro-batch, or of the evaluation batch."""
    self.step, self.uses_key = step, False
    self._seed, self._parts = seed, parts

  def key(self, path: str) -> jax.Array:
    """A random key that is a function of (seed, step, path), and of the micro-batch under gradient accumulation.

    It depends neither on the mesh nor on the number of hosts. Two uses of one path get the same key.
    """
    self.uses_key = True
    key = jax.random.key(self._seed)
    for value in (self.step, *self._parts, int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")):
      key = jax.random.fold_in(key, jnp.asarray(value, jnp.uint32))
    return key


class Objective(ABC):
  """A loss as a sum over a batch, and the number that the sum is divided by.

  Attributes:
    maxima: metrics that are no sums but the largest of numbers from 0 on; they are not divided.
    criterion: by which the best checkpoint is chosen.
  """

  maxima: ClassVar[frozenset[str]] = frozenset()
  criterion: ClassVar[Criterion] = Criterion()

  def batch(self, rows: int, length: int) -> Any:
    """Declares the batch as a pytree of `Field`, for example {name: field}: what the loss receives has the same tree
    with arrays as leaves. By default it is the batch of the configured data; any other one needs data of its own."""
    return token_batch(rows, length)

  @property
  def frozen(self) -> Mapping[str, FrozenModel]:
    """The frozen models that the loss needs, by name."""
    return {}

  @abstractmethod
  def __call__(self, models: Models, batch: Any, context: StepContext) -> tuple[jax.Array, Metrics]:
    """Returns the sum that is minimised, and sums that are only reported, by name.

    An evaluation divides a sum by another one instead of the weight if that is named after it: `rate` by `rate_weight`.
    """

  def weight(self, batch: Any) -> jax.Array:
    """The number that all of these sums are divided by, known before the forward pass; sums of micro-batches are
    divided by the weight of the whole batch."""
    return batch.weights.sum()

  def tokens(self, batch: Any) -> jax.Array:
    """Tokens of the batch, for the metrics of speed."""
    return self.weight(batch)
