"""Perplexity and bits per byte of texts, and of prepared corpora. Each document is scored by itself, as a whole."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.prepared_corpus import PreparedCorpus, held_out_documents, read_manifest
from maxtext.data.raw_text import File, SpanLimits, documents, find_files, split_file
from maxtext.data.tokenizers import TextTokenizer
from maxtext.evaluation.scoring import Scorer, TokenPair
from maxtext.observe.evaluation_records import EvaluationRecord

_SPAN = SpanLimits(documents=1024, size=2**24)


@dataclass(frozen=True)
class TextPerplexity:
  """Of text files, JSON lines and Parquet. A text file is one document.

  Attributes:
    name: of the file or folder.
    files: to read, in order.
    column: what holds the text.
    limit: most documents; None is all.
  """

  name: str
  files: list[File]
  column: str
  limit: int | None

  @staticmethod
  def of(path: Path, column: str, limit: int | None) -> "TextPerplexity":
    """For a file or a folder; `ConfigError` if it has no text."""
    files = find_files([str(path)])
    if not any(file.size for file in files):
      raise ConfigError(f"--tasks {path} has no text.")
    return TextPerplexity(path.stem, files, column, limit)

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics of all documents."""
    texts = (
      text
      for file in self.files
      for span in split_file(file, self.column, _SPAN)
      for text in documents(span, self.column)
    )
    vocabulary = scorer.tokenizer.vocabulary
    counted = ((list(vocabulary.encode(text, special=False)), len(text.encode())) for text in texts)
    return [_measure(self.name, islice(counted, self.limit), scorer)]


@dataclass(frozen=True)
class CorpusPerplexity:
  """Of the held-out documents of a prepared corpus, or of all where none is held out. The corpus must have been
  prepared with the model's tokenizer."""

  path: Path
  limit: int | None

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics of the documents."""
    manifest, tokenizer = read_manifest(self.path), scorer.tokenizer
    if manifest["tokenizer"].get("sha256") != tokenizer.sha256:
      raise ConfigError(f"--tasks {self.path} was prepared with another tokenizer than the model's: give its text.")
    corpus = PreparedCorpus(self.path, held_out=held_out_documents(manifest) > 0)
    numbers = range(sum(corpus.sizes))[: self.limit]
    tokens = ([*map(int, corpus.tokens(record))] for number in numbers for record in corpus.read([number]))
    ends = manifest["tokenizer"].get("bos"), manifest["tokenizer"].get("eos")
    return [_measure(self.path.resolve().name, (_without_ends(one, *ends, tokenizer) for one in tokens), scorer)]


def _without_ends(
  tokens: list[int], bos: int | None, eos: int | None, tokenizer: TextTokenizer
) -> tuple[list[int], int]:
  """The tokens of a document's text, and its bytes."""
  text = tokens[bos is not None : len(tokens) - (eos is not None)]
  return text, len(tokenizer.decode(text).encode())


def _measure(name: str, counted: Iterable[tuple[list[int], int]], scorer: Scorer) -> EvaluationRecord:
  """The metrics of documents, each given as tokens and number of bytes."""
  tokens = size = count = 0

  def pairs() -> Iterator[TokenPair]:
    nonlocal tokens, size, count
    for document, num_bytes in counted:
      tokens, size, count = tokens + len(document), size + num_bytes, count + 1
      yield from scorer.rolling(document)

  total = sum(one.value for one in scorer.loglikelihoods(pairs(), name))
  if not tokens or not size:
    raise RunError(f"{name} has no text to measure.")
  metrics = {"perplexity": _exp(-total / tokens), "bits_per_byte": -total / size / math.log(2)}
  return EvaluationRecord(name, metrics | {"tokens": tokens, "bytes": size}, samples=count)


def _exp(exponent: float) -> float:
  """Infinity for what floats do not hold, of models that are worse than any guess."""
  try:
    return math.exp(exponent)
  except OverflowError:
    return math.inf
