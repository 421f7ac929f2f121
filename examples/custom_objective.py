"""An objective of your own: a student that follows a teacher's distribution, token by token.

python examples/custom_objective.py
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxtext
from maxtext.data.indexed import IndexedBatches
from maxtext.models.decoder import Decoder
from maxtext.training.objectives.base import FrozenModel, Models, StepContext, token_field

ROWS, LENGTH = 8, 32


class Distill(maxtext.Objective):
  """The Kullback-Leibler divergence of the student from the teacher."""

  def __init__(self, teacher: maxtext.MaxTextConfig) -> None:
    self.teacher = teacher

  def batch(self, rows: int, length: int) -> Any:
    """Declares the batch. Leave this method out to train on the configured data."""
    tokens = token_field(rows, length)
    return {"tokens": tokens, "positions": tokens, "mask": token_field(rows, length, jnp.float32)}

  @property
  def frozen(self) -> Mapping[str, FrozenModel]:
    """Models that take part and are not trained."""
    return {"teacher": FrozenModel(self.teacher)}

  def __call__(self, models: Models, batch: Any, context: StepContext) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum that is minimised, and sums that become metrics."""

    def log_probs(decoder: Decoder) -> jax.Array:
      hidden, *_ = decoder.hidden(batch["tokens"], batch["positions"], None)
      return jax.nn.log_softmax(decoder.logits(hidden).astype(jnp.float32))

    student, teacher = log_probs(models.decoder), log_probs(models.frozen["teacher"])
    divergence = (jnp.exp(teacher) * (teacher - student)).sum(-1)
    agrees = (student.argmax(-1) == teacher.argmax(-1)).astype(jnp.float32)
    return (divergence * batch["mask"]).sum(), {"agreement": (agrees * batch["mask"]).sum()}

  def weight(self, batch: Any) -> jax.Array:
    """What these sums are divided by."""
    return batch["mask"].sum()


def make(number: int) -> dict[str, np.ndarray]:
  """Batch number `number`: a function of it, so that the run can resume anywhere."""
  tokens = np.random.default_rng(number).integers(0, 128, (ROWS, LENGTH))
  positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
  return {"tokens": tokens, "positions": positions, "mask": np.ones((ROWS, LENGTH))}


tiny = partial(
  maxtext.load_config,
  vocab_size=128,
  base_emb_dim=32,
  base_mlp_dim=64,
  base_num_decoder_layers=1,
  base_num_query_heads=2,
  base_num_kv_heads=2,
  head_dim=16,
  max_target_length=LENGTH,
  per_device_batch_size=ROWS,
  dataset_type="synthetic",
  dtype="float32",
)
teacher = tiny(init_weights_seed=1)  # load_parameters_path would name a trained one
config = tiny(run_name="distilled", steps=20, log_period=10, learning_rate=1e-2)
maxtext.train(config, objective=Distill(teacher), data=IndexedBatches(make))
