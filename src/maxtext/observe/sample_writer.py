"""Samples of a run: lines on the console, `samples.jsonl`, and texts in TensorBoard."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from maxtext.observe.growing_file import GrowingFile
from maxtext.observe.metric_lines import truncate_after
from maxtext.observe.metric_writers import TensorBoardWriter, reason, warn
from maxtext.observe.visible_text import visible

_LOG = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"


class Sample(NamedTuple):
  """A prompt, and the text that continues it."""

  prompt: str
  text: str


class SampleWriter:
  """Writes samples into a run's folder: to `samples.jsonl` a line {"step": ..., "prompt": ..., "text": ...} for each.

  A run that resumes after step `after` writes later steps again, so their old lines are removed. TensorBoard shows the
  texts as a run of its own, `samples`: it reads one growing file in a folder.
  """

  def __init__(self, folder: Path, after: int, tensorboard: bool) -> None:
    self._file = GrowingFile(folder / SAMPLES, lambda path: truncate_after(path, after))
    self._tensorboard = TensorBoardWriter(folder / "tensorboard" / "samples") if tensorboard else None
    self._warned = False
    with suppress(OSError):  # it is tried again with the first sample
      self._file.append(b"")

  def write(self, step: int, samples: Sequence[Sample]) -> None:
    """Writes the samples of a step. A file that cannot be written is warned about once, and tried again."""
    for prompt, text in samples:
      _LOG.info(f"sample at step {step}: {_quoted(prompt)} -> {_quoted(text)}")
    lines = [json.dumps({"step": step, **sample._asdict()}) + "\n" for sample in samples]
    try:
      self._file.append("".join(lines).encode())
      if self._tensorboard is not None:
        texts = {f"sample_{number}": f"    {_indented(p + t)}" for number, (p, t) in enumerate(samples)}
        self._tensorboard.write_texts(step, texts)
    except Exception as error:  # of a disk, or a library that is not there: a run does not fail for its samples
      if not self._warned:
        self._warned = True
        warn(f"samples cannot be written: {reason(error)}. The run continues, and every sample tries again.")

  def close(self) -> None:
    """Closes the files."""
    with suppress(OSError):
      self._file.close()
    if self._tensorboard is not None:
      with suppress(OSError):
        self._tensorboard.close()


def _quoted(text: str) -> str:
  """On one line, and nothing in it acts on a terminal."""
  return visible(json.dumps(text, ensure_ascii=False))


def _indented(text: str) -> str:
  """As Markdown code, which keeps spaces and lines."""
  return text.replace("\n", "\n    ")
