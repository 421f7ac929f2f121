"""Text from a model or a data set, safe to print."""

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # the joiners are part of scripts and emoji


def visible(text: str, also: str = "") -> str:
  """The text with escapes for what would act on a terminal or hide in a text, and for the characters in `also`. Lines
  and tabs stay."""
  return "".join(_escaped(c) if c in also or _acts(c) else c for c in text)


def _acts(character: str) -> bool:
  """Whether it is a control or formatting character, such as one that turns the direction of text."""
  return character not in _KEPT and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(character: str) -> str:
  code = ord(character)
  return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
