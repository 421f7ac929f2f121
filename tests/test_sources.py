"""Every source, from real files through its own library: all documents, once, and the same after a stop."""

import itertools
import json
import struct
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.batch import Batch
from maxtext.data.dataloader import make_dataloader
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.prepared_corpus import PreparedCorpus
from maxtext.data.sources.olmo import is_repetitive
from maxtext.data.sources.tf_example import _example
from maxtext.data.tokenizers import load_tokenizer
from tests import vocabularies
from tests.corpora import write_corpus
from tests.support import tiny

LENGTH, ROWS = 32, 4
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "12", "judges"]
TEXTS = [f"{i} {' '.join(np.random.default_rng(i).choice(WORDS, 1 + i % 17))}" for i in range(60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  import datasets

  folder = tmp_path_factory.mktemp("sources")
  vocabularies.hugging_face(folder / "vocabulary")
  for write in WRITERS:
    write(folder)
  with pytest.MonkeyPatch.context() as patch:  # the library's copies go here, also those of reader processes
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    yield folder


def example(text):
  message = _example()()
  message.features.feature["text"].bytes_list.value.append(text.encode())
  message.features.feature["tokens"].int64_list.value.extend(text.encode())
  return message.SerializeToString()


def write_array_record(folder):
  for part in range(3):
    writer = ArrayRecordWriter(str(folder / f"part-{part}.array_record"), "group_size:1")
    for text in TEXTS[part::3]:
      writer.write(example(text))
    writer.close()


def checksum(content):
  """CRC-32C a bit at a time, as its definition has it, masked."""
  crc = 0xFFFFFFFF
  for byte in content:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32))


def tf_record(content, size=None):
  length = struct.pack("<Q", len(content) if size is None else size)
  return length + checksum(length) + content + checksum(content)


def write_tf_record(folder):
  for part in range(2):
    content = b"".join(tf_record(example(text)) for text in TEXTS[part::2])
    (folder / f"part-{part}.tfrecord").write_bytes(content)


def write_parquet(folder):
  import pyarrow
  import pyarrow.parquet

  table = pyarrow.table({"number": range(60), "text": TEXTS, "tokens": [list(text.encode()) for text in TEXTS]})
  pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)


def write_json(folder):
  for part in range(2):
    lines = (json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS[part::2])
    (folder / f"part-{part}.jsonl").write_text("".join(lines))


def write_tfds(folder):
  import tensorflow_datasets as tfds

  class Letters(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    code_path = None

    def _info(self):
      features = {"text": tfds.features.Text(), "tokens": tfds.features.Sequence(np.int32)}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      yield from ((i, {"text": text, "tokens": list(text.encode())}) for i, text in enumerate(TEXTS))

  Letters(data_dir=str(folder / "tfds"), file_format="array_record").download_and_prepare()


WRITERS = (write_array_record, write_tf_record, write_parquet, write_json, write_tfds)
SOURCES = {
  "arrayrecord": {"dataset_type": "grain", "grain_train_files": "{}/part-*.array_record"},
  "tfrecord": {"dataset_type": "grain", "grain_train_files": "{}/part-*.tfrecord", "grain_file_type": "tfrecord"},
  "parquet": {
    "dataset_type": "grain", "grain_train_files": "{}/all.parquet", "grain_file_type": "parquet",
    "grain_shuffle_buffer_size": 10,
  },
  "json": {"dataset_type": "hf", "hf_path": "json", "hf_train_files": "{}/part-*.jsonl"},
  "hf-parquet": {"dataset_type": "hf", "hf_path": "parquet", "hf_train_files": "{}/all.parquet"},
  "streamed": {
    "dataset_type": "hf", "hf_path": "json", "hf_train_files": "file://{}/part-*.jsonl", "grain_shuffle_buffer_size": 7,
  },
  "tfds": {"dataset_type": "tfds", "dataset_path": "{}/tfds", "dataset_name": "letters:1.0.0"},
  "c4_mlperf": {"dataset_type": "c4_mlperf", "dataset_path": "{}/tfds", "dataset_name": "letters:1.0.0"},
}  # fmt: skip
PACKINGS = {
  "first_fit": {},
  "best_fit": {"grain_packing_type": "best_fit"},
  "concat_then_split": {"grain_packing_type": "concat_then_split"},
  "few": {"max_segments_per_seq": 2},
  "unpacked": {"packing": False},
}


def configured(place, source, **changes):
  keys = {key: value.format(place) if isinstance(value, str) else value for key, value in SOURCES[source].items()}
  text = {"tokenizer_type": "huggingface", "tokenizer_path": str(place / "vocabulary"), "vocab_size": 300}
  fed = {"grain_worker_count": 0, "generate_padding_batch_train": True, "max_target_length": LENGTH}
  return tiny(**(text | fed | keys | changes))


def feed(config, position=None, split="train"):
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.int32, jnp.float32)
  sharding = NamedSharding(mesh, PartitionSpec("data", None))
  shape = ROWS, config.max_target_length
  return make_dataloader(
    data_options(config), Batch(*(jax.ShapeDtypeStruct(shape, k, sharding=sharding) for k in kinds)), position, split
  )


