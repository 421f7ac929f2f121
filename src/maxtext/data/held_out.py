"""The held-out split: which documents of a prepared corpus are kept from training, for evaluation.

A document is held out by a hash of its text. So copies of a text are all on the same side, and what is held out depends
neither on the order of the documents nor on who prepares them.
"""

import hashlib
from dataclasses import dataclass, replace

_HASHES = 1 << 64
_LARGEST_SHARE = 0.05  # of all text; a larger document is worth more in training


@dataclass(frozen=True)
class HeldOutRule:
  """How much text is held out.

  Attributes:
    share: of the text, 0 to 0.5; 0 holds out nothing.
    max_bytes: of text that is held out, about; None is no limit.
  """

  share: float
  max_bytes: int | None = None


DEFAULT_RULE = HeldOutRule(0.01, 4 << 20)
"""A hundredth of the text, and at most about a million tokens: evaluation reads all of it."""

NO_RULE = HeldOutRule(0.0)


@dataclass(frozen=True)
class HeldOutSelection:
  """The rule for a text of known size.

  Attributes:
    threshold: documents whose hash is below it are held out.
    largest: bytes of the largest document that may be held out.
  """

  threshold: int
  largest: int

  @staticmethod
  def of(rule: HeldOutRule, size: int) -> "HeldOutSelection":
    """For text of about `size` bytes."""
    if not rule.share:
      return HeldOutSelection(0, -1)
    share = rule.share if rule.max_bytes is None else min(rule.share, rule.max_bytes / max(size, 1))
    return HeldOutSelection(int(share * _HASHES), int(max(rule.share, _LARGEST_SHARE) * size))

  def hash_of(self, text: str) -> int:
    """The hash of a document; of one that is too large to be held out, a number above every threshold."""
    content = text.encode()
    if len(content) > self.largest:
      return _HASHES
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())

  def with_at_least_one(self, lowest: int) -> "HeldOutSelection":
    """With a threshold above the lowest hash of all documents, so that one document (and its copies) is held out."""
    return replace(self, threshold=lowest + 1) if self.threshold <= lowest < _HASHES else self
