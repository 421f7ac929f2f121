"""Which cases of a test are quick, which the gate takes, and which run nightly."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[str], quick: Collection[str] | None = None, gate: Collection[str] | None = None) -> list[Any]:
  """Parameters of a test: those outside `gate` run nightly, and of the others those outside `quick` are slow."""

  def marks(name: str) -> list[pytest.MarkDecorator]:
    if gate is not None and name not in gate:
      return [pytest.mark.nightly]
    return [] if quick is None or name in quick else [pytest.mark.slow]

  return [pytest.param(name, marks=marks(name)) for name in every]