def arrays(fed):
  return [np.asarray(array) for array in jax.tree.leaves(fed.batch)]


def documents(batches):
  """The token pairs of every document, whichever rows they are in."""
  found = []
  for inputs, targets, _, segments, weights in batches:
    assert np.array_equal(weights, segments > 0)
    for row in range(len(inputs)):
      for segment in range(1, segments[row].max() + 1):
        here = segments[row] == segment
        found.append((tuple(inputs[row][here].tolist()), tuple(targets[row][here].tolist())))
  return Counter(found)


@pytest.mark.parametrize("source", SOURCES)
def test_every_document_is_fed_once_an_epoch(place, source):
  config = configured(place, source, num_epoch=2)
  batches = [arrays(fed) for fed in feed(config)]
  encode = load_tokenizer(tokenizer_options(config)).encode
  expected = [encode(text)[: LENGTH + 1].tolist() for text in TEXTS]
  if source == "c4_mlperf":  # it cuts documents, so only tokens can be counted
    pieces = documents(batches).elements()
    pairs = Counter(pair for piece in pieces for pair in zip(*piece, strict=True))
    assert pairs == Counter(pair for tokens in expected * 2 for pair in itertools.pairwise(tokens))
  else:
    assert documents(batches) == Counter((tuple(t[:-1]), tuple(t[1:])) for t in expected * 2)
  assert Counter(map(len, expected))[LENGTH + 1], "some are cut"


@settings(max_examples=40, deadline=None)
@given(
  source=st.sampled_from(sorted(SOURCES)),
  packing=st.sampled_from(sorted(PACKINGS)),
  shuffle=st.booleans(),
  stops=st.lists(st.integers(1, 5), min_size=1, max_size=3),
  buffer=st.integers(1, 3),
)
def test_stopped_after_any_batch_and_resumed_the_batches_are_the_same(place, source, packing, shuffle, stops, buffer):
  changes = {} if source == "c4_mlperf" else PACKINGS[packing]
  config = configured(
    place, source, enable_data_shuffling=shuffle, num_epoch=3, grain_per_worker_buffer_size=buffer, **changes
  )
  whole, position, made = feed(config), None, []
  for stop in stops:
    resumed = feed(config, position)
    for _ in range(stop):
      made.append(next(resumed))
      assert all(map(np.array_equal, arrays(made[-1]), arrays(next(whole))))
    position = {name: np.asarray(array) for name, array in made[-1].iterator_state().items()}
    resumed.close()
  whole.close()


