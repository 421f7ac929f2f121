"""Preparation of raw text as tokenised ArrayRecord shards with a manifest.

A shard is a pure function of its part of the plan, so one process, many or a cluster make the same bytes, after any
number of restarts. A shard is written atomically, with its held-out documents in a file of their own, and then a record
beside the plan marks it as done. The manifest is written last. Nothing here imports JAX.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.configs.types import TokenizerType
from maxtext.data.held_out import NO_RULE, HeldOutRule, HeldOutSelection
from maxtext.data.options import TokenizerOptions
from maxtext.data.output_folder import UNFINISHED, OutputFolder
from maxtext.data.prepared_corpus import HELD_OUT, MANIFEST, SCHEMA, long_document_threshold
from maxtext.data.raw_text import (
  File,
  OnBadRecord,
  SpanLimits,
  TextSpan,
  cut_texts,
  documents,
  needs_scan,
  raise_bad_record,
  split_file,
)
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer, train_tokenizer

MOST_DOCUMENTS = 10_000  # to find one record takes a reader time in proportion to the records of its shard
_REQUEST, _INSTALLED = f"{UNFINISHED}/request.json", f"{UNFINISHED}/tokenizer.json"
_PLAN = f"{UNFINISHED}/plan"
_RESUME_HINT = "Finished shards are kept: run the same command again."
_POLL_SECONDS = 0.5  # seconds


@dataclass(frozen=True)
class ShardPlan:
  """The spans of text that become one shard."""

  number: int
  spans: tuple[TextSpan, ...]

  @property
  def size(self) -> int:
    """Bytes of text, roughly."""
    return sum(span.size for span in self.spans)


Execute = Callable[[Callable[[Any], None], Sequence[Any]], None]
"""Calls a function for every item, in any order, on any machine with the same files. Both must be picklable."""


class Display(Protocol):
  """Receives progress."""

  def message(self, line: str) -> None:
    """Shows a line."""
    ...

  def progress(self, shards: int, all_shards: int, size: int, all_size: int) -> None:
    """Shards that are done, and their bytes of text."""
    ...


def prepare(
  tokenizer: TokenizerOptions,
  files: Sequence[File],
  to: str,
  execute: Execute,
  *,
  column: str = "text",
  train: bool = False,
  shard_size: int = 8 << 20,
  skip_bad: int = 0,
  held_out: HeldOutRule = NO_RULE,
  display: Display | None = None,
) -> dict[str, Any]:
  """Makes the shards that are not there yet, and returns the manifest.

  Args:
    tokenizer: which; where one is trained, what is to come out.
    files: text files, JSON lines and Parquet, whose order is the order of the documents. A text file that is alone is
      cut into documents (`cut_texts`).
    to: the folder to make.
    execute: where the work is done, such as `in_processes(2)`.
    column: what holds the text in JSON lines and Parquet.
    train: whether to train a tokenizer of `vocab_size` entries on the text first.
    shard_size: bytes of text in a shard, at most where a document is not larger.
    skip_bad: records that may be left out because they cannot be read. It decides no byte of a shard, so whoever
      raises it goes on where it ended.
    held_out: how much is held out for evaluation. Of a text that has documents small enough for it, at least one is.
    display: is told now and then.
  """
  folder, most, files = OutputFolder(to), SpanLimits(MOST_DOCUMENTS, shard_size), cut_texts(files)
  if train and tokenizer.path is not None:
    raise ConfigError(f"tokenizer_path={tokenizer.path} names a tokenizer, and --train-tokenizer makes another.")
  if not train and tokenizer.path is None:
    raise ConfigError("tokenizer_path is not set: name a tokenizer, or train one on this text: --train-tokenizer.")
  if not any(file.size for file in files):
    raise ConfigError("There is no text in what was given.")
  older, request = _requests(tokenizer, files, column, train, most, held_out)
  if (done := _claim_folder(folder, to, request, older)) is not None:
    return done
  plans = _plan(folder, to, files, column, most, skip_bad, execute)
  names = _install_tokenizer(tokenizer, folder, plans, column, train, skip_bad, display)
  selection = HeldOutSelection.of(held_out, sum(plan.size for plan in plans))
  job = _Job(to, len(plans), column, request, names, _installed_options(tokenizer, train), skip_bad, selection)
  with _show_progress(folder, job, plans, display) if display else nullcontext():
    execute(partial(make_shard, job), [plan for plan in plans if _read_record(folder, job, plan) is None])
    job = _with_one_held_out(folder, job, plans)
    execute(partial(make_shard, job), [plan for plan in plans if _read_record(folder, job, plan) is None])
  manifest = _build_manifest(folder, job, plans, held_out)
  folder.write(MANIFEST, _json(manifest))
  folder.remove(UNFINISHED)
  return manifest


def split_one_file(to: str, column: str, most: SpanLimits, skip_bad: int, numbered: tuple[int, File]) -> None:
  """Cuts one file into spans, and notes them where the plan is made."""
  number, file = numbered
  spans = [asdict(span) for span in split_file(file, column, most, _ignore_or_raise(skip_bad))]
  OutputFolder(to).write(_spans_file(number), _json(spans))


@dataclass(frozen=True)
class _Job:
  """What all shards of a preparation have in common; small, since it is pickled with each."""

  to: str
  shards: int
  column: str
  request: str
  tokenizer_files: tuple[str, ...]
  tokenizer: TokenizerOptions
  skip_bad: int
  held_out: HeldOutSelection

  def name(self, plan: ShardPlan, kind: str = "tokens") -> str:
    """Of the shard; `kind` begins it."""
    return f"{kind}-{plan.number:05}-of-{self.shards:05}.array_record"


@dataclass
class _Skipped:
  """Counts bad records that are left out, up to a limit."""

  most: int
  count: int = 0
  first: str = ""

  def __call__(self, bad: ConfigError) -> None:
    if not self.most:
      raise bad
    self.add(1, str(bad))

  def add(self, count: int, first: str) -> None:
    """Raises where there are too many."""
    self.count, self.first = self.count + count, self.first or first
    if self.count > self.most:
      raise ConfigError(f"More than --skip-bad {self.most} records cannot be read. The first: {self.first}")


def make_shard(job: _Job, plan: ShardPlan) -> None:
  """Writes one shard, its held-out documents apart, and the record of both. A document without text is left out."""
  tokenizer, folder, name = _tokenizer(job), OutputFolder(job.to), job.name(plan)
  dtype = _dtype(tokenizer.vocab_size).newbyteorder("<")
  skipped, sizes = _Skipped(job.skip_bad), Counter[int]()  # bytes by hash
  with folder.scratch() as scratch:
    trained, held_out = (_ShardWriter(Path(scratch, job.name(plan, kind))) for kind in ("tokens", "held-out"))
    for text in chain.from_iterable(documents(span, job.column, skipped) for span in plan.spans):
      if text:
        number = job.held_out.hash_of(text)
        sizes[number] += len(text.encode())
        writer = held_out if number < job.held_out.threshold else trained
        writer.write(tokenizer.encode(text).astype(dtype))
    entries = {"entry": trained.publish(folder), HELD_OUT: held_out.publish(folder)}
  lowest = min(sizes, default=None)
  note = {"skipped": skipped.count, "first": skipped.first, "lowest": lowest, "threshold": job.held_out.threshold}
  note |= {"lowest_bytes": 0 if lowest is None else sizes[lowest]}
  folder.write(f"{UNFINISHED}/{name}.json", _json(entries | note))


class _ShardWriter:
  """Writes documents to a file, and knows their lengths."""

  def __init__(self, file: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    self._file, self._writer = file, ArrayRecordWriter(str(file), "group_size:1")
    self._lengths: list[int] = []

  def write(self, document: np.ndarray) -> None:
    """Appends a document."""
    self._writer.write(document.tobytes())
    self._lengths.append(len(document))

  def publish(self, folder: OutputFolder) -> dict[str, Any]:
    """Moves the file to the folder, if it has a document; returns its entry of the manifest."""
    self._writer.close()
    above = long_document_threshold(tokens := sum(self._lengths))
    long = [number for place, length in enumerate(self._lengths) if length > above for number in (place, length)]
    counts = {"documents": len(self._lengths), "tokens": tokens, "long": long}
    content = hashlib.sha256(self._file.read_bytes()).hexdigest()
    entry = {"file": self._file.name, **counts, "bytes": self._file.stat().st_size, "sha256": content}
    if self._lengths:
      folder.publish(self._file, self._file.name)
    else:
      folder.remove(self._file.name)  # of an attempt in which other documents were held out
    return entry


def in_processes(workers: int) -> Execute:
  """Processes of this machine."""

  def execute(make: Callable[[Any], None], items: Sequence[Any]) -> None:
    if workers == 1 or len(items) < 2:
      for item in items:
        make(item)
      return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(items)), context, initializer=_exit_with_parent) as pool:
      try:
        for _ in pool.map(make, items):
          pass
      except BrokenProcessPool:
        raise RunError(f"A worker was killed. {_RESUME_HINT}") from None
      finally:
        pool.shutdown(wait=True, cancel_futures=True)

  return execute


def in_beam(runner: str, options: Sequence[str]) -> Execute:
  """An Apache Beam pipeline: `DirectRunner` here, `DataflowRunner` or `FlinkRunner` on a cluster.

  Args:
    runner: its name.
    options: the pipeline's, such as `region=europe-west4`.
  """
  try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
  except ImportError:
    raise ConfigError(f"--runner {runner} needs Apache Beam: pip install 'maxtext[prepare]'.") from None

  def execute(make: Callable[[Any], None], items: Sequence[Any]) -> None:
    if not items:
      return
    quiet = "--default_sdk_harness_log_level=WARNING"
    words = [f"--runner={runner}", quiet, *(f"--{option}" for option in options)]
    try:
      with beam.Pipeline(options=PipelineOptions(words)) as pipeline:
        _ = pipeline | beam.Create(items) | beam.Reshuffle() | "work" >> beam.Map(make)
    except Exception as error:  # what a worker raised arrives in as many forms as there are runners
      reason = str(error).strip().splitlines()[-1]
      raise RunError(f"--runner {runner} failed: {reason} {_RESUME_HINT}") from None

  return execute


def _requests(
  tokenizer: TokenizerOptions, files: Sequence[File], column: str, train: bool, most: SpanLimits, held_out: HeldOutRule
) -> tuple[str, str]:
  """A hash of all that decides the shards, but for the folders where files are; before it that of an older version,
  which held out nothing and cut no text."""
  trained = {"vocab_size": tokenizer.vocab_size, "characters": tokenizer.training_characters}
  marks = {"bos": tokenizer.add_bos, "eos": tokenizer.add_eos}
  identity = {**trained, **marks} if train else load_tokenizer(tokenizer).identity
  names = [(file.path.rsplit("/", 1)[-1], file.size) for file in files]
  older = [names, column, most, identity]
  since = [[file.document_size for file in files], asdict(held_out)]
  return hashlib.sha256(_json(older)).hexdigest(), hashlib.sha256(_json([*older, *since])).hexdigest()


def _claim_folder(folder: OutputFolder, to: str, request: str, older: str) -> dict[str, Any] | None:
  """Marks the folder as this request's; returns the manifest where it has been fulfilled already, also by an older
  version."""
  manifest, begun, names = folder.read(MANIFEST), folder.read(_REQUEST), folder.names()
  if manifest is None and begun is None and names not in ([], [UNFINISHED]):
    raise ConfigError(f"--to {to} holds something else: choose another folder.")
  there = json.loads(manifest)["request"] if manifest else json.loads(begun) if begun else request
  if manifest and HELD_OUT not in json.loads(manifest) and there == older:
    there = request
  if there != request and any(name.endswith(".array_record") for name in names):
    raise ConfigError(f"--to {to} holds shards of other text, another tokenizer or other flags: choose another folder.")
  if manifest or there != request:
    folder.remove(UNFINISHED)
  if manifest:
    return json.loads(manifest)
  try:
    folder.write(_REQUEST, _json(request))
  except OSError as error:
    raise ConfigError(f"--to {to} cannot be written: {error.strerror}.") from None
  return None


def _plan(
  folder: OutputFolder, to: str, files: Sequence[File], column: str, most: SpanLimits, skip_bad: int, execute: Execute
) -> list[ShardPlan]:
  """The spans of all files, in order, joined while a shard has room."""
  known = set(folder.names(_PLAN))
  unread = [(n, f) for n, f in enumerate(files) if needs_scan(f) and _spans_file(n).rsplit("/", 1)[-1] not in known]
  execute(partial(split_one_file, to, column, most, skip_bad), unread)
  plans: list[list[TextSpan]] = []
  count = size = 0
  for number, file in enumerate(files):
    noted = folder.read(_spans_file(number)) if needs_scan(file) else None
    for span in [TextSpan(**values) for values in json.loads(noted)] if noted else split_file(file, column, most):
      if not plans or count + span.documents > most.documents or size + span.size > most.size:
        plans.append([])
        count = size = 0
      plans[-1].append(span)
      count, size = count + span.documents, size + span.size
  return [ShardPlan(number, tuple(spans)) for number, spans in enumerate(plans)]


def _ignore_or_raise(skip_bad: int) -> OnBadRecord:
  """An `on_bad` that ignores bad records if some may be skipped, else raises."""
  return (lambda bad: None) if skip_bad else raise_bad_record


def _spans_file(number: int) -> str:
  return f"{_PLAN}/{number:07}.json"


def _install_tokenizer(
  tokenizer: TokenizerOptions,
  folder: OutputFolder,
  plans: Sequence[ShardPlan],
  column: str,
  train: bool,
  skip_bad: int,
  display: Display | None,
) -> tuple[str, ...]:
  """Puts the tokenizer's files beside the shards, so that the folder is all that anyone needs; returns their names."""
  if (names := folder.read(_INSTALLED)) is None:
    with folder.scratch() as scratch:
      if train:
        if display:
          display.message(f"training a tokenizer of {tokenizer.vocab_size:,} tokens")
        on_bad = _ignore_or_raise(skip_bad)
        whole = chain.from_iterable(documents(span, column, on_bad) for plan in plans for span in plan.spans)
        files = train_tokenizer(whole, tokenizer.vocab_size, tokenizer.training_characters, Path(scratch))
      else:
        files = load_tokenizer(tokenizer).vocabulary.files
      for name, file in files.items():
        folder.write(name, file.read_bytes())
    folder.write(_INSTALLED, names := _json(list(files)))
  return tuple(json.loads(names))


