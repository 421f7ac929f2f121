"""The best checkpoint of a run: the one with the lowest evaluation loss. Finding it needs neither JAX nor Orbax."""

from collections.abc import Mapping

from etils import epath

from maxtext.checkpoint.location import steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata, CorruptCheckpointError


def eval_losses(folder: epath.Path) -> dict[int, float]:
  """The evaluation losses of the steps under a folder; those of steps that were not evaluated are not in it.

  Raises:
    StorageError: storage does not answer. A step whose metadata is damaged counts as not evaluated.
  """
  found = {step: _eval_loss(folder / str(step)) for step in steps_in(folder)}
  return {step: loss for step, loss in found.items() if loss is not None}


def best_step(losses: Mapping[int, float]) -> int | None:
  """The step with the lowest loss, of equal ones the first; None where there is none."""
  return min(sorted(losses), key=lambda step: losses[step], default=None)


def _eval_loss(folder: epath.Path) -> float | None:
  try:
    return CheckpointMetadata.read(folder).eval_loss
  except CorruptCheckpointError:
    return None
