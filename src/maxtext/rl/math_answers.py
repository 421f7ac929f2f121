"""Whether mathematical answers are equal, by math-verify: the function of `reward_functions=[math_verify]`. It runs in
processes of its own (`reward_process.py`), since an expression may take any time to simplify."""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_SECONDS = 2  # to read an expression, and to compare two
_LONGEST = 2000  # characters at the end of a text in which its answer is sought
_MARKS = re.compile(r"\$|\\\(|\\\[|\\boxed|(?<![\\A-Za-z])[A-Za-z]{2,}")  # of LaTeX within a text, or a word
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would write every expression that is none


def verify_answers(prompts: Sequence[str], texts: Sequence[str], answers: Sequence[str]) -> list[float]:
  """1 for each text that gives the answer, as mathematics. A text is read once, as an expression or as prose with an
  expression in it, so that two guesses are not two chances."""
  return [float(_is_equal(text[-_LONGEST:], answer)) for text, answer in zip(texts, answers, strict=True)]


def _is_equal(text: str, answer: str) -> bool:
  return text.strip() == answer.strip() or verify(_gold(answer), _parsed(text), timeout_seconds=_SECONDS)


@lru_cache(1024)
def _gold(answer: str) -> list[Any]:
  """Every answer of a task is compared with it."""
  return _parsed(answer)


def _parsed(text: str) -> list[Any]:
  return parse(text if _MARKS.search(text) else f"${text}$", parsing_timeout=_SECONDS)


# What is loaded at first use is loaded here, so that no answer's seconds are spent on it.
verify(parse("$x+1$", parsing_timeout=60), parse("$1+x$", parsing_timeout=60), timeout_seconds=60)