@pytest.mark.parametrize("source", ["arrayrecord", "tfrecord", "parquet", "tfds"])
def test_tokens_are_taken_as_they_are(place, source):
  config = configured(
    place, source, tokenize_train_data=False, train_data_columns=["tokens"], tokenizer_path=None, max_target_length=128
  )
  found = documents([arrays(fed) for fed in feed(config)])
  assert found == Counter((tuple(text.encode()[:-1]), tuple(text.encode()[1:])) for text in TEXTS)


def test_long_texts_are_cut_or_split(place):
  tokens = {}
  for cut in (True, False):
    config = configured(place, "json", use_truncation=cut)
    tokens[cut] = sum(int(arrays(fed)[4].sum()) for fed in feed(config))
  encode = load_tokenizer(tokenizer_options(config)).encode
  assert tokens[True] == sum(min(len(encode(text)) - 1, LENGTH) for text in TEXTS)
  assert tokens[False] == sum(len(encode(text)) - 1 for text in TEXTS) > tokens[True]


def test_columns_are_lines_of_one_document(place):
  config = configured(place, "parquet", train_data_columns=["text", "text"], enable_data_shuffling=False)
  first = load_tokenizer(tokenizer_options(config)).encode(f"{TEXTS[0]}\n{TEXTS[0]}")
  assert arrays(next(feed(config)))[0][0, : len(first) - 1].tolist() == first[:-1].tolist()


@pytest.mark.parametrize("source", ["parquet", *(pytest.param(s, marks=pytest.mark.slow) for s in ("json", "tfds"))])
def test_reader_processes_read_text_too(place, source):
  alone, helped = (feed(configured(place, source, grain_worker_count=n)) for n in (0, 2))
  for _ in range(3):
    assert all(map(np.array_equal, arrays(next(alone)), arrays(next(helped))))
  helped.close()


