"""`maxtext data prepare` on real files: what comes out, whoever does the work and however often it is killed."""

import gzip
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.data import prepare as preparation
from maxtext.data.held_out import HeldOutRule, HeldOutSelection
from maxtext.data.options import tokenizer_options
from maxtext.data.prepare import in_beam, in_processes, prepare
from maxtext.data.prepared_corpus import PreparedCorpus
from maxtext.data.raw_text import File, SpanLimits, cut_texts, documents, find_files, split_file, standard_library
from maxtext.data.tokenizers import load_tokenizer
from tests import vocabularies

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "packs", "five", "dozen", "jugs"]


def text(number: int) -> str:
  rng = np.random.default_rng(number)
  return f"Document {number}. " + " ".join(rng.choice(WORDS, rng.integers(20, 120)))


def here(make, items):
  for item in items:
    make(item)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  return vocabularies.hugging_face(tmp_path_factory.mktemp("vocabulary"), texts=map(text, range(20)))


@pytest.fixture(scope="module")
def config(vocabulary):
  return load_config(dataset_type="grain", tokenizer_type="huggingface", tokenizer_path=str(vocabulary), vocab_size=512)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
  """The same 900 documents in every format; an empty one among each."""
  import pyarrow
  import pyarrow.parquet

  folder = tmp_path_factory.mktemp("raw")
  texts = [text(n) for n in range(900)]
  (folder / "a" / "deep").mkdir(parents=True)
  for n in range(300):
    (folder / "a" / ("deep" if n >= 200 else "") / f"{n:03}.txt").write_text(texts[n])
  (folder / "a" / "deep" / "empty.txt").write_text("")
  (folder / "a" / ".hidden").write_text("not a document")
  lines = [json.dumps({"id": n, "body": texts[n]}) for n in range(300, 600)]
  lines[:0] = [""]
  lines[7:7] = ["", json.dumps({"id": -1, "body": ""})]
  (folder / "b.jsonl").write_text("\n".join(lines[:200]) + "\n")
  with gzip.open(folder / "c.jsonl.gz", "wt") as file:
    file.write("\n".join(lines[200:]))
  nested = [{"a": n, "b": n} for n in range(301)]  # more columns in the file than in the table
  rows = pyarrow.table({"id": nested, "body": [*texts[600:], ""]})
  pyarrow.parquet.write_table(rows, folder / "d.parquet", row_group_size=70)
  return folder, texts


