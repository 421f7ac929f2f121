"""Feeding a run: rows on devices, positions, worker processes, growing batches, the end of the data."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.data.dataloader import make_dataloader, missing_eval_data
from maxtext.data.options import data_options
from maxtext.data.prepared_corpus import PreparedCorpus
from maxtext.data.sources import open_sources
from maxtext.data.workers import choose_workers
from maxtext.training.loop import run_loop
from tests.corpora import write_corpus
from tests.flags import flags
from tests.support import History, program, tiny

GRAIN = {
  "dataset_type": "grain",
  "vocab_size": 1000,
  "grain_worker_count": 0,
  "per_device_batch_size": 1,
  "max_target_length": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp("corpus"), (200, 100), lengths=(1, 100))


@pytest.fixture(scope="module")
def config(folder):
  return lambda **changes: tiny(**(GRAIN | {"grain_train_files": str(folder)} | changes))


def host(fed):
  """A batch and its position, as one process sees the whole."""
  batch = [np.asarray(array) for array in jax.tree.leaves(fed.batch)]
  return batch, {name: np.asarray(array) for name, array in fed.iterator_state().items()}


def take(feed, count):
  return [host(fed) for _, fed in zip(range(count), feed, strict=False)]


def same(a, b):
  return len(a) == len(b) and all(
    all(np.array_equal(x, y) for x, y in zip(left[0], right[0], strict=True))
    and all(np.array_equal(left[1][name], right[1][name]) for name in left[1])
    for left, right in zip(a, b, strict=True)
  )


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"grain_packing_type": "best_fit", "grain_per_worker_buffer_size": 3},
    {"grain_packing_type": "concat_then_split", "num_epoch": 3},
    {"packing": False, "enable_data_shuffling": False, "grain_prefetch_buffer_size": 0},
    {"ici_tensor_parallelism": 2, "max_segments_per_seq": 2},
    {"enable_rampup_batch_size": True, "per_device_batch_size": 3, "global_rampup_samples": 90,
     "per_device_batch_size_start": 1, "per_device_batch_size_increment": 1},
  ],
  ids=["plain", "best_fit", "concat_then_split", "unpacked", "tensor", "ramp-up"],
)  # fmt: skip
def test_resumed_after_any_batch_a_run_is_fed_the_same(config, changes):
  p = program(config(**changes), devices=8)
  whole = take(p.feed(), 9)
  assert whole[0][0][0].shape[1] == 64
  for stop in (1, 4, 7):
    assert same(take(p.feed(whole[stop - 1][1]), 9 - stop), whole[stop:])


@pytest.mark.slow
def test_batches_do_not_depend_on_processes_or_devices(config):
  whole = take(program(config(per_device_batch_size=8)).feed(), 5)
  assert same(take(program(config(), devices=8).feed(), 5), whole)
  assert same(take(program(config(grain_worker_count=3), devices=8).feed(), 5), whole)
  assert same(take(program(config(grain_worker_count=-1), devices=8).feed(whole[1][1]), 3), whole[2:])


def test_a_batch_grows_and_takes_turns_among_its_streams(config):
  grown = config(
    enable_rampup_batch_size=True, per_device_batch_size=12, per_device_batch_size_start=4,
    per_device_batch_size_increment=4, global_rampup_samples=40, num_epoch=5,
  )  # fmt: skip
  made = take(program(grown).feed(), 11)
  assert [len(batch[0]) for batch, _ in made] == [4] * 5 + [8] * 3 + [12] * 3
  streams = made[0][1]["streams"]
  assert streams.shape == (24, 3)
  assert np.flatnonzero(streams.any(axis=1)).tolist() == [0, 6, 12, 18]
  assert made[4][1]["streams"].any(axis=1).sum() == 20


@pytest.mark.parametrize(
  ("start", "words"), [(0.3, "make a batch of 2.4 rows on the way to 16"), (0.5, "4 rows, which cannot be split in 8")]
)
def test_batches_that_cannot_be_are_refused(config, start, words):
  ramp = {"enable_rampup_batch_size": True, "per_device_batch_size": 2, "per_device_batch_size_increment": 1}
  with pytest.raises(ConfigError, match=words):
    program(config(**ramp, per_device_batch_size_start=start), devices=8).feed()


@pytest.mark.slow
def test_a_run_goes_on_as_its_batch_grows(config):
  p, history = program(
    config(
      enable_rampup_batch_size=True, per_device_batch_size=2, per_device_batch_size_start=1,
      per_device_batch_size_increment=1, global_rampup_samples=2,
    )
  ), History()  # fmt: skip
  run_loop(p.step, p.init(), p.feed(), range(4), [history])
  assert np.isfinite(history.losses).all()
  assert history.figures[3]["tokens"] > 1.5 * history.figures[0]["tokens"]


def test_pipelines_are_measured_alone(folder, capsys):
  words = [f"{key}={value}" for key, value in GRAIN.items()]
  assert main(["data", "bench", *words, f"grain_train_files={folder}", "num_epoch=99", "--seconds", "0.4"]) == 0
  speed, shares, bound = capsys.readouterr().out.splitlines()
  assert int(speed.split()[2].replace(",", "")) > 1000
  found = {name: int(share) for name, share in re.findall(r"(\w+) (\d+)%", shares)}
  assert list(found) == ["read", "tokenize", "pack", "place"]
  assert 96 <= sum(found.values()) <= 104
  assert found[bound.split()[-1]] == max(found.values())


@pytest.mark.slow
def test_the_data_ends_with_the_first_row_or_is_padded_to_the_last(config, tmp_path, capsys):
  few = str(write_corpus(tmp_path, (30, 10), lengths=(10, 60)))
  short, padded = (program(config(grain_train_files=few, generate_padding_batch_train=pad), 4) for pad in (False, True))
  cut, whole = list(map(host, short.feed())), list(map(host, padded.feed()))
  assert "data: ended after" in capsys.readouterr().out
  assert same(whole[: len(cut)], cut)
  assert all((batch[3] > 0).any(axis=1).all() for batch, _ in cut)
  begins = sum(((batch[2] == 0) & (batch[3] > 0)).sum() for batch, _ in whole)
  assert len(whole) > len(cut)
  assert begins == 40, "every document"
  assert list(padded.feed(whole[-1][1])) == [], "resumed where there is nothing left"
  history = History()
  state = run_loop(short.step, short.init(), short.feed(), range(1000), [history])
  assert int(state.step) == len(history.losses) == len(cut)


def test_reader_processes_are_chosen_by_cores_and_memory(config, monkeypatch):
  monkeypatch.setattr(os, "cpu_count", lambda: 9)
  chosen = {}
  for megabytes in (1, 1024, 9999):
    c = config(grain_worker_count=-1, grain_ram_budget_mb=megabytes)
    chosen[megabytes] = choose_workers(data_options(c).train, data_options(c).worker_megabytes)
  assert chosen == {1: 1, 1024: 4, 9999: 8}
  assert choose_workers(data_options(config(grain_worker_count=3)).train, 1024) == 3


def test_a_corpus_that_fills_no_batch_is_refused(tmp_path):
  small = str(write_corpus(tmp_path, (3,)))
  with pytest.raises(ConfigError) as error:
    program(tiny(**GRAIN, grain_train_files=small), devices=8).data.check()
  assert str(error.value) == (
    "The data does not fill a single batch: 3 documents, 349 tokens = 6 rows of 64; a batch takes 8 rows. Use more "
    "data, a smaller per_device_batch_size (it is 1) or a shorter max_target_length."
  )
  # What it advises is true, and its batches are not padding.
  for changes, devices in (({}, 4), ({"max_target_length": 32}, 8)):
    fed = next(program(tiny(**GRAIN | changes, grain_train_files=small), devices).feed())
    assert np.asarray(fed.batch.weights).mean() > 0.7


@pytest.mark.parametrize("workers", [0, 2])
def test_one_document_feeds_all_rows_and_is_resumed_exactly(tmp_path, workers):
  book = str(write_corpus(tmp_path, (1,), long={0: 40_000}))
  p = program(tiny(**GRAIN | {"grain_worker_count": workers}, grain_train_files=book), devices=8)
  whole = take(p.feed(), 1000)
  assert len(whole) == 39_999 // 64 // 8
  assert np.mean([batch[4] for batch, _ in whole]) > 0.999
  assert same(take(p.feed(whole[20][1]), 1000), whole[21:])


def test_a_position_before_long_documents_were_cut_is_refused(tmp_path):
  book = str(write_corpus(tmp_path, (1,), long={0: 40_000}))
  p = program(tiny(**GRAIN, grain_train_files=book), devices=8)
  position = take(p.feed(), 1)[0][1]
  about = json.loads(position["about"].tobytes())
  del about["spans"]
  with pytest.raises(ConfigError, match=r"spans was None and is .* from a version that did not split long documents"):
    p.feed(position | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)})


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
  """The programs that JAX compiles meanwhile."""
  seen = []

  def note(event, seconds, **more):
    if event == COMPILED:
      seen.append(more)

  jax.monitoring.register_event_duration_secs_listener(note)
  yield seen
  jax.monitoring.unregister_event_duration_listener(note)


WRONG_DATA = {
  "missing": ({"grain_train_files": "{}/nowhere"}, "grain_train_files: .*/nowhere is neither the folder"),
  "damaged": ({"grain_train_files": "{}/damaged"}, r"damaged/tokens-00000-of-00001.array_record has 5 bytes"),
  "small": ({"grain_train_files": "{}/small"}, "does not fill a single batch: 1 document, 20 tokens = 1 row of 64; a"),
  "no evaluation": (
    {"eval_interval": 5, "target_eval_loss": 1.0},
    "dataset_type=grain needs grain_eval_files to evaluate: nothing is held out in ",
  ),
  "missing evaluation": ({"eval_interval": 5, "grain_eval_files": "{}/gone"}, "grain_eval_files: .*/gone is neither"),
  "small evaluation": (
    {"eval_interval": 5, "grain_eval_files": "{}/small"},
    "The evaluation data does not fill a single batch: 1 document, .*eval_per_device_batch_size.*=true",
  ),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_wrong_data_ends_a_run_before_anything_is_made(config, tmp_path, case, compilations, capsys):
  write_corpus(tmp_path / "small", (1,), long={0: 20})
  next(write_corpus(tmp_path / "damaged", (30,)).glob("*.array_record")).write_bytes(b"short")
  changes, message = WRONG_DATA[case]
  keys = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
  out = tmp_path / "runs"
  run = config(**{"per_device_batch_size": 2} | keys, base_output_directory=str(out), run_name="run", steps=9)
  with pytest.raises((ConfigError, RunError), match=message):
    maxtext.train(run)
  assert not compilations, "nothing was compiled, so no parameter was made"
  assert not out.exists()
  assert "parameters on" not in capsys.readouterr().out


def test_a_run_with_data_compiles(config, tmp_path, compilations):
  """So that the test before this one means something."""
  maxtext.train(config(base_output_directory=str(tmp_path), run_name="run", steps=1))
  assert compilations


def test_one_batch_over_and_over(config):
  (first, _), (second, _) = take(program(config(reuse_example_batch=1)).feed(), 2)
  assert all(map(np.array_equal, first, second))
  (first, _), (second, _) = take(program(config()).feed(), 2)
  assert not all(map(np.array_equal, first, second))


def test_a_position_in_other_data_is_refused_with_the_difference(config, folder, tmp_path):
  position = take(program(config(), devices=8).feed(), 1)[0][1]
  other = str(write_corpus(tmp_path, (200, 100), seed=1, lengths=(1, 100)))
  for changes, words in (
    ({"data_shuffle_seed": 1}, "seed was 0 and is 1"),
    ({"per_device_batch_size": 2}, "streams was 8 and is 16. Streams are the rows of a global batch"),
    ({"max_target_length": 32}, "length was 64 and is 32"),
    ({"grain_packing_type": "best_fit"}, "packing.kind was first_fit and is best_fit"),
    ({"enable_data_shuffling": False}, "shuffle was True and is False"),
    ({"grain_train_files": other}, r"sources\[0\].sha256 was"),
  ):
    with pytest.raises(ConfigError, match=f"is not the data of this run: {words}"):
      program(config(**changes), devices=8).feed(position)
  # Where the folder is, and how it is read, makes no difference.
  (tmp_path / "moved").symlink_to(folder)
  next(program(config(grain_train_files=str(tmp_path / "moved"), grain_num_threads=2), devices=8).feed(position))


def test_evaluation_reads_its_own_keys(config, tmp_path):
  other = str(write_corpus(tmp_path, (40,), seed=1))
  keys = {"grain_eval_files": other, "grain_worker_count_eval": 0, "generate_padding_batch_eval": True}
  p = program(config(**keys, gradient_accumulation_steps=3))
  rounds = [
    [np.asarray(fed.batch.inputs) for fed in make_dataloader(data_options(p.config), p.eval_batch, split="eval")]
    for _ in range(2)
  ]
  assert len(rounds[0]) > 2
  assert all(map(np.array_equal, *rounds))
  assert rounds[0][0][0, 1] == 0, "the first document comes first"


def hold_out(folder, other):
  """Makes the documents of another corpus those that this one holds out."""
  manifest, held_out = (json.loads((path / "manifest.json").read_text()) for path in (folder, other))
  for shard in held_out["shards"]:
    (folder / f"held-out-{shard['file']}").write_bytes((other / shard["file"]).read_bytes())
    shard["file"] = f"held-out-{shard['file']}"
  counts = {name: held_out[name] for name in ("documents", "tokens", "shards")}
  (folder / "manifest.json").write_text(json.dumps(manifest | {"held_out": {"share": 0.1} | counts}))
  return folder


def numbers(batches):
  """Those of the documents in rows, by the two tokens with which each begins."""
  found = [(np.asarray(fed.batch.inputs), np.asarray(fed.batch.positions), fed.batch.weights) for fed in batches]
  starts = [(i, p, np.asarray(w) > 0) for i, p, w in found]
  return sorted(
    int(1000 * inputs[row, place] + inputs[row, place + 1])
    for inputs, positions, weights in starts
    for row, place in np.argwhere((positions == 0) & weights)
  )


@pytest.mark.parametrize("devices", [1, 8])
def test_evaluation_reads_all_that_is_held_out_and_training_nothing_of_it(config, tmp_path, devices):
  write_corpus(tmp_path / "all", (100,), lengths=(1, 60))
  corpus = hold_out(tmp_path / "all", write_corpus(tmp_path / "other", (7, 6), seed=1, lengths=(1, 60)))
  p = program(config(grain_train_files=str(corpus), eval_interval=1, grain_worker_count_eval=0), devices)
  assert p.data.evaluates
  batches = list(make_dataloader(data_options(p.config), p.eval_batch, split="eval"))
  assert numbers(batches) == list(range(13)), "whatever the batch size"
  assert PreparedCorpus(corpus).identity == PreparedCorpus(tmp_path / "all").identity
  trained = {row.tobytes() for fed in p.feed() for row in np.asarray(fed.batch.inputs)}
  assert not trained & {row.tobytes() for fed in batches for row in np.asarray(fed.batch.inputs)}
  mixed = f"{corpus},0.5;{tmp_path / 'other'},0.5"
  p = program(config(grain_train_files=mixed, eval_interval=1, grain_worker_count_eval=0))
  assert numbers(make_dataloader(data_options(p.config), p.eval_batch, split="eval")) == list(range(13))


def test_a_corpus_that_holds_nothing_out_is_trained_on_without_evaluation(config, tmp_path, capsys):
  """A recipe may evaluate; the corpus may be from a version that did not hold anything out."""
  history = History()
  run = config(base_output_directory=str(tmp_path), run_name="run", steps=2, eval_interval=1, eval_steps=1)
  maxtext.train(run, callbacks=[history])
  assert len(history.losses) == 2
  assert not any("eval_loss" in metrics for metrics in history.figures)
  said = capsys.readouterr()
  assert (said.out + said.err).count("eval_interval=1 evaluates nothing: nothing is held out in ") == 1


def test_files_that_are_no_corpus_hold_nothing_out(config, folder):
  options = data_options(config(grain_train_files=f"{folder}/*.array_record"))
  assert missing_eval_data(options) is None, "which is a mistake"
  with pytest.raises(ConfigError, match="dataset_type=grain needs grain_eval_files to evaluate: write the folder of a"):
    open_sources(options, options.evaluation)


def test_a_damaged_shard_and_a_dead_reader_are_named(config, tmp_path):
  folder = write_corpus(tmp_path, (30, 30))
  next(folder.glob("*00001*")).write_bytes(b"short")
  for workers in (0, 1):
    with pytest.raises(RunError, match=r"00001-of-00002\.array_record has 5 bytes and the manifest beside it says"):
      next(program(config(grain_train_files=str(folder), grain_worker_count=workers)).feed())


def test_a_flipped_bit_in_a_shard_is_named(config, tmp_path):
  shard = next(write_corpus(tmp_path, (30,)).glob("*.array_record"))
  content = bytearray(shard.read_bytes())
  tokens = PreparedCorpus(tmp_path).read([7])[0]
  content[bytes(content).index(tokens) + 5] ^= 1
  shard.write_bytes(content)
  with pytest.raises(RunError, match=r"00000-of-00001\.array_record is damaged: Corrupted"):
    list(program(config(grain_train_files=str(tmp_path))).feed())


def readers_of(pid):
  listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
  return {int(line.split()[0]) for line in listed.stdout.splitlines() if "maxtext.data.workers" in line}


def test_a_killed_reader_ends_the_run_in_words(config):
  before = readers_of(os.getpid())
  feed = program(config(grain_worker_count=1, num_epoch=1000)).feed()
  next(feed)
  (worker,) = readers_of(os.getpid()) - before
  os.kill(worker, signal.SIGKILL)
  with pytest.raises(RunError, match="A reader process of the data ended with exit code -9"):
    for _ in itertools.islice(feed, 10_000):  # what was ready before still comes
      pass
  assert readers_of(os.getpid()) == before


RUN_WITH_READERS = """
import sys, time
from tests.support import program, tiny
from tests.test_dataloader import GRAIN
changes = {"grain_worker_count": 2, "per_device_batch_size": 4, "grain_train_files": sys.argv[1]}
feed = program(tiny(**(GRAIN | changes))).feed()
next(feed)
print("fed", flush=True)
time.sleep(60)
"""


def test_readers_do_not_outlive_a_killed_run(folder):
  run = subprocess.Popen([sys.executable, "-c", RUN_WITH_READERS, str(folder)], stdout=subprocess.PIPE, text=True)
  assert run.stdout.readline() == "fed\n"
  workers = readers_of(run.pid)
  assert len(workers) == 2
  run.kill()
  run.wait()
  deadline = time.monotonic() + 20
  while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_a_document_does_not_see_its_neighbours(config):
  p = program(config())
  state, fed = p.init(), next(p.feed())
  assert (np.asarray(fed.batch.segments) == 2).any()
  second = np.asarray(fed.batch.segments)[0] == 2

  def logits(inputs):
    decoder = p.model.bind(state.params | state.buffers)
    return decoder.logits(decoder.hidden(inputs, fed.batch.positions, fed.batch.segments)[0])

  inputs = np.asarray(fed.batch.inputs)
  changed = np.where(second, (inputs + 7) % 1000, inputs)
  before, after = (np.asarray(jax.jit(logits)(x))[0] for x in (inputs, changed))
  assert np.array_equal(before[~second], after[~second])
  assert not np.allclose(before[second], after[second])


HOST = """
import json, sys
from pathlib import Path
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from maxtext.mesh.devices import make_mesh
from maxtext.training.program import Program
from tests.support import tiny

