"""The rows of one worker, described so that any process can make them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from maxtext.data.batch_size_rampup import BatchSizeSchedule
from maxtext.data.documents import DataSource, DocumentSpans
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import DataOptions
from maxtext.data.packing import Packing
from maxtext.data.sources import open_sources
from maxtext.data.splits import SplitName
from maxtext.data.streams import PackedStreams, Rows


@dataclass(frozen=True)
class WorkerShard:
  """Some of a run's streams, from a batch on.

  Attributes:
    options: the data.
    split: training or evaluation.
    packing: how rows are filled.
    sizes: rows of each batch of the whole run.
    streams: the numbers of the streams; whole rows of the smallest batch.
    state: int32[len(streams), 3], the state of each stream.
    batch: the index of the first batch.
    spans: how the long documents of each source are split.
  """

  options: DataOptions
  split: SplitName
  packing: Packing
  sizes: BatchSizeSchedule
  streams: tuple[int, ...]
  state: np.ndarray
  batch: int
  spans: tuple[DocumentSpans, ...]

  def rows(self, sources: Sequence[DataSource] | None = None) -> Iterator[Rows]:
    """The rows of this shard in every batch; after the end of the data, empty rows for ever.

    With more streams than rows, a row takes turns among neighbouring streams, so that a row keeps its streams when the
    batch grows. `sources` may be open already.
    """
    options, split, total = self.options, self.options.split(self.split), self.sizes.streams
    opened = [replace(s, spans=cut) for s, cut in zip(sources or open_sources(options, split), self.spans, strict=True)]
    mixture = SourceMixture(opened, total, options.seed, split.shuffle, split.epochs, options.vocab_size)
    read_ahead = max(-(-split.read_ahead // len(self.streams)), 4)
    streams = PackedStreams(mixture, self.packing, self.streams, self.state, read_ahead, options.media)
    for batch in itertools.count(self.batch):
      per_row = total // self.sizes.of(batch)
      yield streams.rows(range(batch % per_row, len(self.streams), per_row))

  def divide(self, parts: int) -> list["WorkerShard"]:
    """At most `parts` smaller shards; no row is divided."""
    unit = self.sizes.streams // min(self.sizes.rows)
    rows = len(self.streams) // unit
    cuts = sorted({unit * (rows * i // parts) for i in range(parts + 1)})
    return [replace(self, streams=self.streams[a:b], state=self.state[a:b]) for a, b in itertools.pairwise(cuts)]