def content(folder: Path) -> dict[str, str]:
  """Every file below a folder, hidden or not, by its hash."""
  files = (path for path in sorted(folder.rglob("*")) if path.is_file())
  return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def records(folder: Path, manifest) -> list[list[np.ndarray]]:
  from array_record.python.array_record_module import ArrayRecordReader

  paths = (str(folder / shard["file"]) for shard in manifest["shards"])
  dtype = {"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]]
  return [[np.frombuffer(record, dtype) for record in ArrayRecordReader(path).read_all()] for path in paths]


def test_the_folder_says_what_it_holds(raw, config, tmp_path):
  folder, texts = raw
  to = tmp_path / "out"
  manifest = prepare(
    tokenizer_options(config), find_files([str(folder)]), str(to), here, column="body", shard_size=40_000
  )
  assert json.loads((to / "manifest.json").read_text()) == manifest
  shards = records(to, manifest)
  tokenizer = load_tokenizer(tokenizer_options(config))
  found = [tokens for shard in shards for tokens in shard]
  assert len(found) == len(texts) == manifest["documents"]
  for tokens, expected in zip(found, texts, strict=True):
    np.testing.assert_array_equal(tokens, tokenizer.encode(expected))
  assert (manifest["schema"], manifest["dtype"], manifest["tokenizer"]) == (1, "uint16", tokenizer.identity)
  assert manifest["tokens"] == sum(map(len, found))
  assert len(shards) >= 8
  for number, (entry, shard) in enumerate(zip(manifest["shards"], shards, strict=True)):
    path = to / entry["file"]
    assert entry == {
      "file": f"tokens-{number:05}-of-{len(shards):05}.array_record",
      "documents": len(shard),
      "tokens": sum(map(len, shard)),
      "long": [n for place, t in enumerate(shard) if len(t) > sum(map(len, shard)) // 128 for n in (place, len(t))],
      "bytes": path.stat().st_size,
      "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert sum(len(tokenizer.decode(tokens)) for tokens in shard) <= 40_000
  alone = load_tokenizer(tokenizer_options(config.model_copy(update={"tokenizer_path": str(to)})))
  assert alone.identity == tokenizer.identity
  assert alone.render([{"role": "user", "content": "x"}])
  names = {*(s["file"] for s in manifest["shards"]), "manifest.json", "tokenizer.json", "tokenizer_config.json"}
  assert content(to).keys() == names, "nothing else is left"


def test_a_shard_has_at_most_ten_thousand_records(config, tmp_path):
  (tmp_path / "many.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(10_001)))
  manifest = prepare(tokenizer_options(config), find_files([str(tmp_path / "many.jsonl")]), str(tmp_path / "out"), here)
  assert [shard["documents"] for shard in manifest["shards"]] == [10_000, 1]


def test_large_vocabularies_need_four_bytes(config, tmp_path):
  from tokenizers import Tokenizer

  bpe = Tokenizer.from_file(str(Path(config.tokenizer_path) / "tokenizer.json"))
  bpe.add_tokens([f"word{n}" for n in range(1 << 16)])
  (tmp_path / "large").mkdir()
  bpe.save(str(tmp_path / "large" / "tokenizer.json"))
  (tmp_path / "one.txt").write_text("word65535 the")
  keys = {"tokenizer_path": str(tmp_path / "large"), "vocab_size": 66_000, "add_bos": False, "add_eos": False}
  manifest = prepare(
    tokenizer_options(config.model_copy(update=keys)),
    find_files([str(tmp_path / "one.txt")]),
    str(tmp_path / "o"),
    here,
  )
  assert manifest["dtype"] == "uint32"
  assert records(tmp_path / "o", manifest)[0][0][0] >= 1 << 16


@pytest.mark.slow
def test_the_same_bytes_from_any_number_of_workers(raw, config, tmp_path):
  files = find_files([str(raw[0])])
  found = []
  for workers in (1, 3):
    prepare(
      tokenizer_options(config),
      files,
      str(tmp_path / str(workers)),
      in_processes(workers),
      column="body",
      shard_size=60_000,
    )
    found.append(content(tmp_path / str(workers)))
  assert found[0] == found[1]
  assert len(found[0]) > 5


@pytest.mark.slow
def test_the_same_bytes_from_beam(raw, config, tmp_path):
  pytest.importorskip("apache_beam")
  files = find_files([str(raw[0])])
  options = ["direct_num_workers=2", "direct_running_mode=multi_processing"]
  for name, execute in {"beam": in_beam("DirectRunner", options), "here": here}.items():
    prepare(tokenizer_options(config), files, str(tmp_path / name), execute, column="body", shard_size=60_000)
  assert content(tmp_path / "beam") == content(tmp_path / "here")


def test_a_folder_that_is_not_a_disk(raw, config, tmp_path):
  """Object stores go through fsspec, and so does its store in memory."""
  import fsspec

  fs = fsspec.filesystem("memory")
  fs.put(str(raw[0] / "b.jsonl"), "/raw/b.jsonl")
  kinds = {"memory://raw": "memory://out", str(raw[0] / "b.jsonl"): str(tmp_path / "out")}
  for source, to in kinds.items():
    prepare(tokenizer_options(config), find_files([source]), to, here, column="body", shard_size=20_000)
  fs.get("/out", str(tmp_path / "copy"), recursive=True)
  assert content(tmp_path / "copy") == content(tmp_path / "out")


def prepare_words(raw, vocabulary, to, *more):
  keys = ["tokenizer_type=huggingface", f"tokenizer_path={vocabulary}"]
  words = ["--from", str(raw[0]), "--to", str(to), "--column", "body", "--shard-megabytes", "0.005"]
  return [MAXTEXT, "data", "prepare", *keys, *words, *more]


def run(command):
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def workers_of(process: int) -> list[int]:
  children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
  return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def alive(process: int) -> bool:
  try:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False


def until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not (found := condition()):
    assert time.monotonic() < end
    time.sleep(0.002)
  return found


@pytest.mark.chaos
@pytest.mark.slow
def test_killed_at_any_moment_and_started_again(raw, vocabulary, tmp_path):
  """A worker first, then everything, at moments that lie further and further on."""
  to, whole = tmp_path / "out", tmp_path / "whole"
  done = run(prepare_words(raw, vocabulary, whole))
  assert done.returncode == 0, done.stderr
  expected = content(whole)
  shards = sorted(name for name in expected if name.endswith(".array_record"))
  command, seen = prepare_words(raw, vocabulary, to, "--workers", "2"), 0

  def finished():
    return len(list(to.glob(".unfinished/*.array_record.json")))

  for kill in ("worker", "all", "all"):
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
      workers = until(lambda p=process, before=seen: finished() > before and workers_of(p.pid))
      os.kill(workers[0] if kill == "worker" else process.pid, signal.SIGKILL)
      _, errors = process.communicate(timeout=60)
    if kill == "worker":
      assert (process.returncode, errors) == (
        1,
        "maxtext: A worker was killed. Finished shards are kept: run the same command again.\n",
      )
    until(lambda w=workers: not any(map(alive, w)))
    seen = finished()
    assert 0 < seen < len(shards), "the kill came half-way"
    there = content(to)
    assert "manifest.json" not in there
    assert all(there[name] == expected[name] for name in shards if name in there), "no shard is half"
  kept = {name: (to / name).stat().st_mtime_ns for name in shards if (to / ".unfinished" / f"{name}.json").exists()}
  assert len(kept) == seen
  done = run(command)
  assert done.returncode == 0, done.stderr
  assert content(to) == expected
  assert {name: (to / name).stat().st_mtime_ns for name in kept} == kept, "finished shards are not made again"
  before = {name: (to / name).stat().st_mtime_ns for name in expected}
  assert run(command).returncode == 0
  assert {name: (to / name).stat().st_mtime_ns for name in expected} == before, "a finished folder is left alone"


def test_mistakes_end_with_two(raw, vocabulary, tmp_path, monkeypatch, capsys):
  folder = raw[0]
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty").mkdir()
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "empty.txt").touch()
  (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
  (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
  (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe")
  (tmp_path / "fake.parquet").write_text("not one")
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "thesis.txt").write_text("do not touch")
  keys = ["tokenizer_type=huggingface", f"tokenizer_path={vocabulary}"]
  for words, message in (
    ([], "data prepare needs text: --from PATH, or --stdlib."),
    (["--from", "nowhere"], "--from nowhere: no such file or folder."),
    (["--from", "empty"], "There is no text in what was given."),
    (["--from", "blank.jsonl"], "every document is empty."),
    (["--from", "broken.jsonl"], "broken.jsonl, line at byte 14: not a JSON object."),
    (["--from", "binary.txt"], "binary.txt is not UTF-8 text (byte 3): say which files to take with --suffix"),
    (["--from", "fake.parquet"], "fake.parquet is not a Parquet file."),
    (["--from", f"{folder}/b.jsonl"], "no text under 'text'. It has 'id', 'body'. Choose with --column."),
    (["--from", f"{folder}/d.parquet"], "no column 'text'. It has 'id', 'body'. Choose with --column."),
    (["--from", f"{folder}/d.parquet", "--column", "id"], "row 0: no text under 'id'. Choose with --column."),
    (["--from", f"{folder}/a", "--workers", "0"], "--workers 0 --shard-megabytes 8: at least 1, and above 0."),
    (["--from", "pipe"], "--from pipe is a pipe or a device: write its text to a file first."),
    (["--from", "empty.txt"], "There is no text in what was given."),
    (["--from", f"{folder}/a", "--held-out", "1"], "--held-out 1: a share of 0 to 0.5."),
    (["--from", f"{folder}/a", "--held-out", "nan"], "--held-out nan: a share of 0 to 0.5."),
    (["--from", f"{folder}/a", "--skip-bad", "-1"], "--skip-bad -1: at least 0."),
    (["--from", f"{folder}/a", "--beam", "region=x"], "--beam region=x has no effect without --runner."),
    (["--from", f"{folder}/a", "--train-tokenizer"], "--train-tokenizer makes another."),
    (["--from", f"{folder}/a", "tokenizer_path=nowhere"], "tokenizer_path=nowhere is no file and no folder."),
    (["--from", f"{folder}/a", "tokenizer_path=null"], "tokenizer_path is not set"),
    (["--from", f"{folder}/a", "vocab_size=200"], "more than vocab_size=200"),
    (["--from", f"{folder}/a", "--to", "other"], "--to other holds something else: choose another folder."),
    (["--from", f"{folder}/a", "--to", "/proc/nothing"], "--to /proc/nothing cannot be written"),
  ):
    assignments = [word for word in words if "=" in word and word.startswith(("tok", "voc"))]
    flags = [word for word in words if word not in assignments]
    code = main(["data", "prepare", *keys, *assignments, "--to", "out", *flags])
    errors = capsys.readouterr().err
    assert (code, message in errors) == (2, True), (words, errors)
    assert len(errors.splitlines()) == 1, errors
    assert not list(tmp_path.glob("out/*.array_record"))
  assert content(tmp_path / "other") == {"thesis.txt": hashlib.sha256(b"do not touch").hexdigest()}


BAD_LINES = [b'{"body": ', b'{"body": 5}', b"[1]", b'{"body": "\\ud800"}', b"\xff\xfe", b"[" * 100_000]


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
  """60 texts in every format and nine bad records among them, the first of a file and the last as well."""
  import pyarrow
  import pyarrow.parquet

  folder = tmp_path_factory.mktemp("bad")
  lines = [json.dumps({"body": text(n)}).encode() for n in range(30)]
  for place, line in zip((30, 21, 14, 9, 4, 0), reversed(BAD_LINES), strict=True):
    lines.insert(place, line)
  (folder / "a.jsonl").write_bytes(b"\n".join(lines))
  (folder / "b.txt").write_bytes(b"abc\xff\xfe")
  (folder / "c.txt").write_text(text(30))
  rows = [None, *map(text, range(31, 45)), None, *map(text, range(45, 60))]
  pyarrow.parquet.write_table(pyarrow.table({"body": rows}), folder / "d.parquet", row_group_size=7)
  return folder


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_records_are_skipped_up_to_a_number_and_counted(bad, vocabulary, tmp_path, capsys, workers):
  keys = {"tokenizer_type": "huggingface", "tokenizer_path": str(vocabulary)}
  words = [*(f"{key}={value}" for key, value in keys.items()), "--from", str(bad), "--column", "body"]
  words += ["--to", str(tmp_path / "out"), "--shard-megabytes", "0.002", "--workers", str(workers), "--held-out", "0"]

  def prepared(*more):
    code = main(["data", "prepare", *words, *more])
    return code, capsys.readouterr()

  code, said = prepared()
  assert (code, "a.jsonl, line at byte 0: not a JSON object." in said.err) == (2, True), "by default none"
  code, said = prepared("--skip-bad", "8")
  assert code == 2
  assert "More than --skip-bad 8 records cannot be read. The first: " in said.err
  assert "a.jsonl, line at byte 0: not a JSON object." in said.err
  code, said = prepared("--skip-bad", "9")
  assert code == 0, said.err
  first, second = said.out.splitlines()[-2:]
  assert first.startswith(f"{tmp_path}/out: 60 documents, ")
  assert second == f"{tmp_path}/out: without 9 records that could not be read"
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  assert (manifest["documents"], manifest["skipped"], len(manifest["shards"]) > 3) == (60, 9, True)
  encode = load_tokenizer(tokenizer_options(load_config(dataset_type="grain", **keys))).encode
  found = [tokens for shard in records(tmp_path / "out", manifest) for tokens in shard]
  assert all(np.array_equal(tokens, encode(text(n))) for n, tokens in enumerate(found))


def test_bad_records_do_not_keep_a_tokenizer_from_being_trained(bad, config, tmp_path):
  keys = {"tokenizer_path": None, "vocab_size": 290}
  files, to = find_files([str(bad)]), str(tmp_path / "out")
  manifest = prepare(
    tokenizer_options(config.model_copy(update=keys)), files, to, here, column="body", train=True, skip_bad=100
  )
  assert (manifest["documents"], manifest["skipped"]) == (60, 9)


def test_a_compressed_file_that_breaks_off_is_named(config, tmp_path):
  content = gzip.compress("".join(f'{{"text": "{text(n)}"}}\n' for n in range(200)).encode())
  for number, broken in enumerate((content[:-50], content[:900] + b"\xff" * 9 + content[909:], b"no gzip")):
    (tmp_path / "x.jsonl.gz").write_bytes(broken)
    with pytest.raises(ConfigError, match=r"x.jsonl.gz is damaged, or not compressed as its name says"):
      prepare(
        tokenizer_options(config),
        find_files([str(tmp_path / "x.jsonl.gz")]),
        str(tmp_path / f"out{number}"),
        here,
        skip_bad=9,
      )


def test_a_corrected_mistake_may_use_the_same_folder_but_other_text_may_not(raw, config, tmp_path):
  lines, to = find_files([str(raw[0] / "b.jsonl")]), str(tmp_path / "out")
  with pytest.raises(ConfigError, match="no text under 'text'"):
    prepare(tokenizer_options(config), lines, to, here)
  prepare(tokenizer_options(config), lines, to, here, column="body")
  with pytest.raises(ConfigError, match="holds shards of other text, another tokenizer or other flags"):
    prepare(tokenizer_options(config), find_files([str(raw[0] / "a")]), to, here)
  with pytest.raises(ConfigError, match="holds shards of other text"):
    prepare(tokenizer_options(config.model_copy(update={"add_bos": False})), lines, to, here, column="body")


def test_a_tokenizer_of_ones_own(config, tmp_path):
  """It learns from the first max_corpus_chars characters only, and is the same every time."""
  (tmp_path / "raw").mkdir()
  (tmp_path / "raw" / "1.txt").write_text("the fox " * 200)
  (tmp_path / "raw" / "2.txt").write_text("zebra quagga " * 200)
  found = {}
  for name, characters in (("all", 10_000), ("again", 10_000), ("first", 1_600)):
    keys = {"tokenizer_path": None, "vocab_size": 290, "max_corpus_chars": characters}
    prepare(
      tokenizer_options(config.model_copy(update=keys)),
      find_files([str(tmp_path / "raw")]),
      str(tmp_path / name),
      here,
      train=True,
    )
    found[name] = load_tokenizer(tokenizer_options(config.model_copy(update={"tokenizer_path": str(tmp_path / name)})))
  assert content(tmp_path / "all") == content(tmp_path / "again")
  lengths = {name: [len(t.encode(word)) - 2 for word in ("the fox", " zebra")] for name, t in found.items()}
  assert lengths["all"] == [2, 1]
  assert lengths["first"] == [2, 6]
  small = config.model_copy(update={"tokenizer_path": None, "vocab_size": 257})
  with pytest.raises(ConfigError, match="vocab_size=257 is too small to train a tokenizer: it takes 258"):
    prepare(tokenizer_options(small), find_files([str(tmp_path / "raw")]), str(tmp_path / "x"), here, train=True)


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_a_log_has_lines(raw, vocabulary, tmp_path):
  done = run(prepare_words(raw, vocabulary, tmp_path / "lines", "--workers", "1", "--held-out", "0"))
  lines = done.stdout.splitlines()
  assert lines[-1].startswith(f"{tmp_path / 'lines'}: 900 documents, ")
  assert all(line.startswith("shard ") for line in lines[:-1])
  assert 1 <= len(lines) - 1 <= 10
  assert "\x1b" not in done.stdout
  leader, follower = pty.openpty()
  env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
  command = prepare_words(raw, vocabulary, tmp_path / "bar", "--workers", "1", "--held-out", "0")
  with subprocess.Popen(command, stdout=follower, stderr=follower, env=env) as process:
    os.close(follower)
    shown = b""
    try:
      while piece := os.read(leader, 65536):
        shown += piece
    except OSError:  # the terminal is gone when the process is
      os.close(leader)
  assert process.returncode == 0, shown
  assert b"900 documents" in shown
  assert b"kB" in shown
  assert b"left" in shown
  assert b"shard 1/" not in shown


def test_the_standard_library_is_text():
  files = standard_library()
  names = {Path(file.path).name for file in files}
  assert {"argparse.py", "dataclasses.py", "socket.py"} <= names
  assert not {"test_argparse.py", "pip"} & names
  assert 5e6 < sum(file.size for file in files) < 5e7
  assert not any("site-packages" in file.path for file in files)


def test_folders_can_be_narrowed(raw):
  folder = raw[0]
  assert len(find_files([str(folder)], [".txt"])) == 301
  assert find_files([str(folder / "b.jsonl")], [".txt"]) == [
    File(str(folder / "b.jsonl"), (folder / "b.jsonl").stat().st_size)
  ], "what is named itself is taken"


SMALL = ["base_emb_dim=32", "base_mlp_dim=64", "base_num_decoder_layers=1"]


@pytest.mark.nightly  # `test_quick_start.py` has it by its commands
def test_one_text_file_is_enough_to_train_on(tmp_path, monkeypatch, capsys):
  """The quick start, with a text in place of the library; one that is too small is refused with what it has."""
  monkeypatch.chdir(tmp_path)
  library = "".join(Path(file.path).read_text(errors="ignore") for file in standard_library())
  (tmp_path / "book.txt").write_text(library[:1_000_000])
  (tmp_path / "note.txt").write_text(library[:500])
  for name in ("book", "note"):
    words = ["--train-tokenizer", "--from", f"{name}.txt", "--to", f"data/{name}", "--workers", "1"]
    assert main(["data", "prepare", "stdlib-llama", *words]) == 0
  said = capsys.readouterr().out
  assert re.search(r"data/book: 6\d documents, ", said)
  assert re.search(r"data/book: 1 document with [\d,]+ tokens \(1.\d%\) held out for evaluation", said)
  assert "data/note: nothing is held out for evaluation: every document is too large a part of so little text" in said
  assert (
    main(
      ["train", "stdlib-llama", "grain_train_files=data/book", "steps=3", "eval_interval=2", "run_name=book", *SMALL]
    )
    == 0
  )
  capsys.readouterr()
  figures = [json.loads(line) for line in (tmp_path / "runs/book/metrics.jsonl").read_text().splitlines()]
  assert len(figures) == 3
  assert [step["step"] for step in figures if 7 < step.get("eval_loss", 0) < 9] == [2]
  rows = 8 * jax.device_count()
  assert all(step["tokens"] >= 0.99 * rows * 128 for step in figures), "no padding to speak of"
  tokens = json.loads((tmp_path / "data/book/manifest.json").read_text())["tokens"]
  assert 250_000 < tokens < 330_000
  assert main(["train", "stdlib-llama", "grain_train_files=data/note", "run_name=note"]) == 2
  error = capsys.readouterr().err
  assert "does not fill a single batch: 1 document, " in error
  assert f" of 128; a batch takes {rows} rows. Use more data, a smaller per_device_batch_size" in error
  assert "padding" not in error


TEXTS = {
  "paragraphs": "\n\n".join(f"Paragraph {n}.\nIts second line, {'x' * (n % 90)}." for n in range(4000)),
  "crlf": "\r\n\r\n".join(f"Paragraph {n}.\r\nIts second line." for n in range(4000)),
  "lines": "\n".join(f"line {n} of many" for n in range(20_000)),
  "one line": "word " * 60_000,
  "no space": "\u96ea\U0001f600" * 20_000,
  "empty lines": "\n" * 70_000,
  "short": "short",
  "no newline at the end": "a line\n" * 9000 + "the end",
}
ENDS = {"paragraphs": "\n\n", "crlf": "\n\r\n", "lines": "\n", "one line": " "}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_file_that_is_alone_is_cut_into_documents_without_loss(name, tmp_path):
  """Where paragraphs, lines or words end, at characters at the least; however many spans it is read in."""
  path = tmp_path / "input.txt"
  path.write_bytes(TEXTS[name].encode())
  (file,) = cut_texts(find_files([str(path)]))
  assert file.document_size == min(max(path.stat().st_size // 64, 1024), 16384)
  found = []
  for size in (1 << 30, 40_000):
    spans = list(split_file(file, "text", SpanLimits(10_000, size)))
    found.append([text for span in spans for text in documents(span, "text")])
    assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert sum(span.documents for span in spans) == len(found[-1])
  assert found[0] == found[1]
  assert "".join(found[0]) == TEXTS[name], "nothing is lost, and nothing is moved"
  sizes = [len(text.encode()) for text in found[0]]
  assert max(sizes) <= file.document_size
  assert all(size >= file.document_size // 2 - 3 for size in sizes[:-1])
  assert all(text.endswith(ENDS.get(name, "")) for text in found[0][:-1])


def test_which_files_are_cut():
  text, table = File("a.txt", 5000), File("b.jsonl", 5000)
  assert cut_texts([text, File("empty.txt", 0)])[0].document_size == 1024
  assert cut_texts([text, text]) == [text, text], "each is a document"
  assert cut_texts([table]) == [table]
  large = File("large.txt", 1 << 30)
  assert cut_texts([text, large]) == [text, large._replace(document_size=16384)]


def test_bad_parts_of_a_text_can_be_left_out(config, tmp_path):
  good = b"".join(b"line %d\n" % n for n in range(9000))
  (tmp_path / "input.txt").write_bytes(good[:50_000] + b"\xff" + good[50_000:])
  files, options = find_files([str(tmp_path / "input.txt")]), tokenizer_options(config)
  with pytest.raises(ConfigError, match=r"input.txt is not UTF-8 text \(byte 50000\)"):
    prepare(options, files, str(tmp_path / "out"), here)
  assert prepare(options, files, str(tmp_path / "out"), here, skip_bad=1)["skipped"] == 1


def texts_of(config, folder, **keys):
  """The documents of a prepared corpus, as text."""
  corpus, tokenizer = PreparedCorpus(folder, **keys), load_tokenizer(tokenizer_options(config))
  return [tokenizer.decode(corpus.tokens(record)) for record in corpus.read(range(sum(corpus.sizes)))]


def write_lines(path, numbers):
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps({"text": text(n)}) + "\n" for n in numbers))
  return find_files([str(path)])


def test_what_is_held_out_depends_on_the_text_alone(config, tmp_path):
  """Not on its order, its shards or who else is there; copies are on one side."""
  numbers, found = [*range(300), *range(300)], {}
  for name, order, size in (("one", numbers, 1 << 20), ("other", numbers[::-1] + list(range(300, 330)), 9000)):
    files = write_lines(tmp_path / name / "a.jsonl", order)
    out = str(tmp_path / name / "out")
    manifest = prepare(tokenizer_options(config), files, out, here, shard_size=size, held_out=HeldOutRule(0.1))
    held_out, trained = texts_of(config, out, held_out=True), texts_of(config, out)
    assert sorted(held_out + trained) == sorted(map(text, order))
    assert not set(held_out) & set(trained)
    assert (manifest["documents"], manifest["held_out"]["documents"]) == (len(trained), len(held_out))
    assert manifest["held_out"]["tokens"] == sum(shard["tokens"] for shard in manifest["held_out"]["shards"])
    assert 0.05 < len(held_out) / len(order) < 0.15
    found[name] = {t for t in held_out if t in set(map(text, range(300)))}
  assert found["one"] == found["other"]


def test_at_least_one_document_is_held_out_and_its_copies_with_it(config, tmp_path):
  """The one with the lowest hash, found once all are known; also if the work is ended then, and taken up again."""
  rule = HeldOutRule(1e-9)
  files = write_lines(tmp_path / "raw" / "a.jsonl", [*range(40), *range(40)])
  whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
  manifest = prepare(tokenizer_options(config), files, whole, here, shard_size=3000, held_out=rule)
  assert len(manifest["shards"]) > 5
  assert manifest["held_out"]["documents"] == 2
  lowest = min((HeldOutSelection(0, 1 << 20).hash_of(text(n)), text(n)) for n in range(40))[1]
  assert texts_of(config, whole, held_out=True) == [lowest] * 2
  assert lowest not in texts_of(config, whole)
  calls = []

  def ends_half_way(make, items):
    calls.append(len(items))
    if len(calls) == 3:  # the plan, the shards, and those of the document to hold out
      make(items[0])
      raise KeyboardInterrupt
    here(make, items)

  with pytest.raises(KeyboardInterrupt):
    prepare(tokenizer_options(config), files, broken, ends_half_way, shard_size=3000, held_out=rule)
  assert calls[2] == 2
  assert prepare(tokenizer_options(config), files, broken, here, shard_size=3000, held_out=rule) == manifest
  assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_a_text_that_is_copied_everywhere_is_trained_on(config, tmp_path):
  rows = [json.dumps({"text": "the cat sat on the mat"})] * 40
  (tmp_path / "copies.jsonl").write_text("\n".join(rows))
  files = find_files([str(tmp_path / "copies.jsonl")])
  manifest = prepare(tokenizer_options(config), files, tmp_path / "out", here, held_out=HeldOutRule(0.01))
  assert manifest["documents"] == 40


def test_how_much_is_held_out():
  size = 1 << 30
  assert HeldOutSelection.of(HeldOutRule(0.25), size).threshold == 1 << 62
  assert HeldOutSelection.of(HeldOutRule(0.25, size // 8), size).threshold == 1 << 61
  assert HeldOutSelection.of(HeldOutRule(0.0), size) == HeldOutSelection(0, -1)
  selection = HeldOutSelection.of(HeldOutRule(0.01), 1000)
  assert selection.largest == 50, "a 20th of the text"
  assert selection.hash_of("x" * 51) == 1 << 64
  assert selection.hash_of("x" * 50) < 1 << 64
  assert HeldOutSelection.of(HeldOutRule(0.2), 1000).largest == 200
  assert selection.with_at_least_one(1 << 64) == selection, "nothing is small enough"
  assert selection.with_at_least_one(5) == selection, "one is held out already"


def test_a_corpus_of_an_older_version_is_left_as_it_is(config, tmp_path, capsys):
  path, out = tmp_path / "raw" / "a.jsonl", tmp_path / "out"
  files, options = write_lines(path, range(30)), tokenizer_options(config)
  manifest = prepare(options, files, str(out), here)
  older, _ = preparation._requests(options, files, "text", False, SpanLimits(10_000, 8 << 20), HeldOutRule(0.01))
  manifest = {key: value for key, value in manifest.items() if key != "held_out"} | {"request": older}
  (out / "manifest.json").write_text(json.dumps(manifest))
  before = content(out)
  keys = ["tokenizer_type=huggingface", f"tokenizer_path={config.tokenizer_path}", "vocab_size=512"]
  assert main(["data", "prepare", *keys, "--from", str(path), "--to", str(out)]) == 0
  assert "prepared by an older version, so nothing is held out for evaluation" in capsys.readouterr().out
  assert content(out) == before


def test_the_folder_has_the_name_of_the_text_unless_it_is_named(vocabulary, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "input.txt").write_text("\n".join(map(text, range(200))))
  (tmp_path / "other.txt").write_text(text(1))
  keys = ["tokenizer_type=huggingface", f"tokenizer_path={vocabulary}"]
  assert main(["data", "prepare", *keys, "--from", "input.txt"]) == 0
  assert re.search(r"\ndata/input: \d documents? with .* held out for evaluation\n$", capsys.readouterr().out)
  assert (tmp_path / "data" / "input" / "manifest.json").exists()
  assert main(["data", "prepare", *keys, "--from", "input.txt", "--held-out", "0"]) == 2
  assert "--to data/input holds shards of other text, another tokenizer or other flags" in capsys.readouterr().err
  assert main(["data", "prepare", *keys, "--from", "input.txt", "--from", "other.txt"]) == 2
  assert "data prepare needs --to FOLDER" in capsys.readouterr().err
