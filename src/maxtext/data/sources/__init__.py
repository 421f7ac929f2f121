"""Data sources. Each `dataset_type` has a function that opens its sources, and imports its library when called."""

from collections.abc import Callable
from dataclasses import replace

from maxtext.configs.types import DatasetType
from maxtext.data.documents import DataSource
from maxtext.data.options import DataOptions
from maxtext.data.reference_log_probs import ReferenceLogProbs
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.grain import open_grain
from maxtext.data.sources.hf import open_hf
from maxtext.data.sources.olmo import open_olmo
from maxtext.data.sources.tfds import open_tfds
from maxtext.data.splits import Split


def open_sources(options: DataOptions, split: Split) -> list[DataSource]:
  """Opens the sources of training or evaluation data, with their mixture weights."""
  sources = _OPEN[options.kind](options, split)
  if options.conversations is not None and options.conversations.labelled:
    sources = [_with_neighbours(source) for source in sources]
  if options.conversations is None or not options.conversations.reference_log_probs:
    return sources
  return ReferenceLogProbs.read_file(*options.conversations.reference_log_probs, sources).attach(sources)


def _with_neighbours(source: DataSource) -> DataSource:
  assert isinstance(source.documents, ColumnDocuments)
  return replace(source, documents=source.documents.with_neighbours())


_OPEN: dict[DatasetType, Callable[[DataOptions, Split], list[DataSource]]] = {
  DatasetType.GRAIN: open_grain,
  DatasetType.HF: open_hf,
  DatasetType.TFDS: open_tfds,
  DatasetType.C4MLPERF: open_tfds,
  DatasetType.OLMO_GRAIN: open_olmo,
}