def test_a_window_of_a_format_read_in_order_touches_few_row_groups(place):
  from maxtext.data.order import DocumentOrder
  from maxtext.data.sources import open_sources

  config = configured(place, "parquet")
  (source,) = open_sources(data_options(config), data_options(config).train)
  assert source.documents.sizes == [7] * 8 + [4]
  order = DocumentOrder(source.documents.sizes, source.documents.window, (0,))
  groups = {order.document(i) // 7 for i in range(14)}
  assert len(groups) == 2, "at least ten documents, in whole row groups"


def test_mixtures_from_a_file_and_from_a_key(tmp_path):
  for name, seed in (("a", 0), ("b", 1)):
    write_corpus(tmp_path / name, (2000,), seed, lengths=(10, 11))
  listed = {"first": {"path": f"{tmp_path}/a", "weight": 3}, "second": {"path": f"{tmp_path}/b", "weight": 1}}
  (tmp_path / "mixture.json").write_text(json.dumps(listed))
  base = {"dataset_type": "grain", "vocab_size": 1000, "grain_worker_count": 0, "packing": False, "num_epoch": 9}
  ways = (
    {"grain_train_mixture_config_path": str(tmp_path / "mixture.json")},
    {"grain_train_files": f"{tmp_path}/a,3;{tmp_path}/b,1", "grain_data_source_max_workers": 1},
  )
  feeds = [feed(tiny(**base, **way)) for way in ways]
  of_a = {tuple(row[:11]) for fed in feed(tiny(**base | {"num_epoch": 1}, grain_train_files=f"{tmp_path}/a"))
          for row in arrays(fed)[0].tolist()}  # fmt: skip
  made = [arrays(next(feeds[0]))[0] for _ in range(400)]
  assert all(np.array_equal(arrays(next(feeds[1]))[0], batch) for batch in made[:5])
  for row in range(ROWS):
    share = np.mean([tuple(batch[row, :11].tolist()) in of_a for batch in made])
    assert share == pytest.approx(0.75, rel=0.02)


def test_evaluation_of_every_source(place):
  keys = {
    "arrayrecord": {"grain_eval_files": f"{place}/part-1.array_record"},
    "json": {"hf_eval_files": f"{place}/part-1.jsonl"},
    "tfds": {"eval_dataset_name": "letters:1.0.0", "eval_split": "train[:20]"},
  }
  for source, changes in keys.items():
    config = configured(place, source, generate_padding_batch_eval=True, grain_worker_count_eval=0, **changes)
    found = documents([arrays(fed) for fed in feed(config, split="eval")])
    assert found.total() == {"arrayrecord": 20, "json": 30, "tfds": 20}[source]


def write_sequences(folder, files, length):
  rng = np.random.default_rng(0)
  tokens = [rng.integers(0, 100, length * n + 3, dtype=np.int32) for n in files]
  tokens[1][length : 2 * length] = np.tile([5, 6, 7], length)[:length]
  tokens[0].tofile(folder / "raw.npy")
  np.save(folder / "with-header.npy", tokens[1])
  index = {"sequence_length": length, "files": ["/elsewhere/raw.npy", {"path": "/elsewhere/with-header.npy"}]}
  (folder / "index.json").write_text(json.dumps(index))
  return [t[: length * n].reshape(n, length) for t, n in zip(tokens, files, strict=True)]


def test_sequences_of_one_length_without_those_that_repeat(tmp_path):
  length = 128
  sequences = np.concatenate(write_sequences(tmp_path, (5, 4), length)).tolist()
  keys = {
    "dataset_type": "olmo_grain", "olmo_index_path": str(tmp_path / "index.json"), "max_target_length": length,
    "olmo_path_remap_from": "/elsewhere", "olmo_path_remap_to": str(tmp_path), "generate_padding_batch_train": True,
    "grain_worker_count": 0,
  }  # fmt: skip
  for kept, filtered in ((9, False), (8, True)):
    config = tiny(**keys, olmo_apply_ngram_filter=filtered)
    found = documents([arrays(fed) for fed in feed(config)])
    expected = [s for i, s in enumerate(sequences) if not filtered or i != 6]
    assert found == Counter((tuple(s[:-1]), tuple(s[1:])) for s in expected)
    assert found.total() == kept
  position = next(feed(config)).iterator_state()
  assert all(map(np.array_equal, arrays(next(feed(config, position))), arrays(list(feed(config))[1])))
  with pytest.raises(ConfigError, match=r"npy, record \d: token \d+ at place \d+ is outside of vocab_size=90"):
    list(feed(tiny(**keys, vocab_size=90)))
  with pytest.raises(ConfigError, match="has sequences of 128 tokens: write max_target_length=128"):
    feed(tiny(**keys | {"max_target_length": 64}))
  with pytest.raises(ConfigError, match=r"/elsewhere/raw.npy, listed in .*, is not there: see olmo_path_remap_from"):
    feed(tiny(**keys | {"olmo_path_remap_from": ""}))


@pytest.mark.parametrize(
  ("period", "times", "found"), [(1, 32, True), (1, 31, False), (13, 32, True), (13, 31, False), (14, 40, False)]
)
def test_what_counts_as_repeating(period, times, found):
  rng = np.random.default_rng(0)
  repeated = np.tile(1000 + rng.permutation(period), times)
  assert is_repetitive(np.concatenate([rng.permutation(900), repeated, rng.permutation(900)])) is found
  assert is_repetitive(repeated) is found


def test_mistakes_are_named(place, tmp_path):
  write_corpus(tmp_path / "prepared", (3,))
  (tmp_path / "bad.json").write_text('{"a": {"path": "x"}}')
  torn = tmp_path / "torn.tfrecord"
  torn.write_bytes((place / "part-0.tfrecord").read_bytes()[:-1])
  cases = [
    ("arrayrecord", {"grain_train_files": ""}, "dataset_type=grain needs grain_train_files"),
    ("arrayrecord", {"grain_train_files": "/nowhere"}, "is neither the folder of a prepared corpus"),
    ("arrayrecord", {"grain_train_files": "/a,1;/b"}, "must be one glob, or several with weights"),
    ("arrayrecord", {"grain_train_files": "/a,1;/b,0"}, "every weight must be above 0"),
    ("arrayrecord", {"grain_train_files": f"{tmp_path}/bad.json"}, "bad.json is not an ArrayRecord file"),
    ("arrayrecord", {"grain_train_files": "", "grain_train_mixture_config_path": f"{tmp_path}/bad.json"}, "'weight'"),
    ("arrayrecord", {"train_data_columns": ["txt"]}, ".array_record, record "),
    ("arrayrecord", {"train_data_columns": ["txt"]}, ": no text or integers under 'txt'; it has text, tokens"),
    ("tfrecord", {"grain_train_files": str(torn)}, "torn.tfrecord, record 29 is damaged: it ends at"),
    ("parquet", {"train_data_columns": ["txt"]}, "has no column txt; it has number, text, tokens"),
    ("parquet", {"grain_train_files": str(torn)}, "torn.tfrecord is not a Parquet file"),
    ("parquet", {"grain_file_type": "csv"}, "grain_file_type=csv must be one of arrayrecord, tfrecord, jsonl, parquet"),
    ("json", {"hf_train_files": f"{place}/none.jsonl"}, "none.jsonl cannot be read"),
    ("json", {"train_data_columns": ["txt"]}, "has no txt; it has text, other"),
    ("tfds", {"dataset_name": "words:1.0.0"}, "dataset_name=words:1.0.0 in dataset_path="),
    ("tfds", {"train_data_columns": ["txt"]}, "has no txt; it has text, tokens"),
  ]  # fmt: skip
  for source, changes, message in cases:
    with pytest.raises((ConfigError, RunError)) as error:
      next(feed(configured(place, source, **changes)))
    assert message in str(error.value)


def test_damage_in_a_tf_record_file_is_named_with_the_record(place, tmp_path):
  records = [tf_record(example(text)) for text in TEXTS]
  start = len(b"".join(records[:7]))
  whole = bytearray(b"".join(records))

  def flipped(place):
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]

  cases = {
    "length": (flipped(start + 1), "record 7 is damaged: its length does not have its checksum"),
    "length's checksum": (flipped(start + 9), "record 7 is damaged: its length does not have its checksum"),
    "content": (flipped(start + 40), "record 7 is damaged: its content does not have its checksum"),
    "content's checksum": (flipped(start + len(records[7]) - 1), "record 7 is damaged: its content does not"),
    "absurd length": (whole[:start] + tf_record(b"", 1 << 63), "record 7 is damaged: it ends at byte 92233720"),
    "cut in a header": (whole[: start + 5], "record 7 is damaged: it ends at byte"),
    "cut in a record": (whole[: start + 30], "record 7 is damaged: it ends at byte"),
    "another file": (b"PK" * 99, "record 0 is damaged: its length does not have its checksum; or this is no TFRecord"),
  }
  for name, (content, message) in cases.items():
    (tmp_path / "x.tfrecord").write_bytes(content)
    with pytest.raises(RunError) as error:
      list(feed(configured(place, "tfrecord", grain_train_files=f"{tmp_path}/x.tfrecord")))
    assert f"x.tfrecord, {message}" in str(error.value), name
  (tmp_path / "x.tfrecord").write_bytes(whole)
  assert len(list(feed(configured(place, "tfrecord", grain_train_files=f"{tmp_path}/x.tfrecord")))) > 1