def parts_held(array):
  shards = array.addressable_shards
  return {",".join(str(part.start or 0) for part in shard.index): np.asarray(shard.data).tolist() for shard in shards}

seen = {}
for axis in ("fsdp", "tensor"):
  config = tiny(**(json.loads(sys.argv[3]) | {"ici_fsdp_parallelism": 1, f"ici_{axis}_parallelism": 4}))
  program = Program.of(config, make_mesh(config))
  seen[axis] = [
    [parts_held(fed.batch.inputs), parts_held(fed.iterator_state()["streams"])] for fed in program.feed()
  ]
Path(sys.argv[4], sys.argv[2]).write_text(json.dumps(seen))
"""


@pytest.mark.mesh
@pytest.mark.slow
def test_two_hosts_feed_what_one_does_and_end_together(folder, config, tmp_path):
  """Rows split over hosts, or the tokens of all rows; a part of the rows ends before the others."""
  changes = GRAIN | {"grain_train_files": str(folder), "per_device_batch_size": 2, "generate_padding_batch_train": True}
  with socket.create_server(("127.0.0.1", 0)) as probe:
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  env = os.environ | flags(devices=2)
  commands = [[sys.executable, "-c", HOST, address, str(i), json.dumps(changes), str(tmp_path)] for i in range(2)]
  hosts = [subprocess.Popen(command, env=env) for command in commands]
  assert [host.wait(timeout=120) for host in hosts] == [0, 0]
  found = [json.loads((tmp_path / str(i)).read_text()) for i in range(2)]
  whole = list(map(host, program(config(**changes | {"per_device_batch_size": 8})).feed()))
  assert len(whole[-1][0][3][(whole[-1][0][3] > 0).any(axis=1)]) < 8, "some rows have ended"
  for axis in ("fsdp", "tensor"):
    assert [len(seen[axis]) for seen in found] == [len(whole)] * 2
    for number, (batch, position) in enumerate(whole):
      for kind, expected in enumerate((batch[0], position["streams"])):
        parts = [seen[axis][number][kind] for seen in found]
        rows_of_both = axis == "tensor" and kind == 1  # each host makes all rows, and keeps its tokens of them
        assert (parts[0].keys() == parts[1].keys()) is rows_of_both
        for starts, held in (parts[0] | parts[1]).items():
          place = zip(map(int, starts.split(",")), np.shape(held), strict=True)
          assert np.array_equal(held, expected[tuple(slice(start, start + size) for start, size in place)])
        assert sum(map(np.size, (parts[0] | parts[1]).values())) == expected.size
