"""Streams: exact stops and restarts on any hosts, every document once an epoch, packing beside Grain's."""

import hashlib
import itertools
import os
import resource
import threading
import time

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext.configs.errors import RunError
from maxtext.data import records
from maxtext.data.documents import DataSource
from maxtext.data.mixture import SourceMixture
from maxtext.data.order import FEW_SHARDS, DocumentOrder, ShuffleWindow
from maxtext.data.packing import Packing
from maxtext.data.prefetch import Prefetcher
from maxtext.data.prepared_corpus import PreparedCorpus
from maxtext.data.spans import cut_long_documents
from maxtext.data.streams import PackedStreams, Rows
from tests.corpora import write_corpus

PACKINGS = {
  "concat_then_split": Packing(64, "concat_then_split", look_ahead=1),
  "first_fit": Packing(64, "first_fit"),
  "best_fit": Packing(64, "best_fit"),
  "few_segments": Packing(64, "first_fit", max_segments=2),
  "unpacked": Packing(64, "first_fit", max_segments=1, look_ahead=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp("corpus") / "a", (37, 1, 50, 12))


@pytest.fixture(scope="module")
def sources(folder, tmp_path_factory):
  other = write_corpus(tmp_path_factory.mktemp("corpus") / "b", (30, 30), seed=1)
  book = write_corpus(tmp_path_factory.mktemp("corpus") / "c", (1, 5, 2), seed=2, long={0: 9_000, 4: 400, 7: 30_000})
  several = [DataSource(PreparedCorpus(folder), 0.7), DataSource(PreparedCorpus(other), 0.3)]
  return {
    "one": [DataSource(PreparedCorpus(folder))],
    "mixture": several,
    "cut": cut_long_documents([DataSource(PreparedCorpus(book))], 8, 64),
    "cut mixture": cut_long_documents([*several, DataSource(PreparedCorpus(book), 0.02)], 8, 64),
  }


def equal(a, b):
  return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def documents_in(rows):
  """The numbers of the documents that begin in these rows, told by their first two tokens."""
  begins = (rows.positions == 0) & (rows.segments > 0)
  return rows.inputs[begins] * 1000 + rows.targets[begins]


@settings(max_examples=60, deadline=None)
@given(
  mixture=st.sampled_from(["one", "mixture", "cut", "cut mixture"]),
  packing=st.sampled_from(sorted(PACKINGS)),
  epochs=st.sampled_from([None, 1, 3]),
  shuffle=st.booleans(),
  # Batches until the next stop, hosts, and streams per row, which is how a batch grows.
  stops=st.lists(
    st.tuples(st.integers(1, 12), *[st.sampled_from([1, 2, 4])] * 2).filter(lambda stop: stop[1] * stop[2] <= 8),
    min_size=1,
    max_size=4,
  ),
  read_ahead=st.integers(0, 9),
)
def test_stopped_anywhere_and_resumed_on_other_hosts_the_rows_are_the_same(
  sources, mixture, packing, epochs, shuffle, stops, read_ahead
):
  corpus = SourceMixture(sources[mixture], 8, seed=3, shuffle=shuffle, epochs=epochs)
  whole = PackedStreams(corpus, PACKINGS[packing], range(8))
  state, numbers = np.zeros((8, 3), np.int32), itertools.count()
  for batches, hosts, per_row in stops:
    share = 8 // hosts
    parts = [
      PackedStreams(corpus, PACKINGS[packing], range(a, a + share), state[a : a + share], read_ahead)
      for a in range(0, 8, share)
    ]
    for number in itertools.islice(numbers, batches):
      turn = number % per_row
      expected = whole.rows(range(turn, 8, per_row))
      made = [part.rows(range(turn, share, per_row)) for part in parts]
      assert equal(expected, Rows.join(made))
      state = expected.after


@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_every_document_is_used_wholly_and_once_an_epoch(folder, packing):
  source = PreparedCorpus(folder)
  streams = PackedStreams(SourceMixture([DataSource(source)], 8, seed=5, epochs=2), PACKINGS[packing], range(8))
  pairs, begun = [], []
  while (rows := streams.rows(range(8))).segments.any():
    real = rows.segments > 0
    pairs.append(np.stack([rows.inputs[real], rows.targets[real]]))
    begun.append(documents_in(rows))
    assert not rows.inputs[~real].any()
  assert not streams.rows(range(8)).segments.any()
  every = pairs_of([source.tokens(record) for record in source.read(range(100))])
  assert np.array_equal(sorted_pairs(np.concatenate(pairs, axis=1)), sorted_pairs(np.tile(every, 2)))
  if packing != "concat_then_split":  # it begins the rest of a cut document anew, in the next row
    return
  assert set(np.concatenate(begun).tolist()) >= set(range(100))


def pairs_of(documents):
  """Every input with its target."""
  return np.concatenate([np.stack([d[:-1], d[1:]]) for d in documents], axis=1)


def sorted_pairs(pairs):
  return pairs[:, np.lexsort(pairs)]


@settings(max_examples=25, deadline=None)
@given(
  lengths=st.lists(st.one_of(st.integers(2, 200), st.integers(2, 20_000)), min_size=1, max_size=12),
  streams=st.sampled_from([1, 2, 7, 8]),
  length=st.sampled_from([16, 64]),
  packing=st.sampled_from(["concat_then_split", "first_fit", "best_fit"]),
)
def test_cut_documents_are_used_wholly_once_and_by_all_streams_alike(
  tmp_path_factory, lengths, streams, length, packing
):
  folder = write_corpus(tmp_path_factory.mktemp("cut"), (len(lengths),), long=dict(enumerate(lengths)))
  source = PreparedCorpus(folder)
  (cut,) = cut_long_documents([DataSource(source)], streams, length)
  made = PackedStreams(
    SourceMixture([cut], streams, seed=5, epochs=2), Packing(length, packing, look_ahead=1), range(streams)
  )
  pairs, filled = [], np.zeros(streams, int)
  while (rows := made.rows(range(streams))).segments.any():
    real = rows.segments > 0
    filled += real.any(axis=1)
    pairs.append(np.stack([rows.inputs[real], rows.targets[real]]))
  every = pairs_of([source.tokens(record) for record in source.read(range(len(lengths)))])
  assert np.array_equal(sorted_pairs(np.concatenate(pairs, axis=1)), sorted_pairs(np.tile(every, 2)))
  # Two epochs of a stream: it may have one item more than another, and its share of short documents differs.
  span = cut.spans.inputs // length or max(-(-n // length) for n in lengths)
  assert filled.max() - filled.min() <= 2 * span * (1 + len(lengths) / streams) + 2


def test_one_document_fills_all_rows_to_the_end(tmp_path):
  folder = write_corpus(tmp_path, (1,), long={0: 289_333})
  (source,) = cut_long_documents([DataSource(PreparedCorpus(folder))], 8, 256)
  assert source.spans.inputs == 2 * 256
  for packing in ("concat_then_split", "first_fit"):
    streams = PackedStreams(SourceMixture([source], 8, seed=0, epochs=1), Packing(256, packing), range(8))
    batches = list(
      itertools.takewhile(lambda rows: rows.segments.any(axis=1).all(), map(streams.rows, [range(8)] * 999))
    )
    real = np.concatenate([rows.segments for rows in batches]) > 0
    assert len(batches) >= 0.98 * 289_332 / 256 / 8
    assert real.mean() > 0.995


def test_a_stream_reads_a_long_document_once_and_holds_only_its_spans(tmp_path):
  folder = write_corpus(tmp_path, (1,), long={0: 289_333})
  source = PreparedCorpus(folder)
  (cut,) = cut_long_documents([DataSource(source)], 8, 256)
  asked = []
  read, source.read = source.read, lambda numbers: asked.extend(numbers) or read(numbers)
  streams = PackedStreams(SourceMixture([cut], 8, seed=0, epochs=1), Packing(256, "first_fit"), range(8))
  while streams.rows(range(8)).segments.any():
    held = [d for stream in streams._held for d in stream.values() if len(d.inputs)]
    assert all(d.inputs.base is d.targets.base and len(d.inputs.base) <= 513 for d in held)
  assert asked == [0]


def test_where_no_document_is_long_the_order_is_what_it_always_was(tmp_path):
  """Positions in checkpoints of earlier versions stay what they were; the digest is of a version without spans."""
  source = DataSource(PreparedCorpus(write_corpus(tmp_path, (37, 1, 50, 12), lengths=(1, 60))))
  assert cut_long_documents([source], 8, 64) == [source]
  streams, digest = PackedStreams(SourceMixture([source], 8, seed=3), PACKINGS["first_fit"], range(8)), hashlib.sha256()
  for _ in range(9):
    for array in streams.rows(range(8))[:5]:
      digest.update(array.tobytes())
  assert digest.hexdigest() == "2172150deeb4f910a657f204a1a592e2db7ad854a6c66394f4fa0b691fa88961"


def test_documents_are_read_to_be_measured_only_where_no_list_says_enough(tmp_path):
  long = {7: 50_000, 37: 50_000}
  folders = {
    older: write_corpus(tmp_path / str(older), (30, 30), lengths=(50, 150), long=long, older=older)
    for older in (False, True)
  }
  cut = [cut_long_documents([DataSource(PreparedCorpus(folder))], 16, 64)[0].spans for folder in folders.values()]
  assert cut[0] == cut[1], "a list or not, the cut is the same"
  for folder in folders.values():
    for shard in folder.glob("*.array_record"):
      shard.unlink()
  listed, older = (DataSource(PreparedCorpus(folder)) for folder in folders.values())
  assert cut_long_documents([listed], 1, 64)[0].spans.long == tuple(long.items())
  assert cut_long_documents([older], 15, 64) == [older], "too many to read them for this alone"
  for source, streams, length in ((listed, 8, 16), (older, 16, 64)):  # spans of 208, and a shard lists those above 414
    with pytest.raises(RunError, match="cannot be read"):
      cut_long_documents([source], streams, length)


def test_weights_of_a_mixture_count_documents_that_are_cut_as_one(tmp_path):
  book = write_corpus(tmp_path / "book", (1,), long={0: 50_000})
  short = write_corpus(tmp_path / "short", (500,), lengths=(10, 60), seed=1)
  sources = cut_long_documents([DataSource(PreparedCorpus(book), 0.01), DataSource(PreparedCorpus(short), 0.99)], 4, 64)
  spans = -(-49_999 // sources[0].spans.inputs)
  corpus = SourceMixture(sources, 4, seed=0)
  found = np.bincount([corpus._locate(s, k)[0] for s in range(4) for k in range(40_000)])
  assert spans > 100
  assert found[0] / spans / found[1] == pytest.approx(0.01 / 0.99, rel=0.02)


def test_each_epoch_has_every_document_once_in_its_own_order():
  order = DocumentOrder([5, 1, 9, 30, 2, 3], ShuffleWindow(shards=2), (0,))
  epochs = [[order.document(50 * e + i) for i in range(50)] for e in range(4)]
  assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4
  assert epochs[1] != [DocumentOrder([50], FEW_SHARDS, (1,)).document(i) for i in range(50)], "a seed is not an epoch"
  assert [DocumentOrder([5, 5], FEW_SHARDS, (0,), shuffle=False).document(i) for i in range(12)] == [*range(10), 0, 1]


def test_a_window_touches_few_shards():
  order, edges = DocumentOrder([10] * 100, ShuffleWindow(shards=4), (7,)), np.arange(0, 1000, 10)
  for window in range(25):
    numbers = [order.document(i) for i in range(40 * window, 40 * window + 40)]
    assert len(set(np.searchsorted(edges, numbers, side="right"))) == 4
    assert numbers != sorted(numbers)


def grain_rows(corpus, stream, pack):
  """What Grain makes of one stream's documents."""

  class Documents(grain.sources.RandomAccessDataSource):
    def __len__(self):
      return 60

    def __getitem__(self, k):
      (tokens,) = corpus.read([(stream, k)])
      return {"inputs": tokens[:-1].astype(np.int32), "targets": tokens[1:].astype(np.int32)}

  dataset = grain.MapDataset.source(Documents()).to_iter_dataset()
  return iter(pack(dataset, {"inputs": 64, "targets": 64}))


def concat_then_split(dataset, lengths):
  split = grain.experimental.ConcatThenSplitIterDataset
  return split(dataset, length_struct=lengths)


def one_bin(dataset, lengths):
  return grain.experimental.FirstFitPackIterDataset(dataset, length_struct=lengths, num_packing_bins=1)


@pytest.mark.parametrize(
  ("packing", "pack", "lengths"),
  [
    (PACKINGS["concat_then_split"], concat_then_split, (1, 150)),
    (Packing(64, "first_fit", look_ahead=1), one_bin, (1, 60)),
  ],
  ids=["concat_then_split", "first_fit"],
)
def test_rows_are_those_of_grain_on_the_same_documents(tmp_path, packing, pack, lengths):
  corpus = SourceMixture([DataSource(PreparedCorpus(write_corpus(tmp_path, (100, 80), lengths=lengths)))], 4, seed=1)
  streams = PackedStreams(corpus, packing, range(4))
  oracles = [grain_rows(corpus, stream, pack) for stream in range(4)]
  for _ in range(10):
    rows = streams.rows(range(4))
    for r, oracle in enumerate(oracles):
      expected = next(oracle)
      real = expected["inputs_segment_ids"] > 0
      assert np.array_equal(rows.segments[r], expected["inputs_segment_ids"])
      assert np.array_equal(rows.positions[r], np.where(real, expected["inputs_positions"], 0))
      assert np.array_equal(rows.inputs[r], expected["inputs"])
      assert np.array_equal(rows.targets[r], expected["targets"])


def test_looking_ahead_leaves_less_padding_and_keeps_documents_whole(tmp_path):
  corpus = SourceMixture(
    [DataSource(PreparedCorpus(write_corpus(tmp_path, (600,), lengths=(1, 60))))], 2, seed=0, epochs=1
  )
  padding = {}
  for name, ahead in (("first_fit", 1), ("first_fit", 31), ("best_fit", 31)):
    streams = PackedStreams(corpus, Packing(64, name, look_ahead=ahead), range(2))
    made = [streams.rows(range(2)) for _ in range(100)]
    padding[name, ahead] = np.mean([rows.segments == 0 for rows in made])
    begun = np.concatenate([documents_in(rows) for rows in made])
    assert len(set(begun.tolist())) == len(begun), "no document is cut"
  assert padding["best_fit", 31] < padding["first_fit", 31] < padding["first_fit", 1] / 3


def test_mixtures_give_every_row_every_source_in_its_share(tmp_path):
  weights = (0.62, 0.3, 0.08)
  sources = [
    DataSource(PreparedCorpus(write_corpus(tmp_path / str(i), (40,), seed=i)), w) for i, w in enumerate(weights)
  ]
  corpus = SourceMixture(sources, streams=16, seed=0)
  for stream in (0, 5, 15):
    found = [corpus._locate(stream, k) for k in range(5000)]
    shares = np.bincount([source for source, _ in found]) / 5000
    assert np.allclose(shares, weights, rtol=0.02)
  seen = {place for stream in range(16) for k in range(500) for place in [corpus._locate(stream, k)]}
  assert len(seen) == 16 * 500, "no document twice"
  first = [corpus._locate(stream, 0)[0] for stream in range(16)]
  assert len(set(first)) > 1, "a batch is not of one source"


def test_a_thousand_shards_need_few_open_files_and_little_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(records, "MOST_OPEN", 32)
  folder = write_corpus(tmp_path, [12] * 1000, lengths=(1, 60))
  source = PreparedCorpus(folder)
  streams = PackedStreams(SourceMixture([DataSource(source)], 16, seed=0, epochs=1), PACKINGS["first_fit"], range(16))
  before, open_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))
  most = begun = 0
  while (rows := streams.rows(range(16))).segments.any():
    begun += len(documents_in(rows))
    most = max(most, len(os.listdir("/proc/self/fd")) - open_before)
  assert begun == 12000
  assert source._records.open_shards <= 32
  assert most <= 34
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_restoring_256_streams_takes_under_a_second(tmp_path):
  source = DataSource(PreparedCorpus(write_corpus(tmp_path, [5000] * 4, lengths=(1, 60))))
  streams = PackedStreams(SourceMixture([source], 256, seed=0), PACKINGS["first_fit"], range(256))
  for _ in range(3):
    state = streams.rows(range(256)).after
  following, seconds = streams.rows(range(256)), []
  for _ in range(3):  # other work on the machine may hold one of them up
    start = time.perf_counter()
    again = PackedStreams(
      SourceMixture([DataSource(PreparedCorpus(tmp_path))], 256, seed=0), PACKINGS["first_fit"], range(256), state
    )
    assert equal(again.rows(range(256)), following)
    seconds.append(time.perf_counter() - start)
  assert min(seconds) < 1


