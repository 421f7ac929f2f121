"""Finds the names of special tokens in a text, in time linear in the text, and what may become one at its end."""

import re
from collections.abc import Collection, Iterable, Iterator

_SLICE = 2**13  # characters per search, which holds the interpreter's lock


class SpecialTokenFinder:
  """Finds names: the leftmost first, and the longest of those that start there.

  Args:
    names: what to find.
    ignore_case: whether upper and lower case are equal.
  """

  def __init__(self, names: Collection[str], *, ignore_case: bool = False) -> None:
    self._longest = max(map(len, names), default=0)
    self._pattern = _pattern({name for name in names if name}, ignore_case)

  def spans(self, text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each match, in order, without overlaps."""
    place = 0
    while self._longest and place < len(text):
      stop = place + _SLICE
      found = self._pattern.search(text, place, stop + self._longest)
      if found and found.start() < stop:  # a later match may be cut off here
        yield found.span()
        place = found.end()
      else:
        place = stop


def partial_match_length(text: str, names: Collection[str]) -> int:
  """The number of characters at the end of a text that may be the beginning of a name."""
  return max((_prefix_length(text[-len(name) + 1 :] if len(name) > 1 else "", name) for name in names), default=0)


def _prefix_length(tail: str, name: str) -> int:
  """The length of the longest suffix of `tail` that is a prefix of `name`. The tail is shorter than the name."""
  start = tail.find(name[0])
  while start >= 0 and not name.startswith(tail[start:]):
    start = tail.find(name[0], start + 1)
  return len(tail) - start if start >= 0 else 0


def _pattern(names: Collection[str], ignore_case: bool) -> re.Pattern[str]:
  """An expression that matches the longest of the names."""
  flags = re.IGNORECASE if ignore_case else 0
  try:
    return re.compile(_tree("".join(map(_folded, name)) if ignore_case else name for name in names), flags)
  except RecursionError:  # hundreds of names that are prefixes of each other
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))), flags)


def _tree(names: Iterable[str]) -> str:
  """A trie as an expression: common prefixes are matched once."""
  names = set(names)
  longer = names - {""}
  if not longer:
    return ""
  first, last = min(longer), max(longer)  # their common prefix is that of all names
  length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
  if shared := first[:length]:
    inner = re.escape(shared) + _tree(name[len(shared) :] for name in longer)
  else:
    inner = "|".join(
      _tree(name for name in longer if name[0] == character) for character in sorted({n[0] for n in longer})
    )
  return f"(?:{inner})?" if "" in names else inner if shared else f"(?:{inner})"


def _folded(character: str) -> str:
  """A representative of the characters that differ only in case."""
  other = character.upper().lower()
  return other if len(other) == 1 else character
