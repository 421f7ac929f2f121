"""Notes that a run leaves beside its checkpoints when it ends itself, so that its next start knows which steps to take.

A state may be finite and still lead nowhere: the loss or the gradients computed from it are not. Nothing in the state
says so; the step after it does, when its checkpoint is there already. Nor does a state show that a device has computed
it wrongly: replicas that are compared later do.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from etils import epath

from maxtext.checkpoint.storage import retried
from maxtext.storage.atomic import write_atomically


@dataclass(frozen=True)
class Note:
  """A file in a run's folder of checkpoints."""

  FILE: ClassVar[str]

  def write(self, folder: epath.Path) -> None:
    """Into a run's folder of checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(self.file(folder), json.dumps(asdict(self)).encode())  # half of one would say nothing

  @classmethod
  def file(cls, folder: epath.Path) -> epath.Path:
    """Where it stands."""
    return folder / cls.FILE

  @classmethod
  def read(cls, folder: epath.Path) -> Self | None:
    """What the last start of a run left; one that cannot be read is none, and the run resumes from its latest step."""
    try:
      return cls(**json.loads(retried(folder, cls.file(folder).read_text)))
    except (FileNotFoundError, ValueError, TypeError):
      return None

  @classmethod
  def remove(cls, folder: epath.Path) -> None:
    """When it says nothing any more."""
    cls.file(folder).unlink(missing_ok=True)


@dataclass(frozen=True)
class NonfiniteNote(Note):
  """What was not finite. A later step that is finite and safely there removes it.

  Attributes:
    step: the first step of which something was not.
    what: what of it, and how.
    blamed: the step whose state led to it, though finite; None where only the state after `step` is bad.
    began: the step at which the process that wrote this began; 0 is a new run.
  """

  FILE: ClassVar[str] = "nonfinite.json"
  step: int
  what: str
  blamed: int | None
  began: int


@dataclass(frozen=True)
class CorruptionNote(Note):
  """What a device held or computed wrongly. The next start, which takes no later step than `proven`, removes it.

  Attributes:
    step: at which it was found.
    what: which devices, and what of them.
    proven: the last step at which it was not so; 0 is the beginning of a run.
  """

  FILE: ClassVar[str] = "corrupt.json"
  step: int
  what: str
  proven: int