WITH_TOKENS = {
  "arrayrecord": ("grain_train_files", "{}/x.array_record", "x.array_record, record 41: "),
  "tfrecord": ("grain_train_files", "{}/x.tfrecord", "x.tfrecord, record 41: "),
  "parquet": ("grain_train_files", "{}/x.parquet", "x.parquet, record 41: "),
  "json": ("hf_train_files", "{}/x.jsonl", "x.jsonl, row 41: "),
  "streamed": ("hf_train_files", "file://{}/x.jsonl", "Document 41 of the stream of group 0: "),
}


@pytest.mark.parametrize(
  ("source", "token"), [(s, 300) for s in WITH_TOKENS] + [("arrayrecord", -1), ("parquet", 1 << 40)]
)
def test_a_token_outside_the_vocabulary_is_named_with_its_record(place, tmp_path, source, token):
  """The record is far behind the beginning, and the token behind the beginning of the record."""
  import pyarrow
  import pyarrow.parquet

  rows, records = [[1] * 20 for _ in range(50)], []
  rows[41][13] = token
  for row in rows:
    message = _example()()
    message.features.feature["tokens"].int64_list.value.extend(row)
    records.append(message.SerializeToString())
  writer = ArrayRecordWriter(f"{tmp_path}/x.array_record", "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()
  (tmp_path / "x.tfrecord").write_bytes(b"".join(map(tf_record, records)))
  pyarrow.parquet.write_table(pyarrow.table({"tokens": rows}), tmp_path / "x.parquet", row_group_size=7)
  (tmp_path / "x.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
  key, files, where = WITH_TOKENS[source]
  keys = {"tokenize_train_data": False, "train_data_columns": ["tokens"], "tokenizer_path": None}
  config = configured(place, source, **keys, enable_data_shuffling=False, **{key: files.format(tmp_path)})
  with pytest.raises(ConfigError) as error:
    list(feed(config))
  assert f"{where}token {token} at place 13 is outside of vocab_size=300: the data was made for" in str(error.value)


def test_a_token_outside_the_vocabulary_of_prepared_data_is_named(tmp_path):
  source = PreparedCorpus(write_corpus(tmp_path, (3, 50), lengths=(18, 19)))
  largest = [int(source.tokens(record).max()) for record in source.read(range(53))]
  vocab_size = max(largest)
  number = largest.index(vocab_size) - 3
  assert number > 0, "in the second shard"
  keys = {"dataset_type": "grain", "grain_train_files": str(tmp_path), "grain_worker_count": 0}
  config = tiny(**keys, vocab_size=vocab_size, enable_data_shuffling=False, generate_padding_batch_train=True)
  where = f"tokens-00001-of-00002.array_record, record {number}"
  with pytest.raises(ConfigError, match=rf"{where}: token {vocab_size} at place \d+ is outside of vocab_size="):
    list(feed(config))


def test_columns_that_hold_something_else_are_named(place, tmp_path):
  for tokens, words in (
    ("[0.5]", "a column that must hold tokens holds something else"),
    ('"text"', "a column that must hold tokens holds something else"),
    ("[[1], [2]]", "a column that must hold tokens holds something else"),
    ("null", "a column that must hold tokens holds something else"),
  ):
    (tmp_path / "x.jsonl").write_text(f'{{"tokens": {tokens}}}\n')
    changes = {"tokenize_train_data": False, "train_data_columns": ["tokens"], "tokenizer_path": None}
    with pytest.raises(ConfigError, match=f"row 0: {words}"):
      list(feed(configured(place, "json", hf_train_files=f"{tmp_path}/x.jsonl", **changes)))
  (tmp_path / "x.jsonl").write_text('{"text": null, "other": 1}\n')
  with pytest.raises(ConfigError, match="row 0: a column that must hold text holds something else"):
    list(feed(configured(place, "json", hf_train_files=f"{tmp_path}/x.jsonl")))


def test_streamed_data_says_so_and_keeps_its_hosts(place, capsys):
  fed = next(feed(configured(place, "streamed")))
  assert "json is streamed; the run can be resumed only on 1 hosts" in capsys.readouterr().out
  position = {name: np.asarray(array) for name, array in fed.iterator_state().items()}
  about = json.loads(position["about"].tobytes())
  position["about"] = np.frombuffer(json.dumps(about | {"hosts": 2}).encode(), np.uint8)
  with pytest.raises(ConfigError, match="hosts was 2 and is 1"):
    feed(configured(place, "streamed"), position)
