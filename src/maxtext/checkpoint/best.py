"""The best checkpoint of a run, by what its evaluations found. Finding it needs neither JAX nor Orbax."""

from collections.abc import Mapping

from etils import epath

from maxtext.checkpoint.location import steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata, CorruptCheckpointError, Score


def scores_in(folder: epath.Path) -> dict[int, Score]:
  """The scores of the steps under a folder; steps that were not evaluated are not in it.

  Raises:
    StorageError: storage does not answer. A step whose metadata is damaged counts as not evaluated.
  """
  found = {step: _score(folder / str(step)) for step in steps_in(folder)}
  return {step: score for step, score in found.items() if score is not None}


def best_step(scores: Mapping[int, Score]) -> int | None:
  """The step with the best score by the criterion of the newest, of equal ones the first; None where there is none."""
  if not scores:
    return None
  criterion = scores[max(scores)].criterion
  return min((s for s in sorted(scores) if scores[s].criterion == criterion), key=lambda step: scores[step].rank)


def _score(folder: epath.Path) -> Score | None:
  try:
    return CheckpointMetadata.read(folder).score
  except CorruptCheckpointError:
    return None