def _installed_options(tokenizer: TokenizerOptions, trained: bool) -> TokenizerOptions:
  """What opens the tokenizer in the folder, once its path is known; it goes to other machines without secrets."""
  kind = TokenizerType.HUGGINGFACE if trained else tokenizer.kind
  return replace(tokenizer, path=None, kind=kind, chat_template="", chat_template_path="", access_token=None)


@lru_cache(maxsize=1)
def _tokenizer(job: _Job) -> TextTokenizer:
  """The tokenizer in the folder, which may not be on this machine."""
  folder = OutputFolder(job.to)
  with tempfile.TemporaryDirectory() as here:
    for name in job.tokenizer_files:
      content = folder.read(name)
      assert content is not None, "the tokenizer is there before the shards"
      Path(here, name).write_bytes(content)
    return load_tokenizer(replace(job.tokenizer, path=here))


def _read_record(folder: OutputFolder, job: _Job, plan: ShardPlan) -> dict[str, Any] | None:
  """What is known of a finished shard: its entries of the manifest, and what was skipped.

  None where there is none, or where documents of it are to be held out that are not.
  """
  content = folder.read(f"{UNFINISHED}/{job.name(plan)}.json")
  if content is None or "lowest_bytes" not in (note := json.loads(content)):  # a note of an older version has less
    return None
  whole = all(not e["documents"] or folder.size(e["file"]) == e["bytes"] for e in (note["entry"], note[HELD_OUT]))
  missed = note["lowest"] is not None and note["threshold"] <= note["lowest"] < job.held_out.threshold
  return note if whole and not missed else None


