"""Where the names of special tokens are in a text, in time that grows with the text and whatever is in it."""

import re
from collections.abc import Collection, Iterable, Iterator

_SLICE = 2**13  # characters that are searched at once: the interpreter's lock is kept meanwhile


class SpecialTokenFinder:
  """Finds names: the leftmost first, and the longest of those that begin there.

  Args:
    names: what to find.
    ignore_case: whether letters stand for both of their cases.
  """

  def __init__(self, names: Collection[str], *, ignore_case: bool = False) -> None:
    self._longest = max(map(len, names), default=0)
    self._pattern = _pattern({name for name in names if name}, ignore_case)

  def spans(self, text: str) -> Iterator[tuple[int, int]]:
    """Beginnings and ends, in order; none overlaps another."""
    place = 0
    while self._longest and place < len(text):
      stop = place + _SLICE
      found = self._pattern.search(text, place, stop + self._longest)
      if found and found.start() < stop:  # one that begins later may go on beyond what was searched
        yield found.span()
        place = found.end()
      else:
        place = stop


def _pattern(names: Collection[str], ignore_case: bool) -> re.Pattern[str]:
  """Any of the names, of which the longest matches."""
  flags = re.IGNORECASE if ignore_case else 0
  try:
    return re.compile(_tree("".join(map(_folded, name)) if ignore_case else name for name in names), flags)
  except RecursionError:  # names that begin with each other, hundreds deep
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))), flags)


def _tree(names: Iterable[str]) -> str:
  """An expression that looks at what names begin with in common once, not once for each of them."""
  names = set(names)
  longer = names - {""}
  if not longer:
    return ""
  first, last = min(longer), max(longer)  # what these begin with in common, all between them do
  length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
  if shared := first[:length]:
    inner = re.escape(shared) + _tree(name[len(shared) :] for name in longer)
  else:
    inner = "|".join(_tree(name for name in longer if name[0] == letter) for letter in sorted({n[0] for n in longer}))
  return f"(?:{inner})?" if "" in names else inner if shared else f"(?:{inner})"


def _folded(letter: str) -> str:
  """One of the letters that are the same but for their case."""
  other = letter.upper().lower()
  return other if len(other) == 1 else letter
