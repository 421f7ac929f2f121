"""What was counted, in a file of the repository for each fault, so that the next portion continues after it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maxtext.storage.atomic import write_atomically

FOLDER = Path(__file__).with_name("results")
WRONG = "wrong"


@dataclass
class Count:
  """Of one fault and one target.

  Attributes:
    outcomes: how often each of them was seen.
    following: where the next portion begins; what it means is the fault's own.
    seconds: of each event, where a fault is judged by them.
  """

  outcomes: dict[str, int] = field(default_factory=dict)
  following: list[int] = field(default_factory=list)
  seconds: list[float] = field(default_factory=list)

  def add(self, outcome: str) -> None:
    self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

  @property
  def points(self) -> int:
    return sum(self.outcomes.values())


class Results:
  """The counts of a fault, by target."""

  def __init__(self, fault: str, folder: Path = FOLDER) -> None:
    self._file = folder / f"{fault}.json"
    body: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}
    self.targets = {name: Count(**count) for name, count in body.items()}

  def count(self, target: str) -> Count:
    """That of a target, made where there is none."""
    return self.targets.setdefault(target, Count())

  def save(self) -> None:
    self._file.parent.mkdir(exist_ok=True)
    body = {name: asdict(count) for name, count in sorted(self.targets.items())}
    write_atomically(self._file, (json.dumps(body, indent=1) + "\n").encode())
