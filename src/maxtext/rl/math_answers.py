"""Whether mathematical answers are equal, by math-verify: the function of `reward_functions=[math_verify]`. It runs in
processes of its own (`reward_process.py`), since an expression may take any time to simplify."""

import logging
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

_SECONDS = 1  # for an expression, and again to compare it
_LONGEST = 2000  # characters at the end of a text in which its answer is sought
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would write every expression that is none


def verify_answers(prompts: Sequence[str], texts: Sequence[str], answers: Sequence[str]) -> list[float]:
  """1 for each text whose last expression equals the answer, as mathematics; it may be LaTeX with its marks or
  without."""
  return [float(_is_equal(text[-_LONGEST:], answer)) for text, answer in zip(texts, answers, strict=True)]


def _is_equal(text: str, answer: str) -> bool:
  if text.strip() == answer.strip():
    return True
  gold = _parsed(f"${answer}$") or _parsed(answer)
  return any(verify(gold, _parsed(found), timeout_seconds=_SECONDS) for found in (f"${text}$", text))


def _parsed(text: str) -> list[Any]:
  return parse(text, parsing_timeout=_SECONDS)
