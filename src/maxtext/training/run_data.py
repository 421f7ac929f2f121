"""The data of a run: opened once, checked before anything costly, then fed."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.batch import BatchSource, BatchWithState, IteratorState
from maxtext.data.dataloader import OpenedData, make_dataloader, missing_eval_data, open_data
from maxtext.data.documents import LABEL
from maxtext.data.options import data_options
from maxtext.data.reference_log_probs import REFERENCE, ReferenceLogProbs
from maxtext.data.splits import SplitName
from maxtext.data.teacher_outputs import TEACHER_TOKENS, TeacherOutputs
from maxtext.training.teacher import saved_outputs

_LOG = logging.getLogger(__name__)


class RunData:
  """Batches of training and of evaluation.

  Args:
    config: the run.
    batch: an abstract batch of training.
    eval_batch: an abstract batch of evaluation.
    source: data of the caller's own; None takes the configured data.
  """

  def __init__(self, config: MaxTextConfig, batch: Any, eval_batch: Any, source: BatchSource | None) -> None:
    self._config, self._source = config, source
    self._batches = {"train": batch, "eval": eval_batch}
    self._opened: dict[SplitName, OpenedData] = {}

  def check(self) -> None:
    """Raises where data of training or evaluation is missing or wrong, before anything costly has begun."""
    if self._source is None:
      for split in self.splits:
        if split == "train" and self._saved is not None:
          continue
        data = self.opened(split)
        if data.batch.extra and not data.sources:
          instead = "" if LABEL in data.batch.extra else "set precompute_ref_log_probs=false, or "
          raise ConfigError(
            f"hf_path={data.options.hub.path} is streamed, so its rows have no numbers: {instead}read files on disk."
          )

  def size(self) -> tuple[int, int | None] | None:
    """Documents and tokens of the training data; None for what its source does not know before it is read."""
    if self._source is not None or self._saved is not None or not self.opened("train").sources:
      return None
    sources = self.opened("train").sources
    totals = [source.documents.counts.total for source in sources]
    documents = sum(sum(source.documents.sizes) for source in sources)
    return documents, None if None in totals else sum(total or 0 for total in totals)

  @cached_property
  def _saved(self) -> TeacherOutputs | None:
    """The outputs of a teacher that are read instead of other training data."""
    return saved_outputs(self._config) if TEACHER_TOKENS in getattr(self._batches["train"], "extra", ()) else None

  @property
  def is_configured(self) -> bool:
    """Whether it is the configured data, and not the caller's own."""
    return self._source is None

  @property
  def splits(self) -> tuple[SplitName, ...]:
    """What the run reads."""
    return ("train", "eval") if self.evaluates else ("train",)

  @cached_property
  def evaluates(self) -> bool:
    """Whether the run evaluates. A recipe's `eval_interval` does not keep it from training on a prepared corpus that
    holds nothing out: it is warned about once. With a `target_eval_loss` that corpus is an error."""
    c = self._config
    if c.eval_interval <= 0 or self._source is not None:
      return c.eval_interval > 0
    lacking = missing_eval_data(data_options(c))
    if lacking is None or c.target_eval_loss:
      return True
    if not jax.process_index():
      _LOG.warning(f"maxtext: eval_interval={c.eval_interval} evaluates nothing: {lacking}.")
    return False

  def opened(self, split: SplitName) -> OpenedData:
    """The configured data."""
    if split not in self._opened:
      self._opened[split] = open_data(data_options(self._config), self._batches[split], split)
    return self._opened[split]

  def attach_reference(self, split: SplitName, found: ReferenceLogProbs) -> None:
    """From now on the pairs of a split bring the reference model's log-probabilities, also in reader processes."""
    data = self.opened(split)
    assert data.options.conversations is not None
    conversations = replace(data.options.conversations, reference_log_probs=(found.path, found.model))
    options = replace(data.options, conversations=conversations)
    self._opened[split] = data._replace(options=options, sources=tuple(found.attach(data.sources)))

  def feed(self, position: IteratorState | None = None, split: SplitName = "train") -> Iterator[BatchWithState]:
    """The data from a position on."""
    batch = self._batches[split]
    if self._source is not None:
      return self._source.batches(batch, position, split)
    if split == "train" and self._saved is not None:
      return self._saved.batches(batch, position)
    data = self.opened(split)
    if REFERENCE in batch.extra and not (data.options.conversations and data.options.conversations.reference_log_probs):
      raise ConfigError("The objective needs reference log-probabilities in the data: give it precomputed=False.")
    return make_dataloader(data.options, batch, position, split, data)
