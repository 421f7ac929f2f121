"""The note that a run leaves when its numbers stop being finite, so that the next start knows where not to resume from.

A state may be finite and still lead nowhere: the loss or the gradients computed from it are not. Nothing in the state
says so; the step after it does, when its checkpoint is there already.
"""

import json
from dataclasses import asdict, dataclass

from etils import epath

from maxtext.checkpoint.storage import retried

_FILE = "nonfinite.json"


@dataclass(frozen=True)
class NonfiniteNote:
  """What was not finite.

  Attributes:
    step: the first step of which something was not.
    what: what of it, and how.
    blamed: the step whose state led to it, though finite; None where only the state after `step` is bad.
    began: the step at which the process that wrote this began; 0 is a new run.
  """

  step: int
  what: str
  blamed: int | None
  began: int

  def write(self, folder: epath.Path) -> None:
    """Into a run's folder of checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    self.file(folder).write_text(json.dumps(asdict(self)))

  @staticmethod
  def file(folder: epath.Path) -> epath.Path:
    """Where it stands."""
    return folder / _FILE

  @staticmethod
  def read(folder: epath.Path) -> "NonfiniteNote | None":
    """What the last start of a run left; one that cannot be read is none, and the run resumes from its latest step."""
    try:
      return NonfiniteNote(**json.loads(retried(folder, NonfiniteNote.file(folder).read_text)))
    except (FileNotFoundError, ValueError, TypeError):
      return None

  @staticmethod
  def remove(folder: epath.Path) -> None:
    """A later step is finite and safely there."""
    NonfiniteNote.file(folder).unlink(missing_ok=True)
