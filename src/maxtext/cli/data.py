"""`maxtext data`: text made ready for training. Imports no JAX."""

import argparse
import os
import sys
import time
from contextlib import closing
from typing import Any

from maxtext.cli.config import add_words, resolve_words
from maxtext.configs import ConfigError


def add_commands(commands: Any) -> None:
  """Adds `data prepare` to the parser."""
  parser = commands.add_parser("data", help="make text ready for training")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  prepare = actions.add_parser(
    "prepare",
    help="text to tokenised shards",
    description="Turn text into tokenised ArrayRecord shards with a manifest. Started again, it goes on where it was.",
  )
  add_words(prepare)
  prepare.add_argument(
    "--from", dest="sources", action="append", default=[], metavar="PATH",
    help="a text file, which is one document, a .jsonl or .parquet file, or a folder of them; may be repeated",
  )  # fmt: skip
  prepare.add_argument("--stdlib", action="store_true", help="the source files of this Python's own library")
  prepare.add_argument("--to", required=True, metavar="FOLDER", help="where the shards go")
  prepare.add_argument("--column", default="text", metavar="NAME", help="what holds the text (default text)")
  prepare.add_argument(
    "--suffix", action="append", default=[], metavar=".SUFFIX", help="files to take from folders (default all)"
  )
  prepare.add_argument(
    "--train-tokenizer",
    action="store_true",
    help="train one of vocab_size tokens on the text",
  )
  prepare.add_argument(
    "--shard-megabytes", type=float, default=8, metavar="MB", help="most text in one shard (default 8)"
  )
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  prepare.add_argument("--workers", type=int, default=cores, metavar="N", help="processes (default one for each core)")
  prepare.add_argument("--runner", metavar="NAME", help="run on Apache Beam: DirectRunner, DataflowRunner, FlinkRunner")
  prepare.add_argument(
    "--beam", action="append", default=[], metavar="KEY=VALUE", help="an option of the Beam pipeline; may be repeated"
  )
  prepare.set_defaults(run=_prepare)


def _prepare(arguments: argparse.Namespace) -> int:
  from maxtext.data.prepare import in_beam, in_processes, prepare
  from maxtext.data.raw_text import find_files, standard_library

  _refuse(arguments)
  config = resolve_words([*arguments.words, "dataset_type=grain"]).config  # what is made is read by Grain
  files = [*find_files(arguments.sources, arguments.suffix), *(standard_library() if arguments.stdlib else ())]
  runner = in_beam(arguments.runner, arguments.beam) if arguments.runner else in_processes(arguments.workers)
  start = time.perf_counter()
  with closing(_Terminal() if sys.stdout.isatty() else _Lines()) as display:
    manifest = prepare(
      config,
      files,
      arguments.to,
      runner,
      column=arguments.column,
      train=arguments.train_tokenizer,
      shard_size=int(arguments.shard_megabytes * 2**20),
      display=display,
    )
  print(
    f"{arguments.to}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens of "
    f"{manifest['tokenizer']['vocab_size']:,} kinds, {len(manifest['shards']):,} shards, "
    f"{time.perf_counter() - start:.1f} s"
  )
  return 0


def _refuse(arguments: argparse.Namespace) -> None:
  if not arguments.sources and not arguments.stdlib:
    raise ConfigError("data prepare needs text: --from PATH, or --stdlib.")
  if arguments.workers < 1 or arguments.shard_megabytes <= 0:
    words = f"--workers {arguments.workers} --shard-megabytes {arguments.shard_megabytes:g}"
    raise ConfigError(f"{words}: at least 1, and above 0.")
  if arguments.beam and not arguments.runner:
    raise ConfigError(f"--beam {arguments.beam[0]} has no effect without --runner.")


class _Terminal:
  """A bar."""

  def __init__(self) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    self._bar = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), "left")
    self._bar.add_task("", total=None)

  def say(self, line: str) -> None:
    self._bar.console.print(line, highlight=False)

  def progress(self, shards: int, all_shards: int, size: int, all_size: int) -> None:
    self._bar.start()
    self._bar.update(self._bar.task_ids[0], total=all_size, completed=size)

  def close(self) -> None:
    self._bar.stop()


class _Lines:
  """A line for every tenth of the text."""

  def __init__(self) -> None:
    self._tenths = 0

  def say(self, line: str) -> None:
    print(line, flush=True)

  def progress(self, shards: int, all_shards: int, size: int, all_size: int) -> None:
    tenths = 10 * size // all_size
    if tenths > self._tenths:
      self._tenths = tenths
      self.say(f"shard {shards}/{all_shards}  {size / 1e6:.1f} of {all_size / 1e6:.1f} MB")

  def close(self) -> None:
    """Nothing is open."""