class Asked:
  """Documents, and how many were asked for at a time."""

  def __init__(self, documents):
    self.documents, self.calls = documents, []

  def read(self, wanted):
    self.calls.append(len(wanted))
    return self.documents.read(wanted)


def test_reading_ahead_makes_fewer_and_larger_reads(folder):
  calls = {}
  for read_ahead in (0, 40):
    asked = Asked(SourceMixture([DataSource(PreparedCorpus(folder))], 4, seed=0))
    streams = PackedStreams(asked, PACKINGS["concat_then_split"], range(4), read_ahead=read_ahead)
    for _ in range(20):
      streams.rows(range(4))
    calls[read_ahead] = asked.calls
  assert len(calls[40]) < len(calls[0]) / 3
  assert calls[40][0] == 4 * 41


def test_several_shards_are_read_at_a_time():
  together = threading.Barrier(3, timeout=20)

  class Reader:
    def read(self, places):
      together.wait()
      return places

  shards = [records.Shard(str(i), 10, 0) for i in range(3)]
  found = records.Records(shards, lambda shard: Reader(), threads=3).read([25, 3, 14, 1])
  assert found == [5, 3, 4, 1]


def test_things_are_made_ahead_so_far_and_no_further():
  made, closed = [], threading.Event()

  def make():
    try:
      for i in range(6):
        made.append(i)
        yield i
      raise RuntimeError("broken")
    finally:
      closed.set()

  ahead = Prefetcher(make(), depth=2)
  deadline = time.monotonic() + 20
  while len(made) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
  time.sleep(0.05)
  assert made == [0, 1, 2], "two are ready, one waits for its place"
  assert [next(ahead) for _ in range(6)] == list(range(6))
  for _ in range(2):
    with pytest.raises(RuntimeError, match="broken"):
      next(ahead)
  assert closed.wait(20)
  unread = Prefetcher(make(), depth=1)
  closed.clear()
  unread.close()
  assert closed.is_set()