def _with_one_held_out(folder: OutputFolder, job: _Job, plans: Sequence[ShardPlan]) -> _Job:
  """The job that holds out at least one document, by the hashes that all shards have noted.

  A text that is copied so often that all of its copies are too much is trained on.
  """
  if not job.held_out.threshold:
    return job
  read = filter(None, (_read_record(folder, job, plan) for plan in plans))
  notes = [note for note in read if note["lowest"] is not None]
  lowest = min((note["lowest"] for note in notes), default=None)
  size = sum(note["lowest_bytes"] for note in notes if note["lowest"] == lowest)
  if lowest is None or size > job.held_out.largest:
    return job
  return replace(job, held_out=job.held_out.with_at_least_one(lowest))


def _build_manifest(folder: OutputFolder, job: _Job, plans: Sequence[ShardPlan], rule: HeldOutRule) -> dict[str, Any]:
  """The manifest: the same for the same request, whoever did the work."""
  notes, skipped = [_read_record(folder, job, plan) for plan in plans], _Skipped(job.skip_bad)
  assert None not in notes, "a shard was not made"
  for note in filter(None, notes):
    skipped.add(note["skipped"], note["first"])
  shards = [note["entry"] for note in notes if note and note["entry"]["documents"]]
  held_out = [note[HELD_OUT] for note in notes if note and note[HELD_OUT]["documents"]]
  if not shards and held_out:
    raise ConfigError(f"--held-out {rule.share:g} holds out every document: choose a smaller share, or 0.")
  if not shards:
    raise ConfigError("There is no text in what was given: every document is empty.")
  tokenizer = _tokenizer(job)
  return {
    "schema": SCHEMA,
    "dtype": _dtype(tokenizer.vocab_size).name,
    **_totals(shards),
    "skipped": skipped.count,
    "tokenizer": tokenizer.identity,
    "request": job.request,
    "shards": shards,
    HELD_OUT: {"share": rule.share, **_totals(held_out), "shards": held_out},
  }


def _totals(shards: Sequence[dict[str, Any]]) -> dict[str, int]:
  return {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}


@contextmanager
def _show_progress(folder: OutputFolder, job: _Job, plans: Sequence[ShardPlan], display: Display) -> Iterator[None]:
  """Shows progress by the finished shards in the folder, since workers may run anywhere."""
  over = threading.Event()

  def report() -> None:
    there = set(folder.names(UNFINISHED))
    finished = [plan for plan in plans if f"{job.name(plan)}.json" in there]
    display.progress(len(finished), len(plans), *(sum(p.size for p in group) for group in (finished, plans)))

  def watch() -> None:
    while not over.wait(_POLL_SECONDS):
      report()

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    yield
  finally:
    over.set()
    watcher.join()
  report()


def _exit_with_parent() -> None:
  """Makes a worker ignore Ctrl-C and end with its parent."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  parent = multiprocessing.parent_process()
  assert parent is not None

  def follow() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=follow, daemon=True).start()


def _dtype(vocab_size: int) -> np.dtype:
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _json(value: Any) -> bytes:
  return (json.dumps(value, indent=1) + "\n").encode()
