"""`maxtext data`: text made ready for training, and how fast it can be read. Only the latter imports JAX."""

import argparse
import os
import time
from contextlib import closing
from typing import Any

from maxtext.cli.config import add_overrides, resolve_overrides
from maxtext.cli.display import open_display
from maxtext.configs import ConfigError
from maxtext.configs.errors import plural


def add_commands(commands: Any) -> None:
  """Adds `data prepare` and `data bench` to the parser."""
  parser = commands.add_parser("data", help="make text ready for training, measure how fast it is read")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  prepare = actions.add_parser(
    "prepare",
    help="text to tokenised shards",
    description="Turn text into tokenised ArrayRecord shards with a manifest. Started again, it resumes.",
  )
  add_overrides(prepare)
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
  prepare.add_argument(
    "--skip-bad", type=int, default=0, metavar="N", help="leave out up to N records that cannot be read (default 0)"
  )
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  prepare.add_argument("--workers", type=int, default=cores, metavar="N", help="processes (default one for each core)")
  prepare.add_argument("--runner", metavar="NAME", help="run on Apache Beam: DirectRunner, DataflowRunner, FlinkRunner")
  prepare.add_argument(
    "--beam", action="append", default=[], metavar="KEY=VALUE", help="an option of the Beam pipeline; may be repeated"
  )
  prepare.set_defaults(run=_prepare)
  bench = actions.add_parser(
    "bench",
    help="how fast a run's data is made",
    description="Make the batches of a run without the run: tokens a second, and what bounds them.",
  )
  add_overrides(bench)
  bench.add_argument("--seconds", type=float, default=10, metavar="S", help="how long to look (default 10)")
  bench.set_defaults(run=_bench)


def _prepare(arguments: argparse.Namespace) -> int:
  from maxtext.data.options import tokenizer_options
  from maxtext.data.prepare import in_beam, in_processes, prepare
  from maxtext.data.raw_text import find_files, standard_library

  _refuse(arguments)
  overrides = [*arguments.overrides, "dataset_type=grain"]  # Grain reads what is made
  config = resolve_overrides(overrides, arguments.strict).config
  files = [*find_files(arguments.sources, arguments.suffix), *(standard_library() if arguments.stdlib else ())]
  runner = in_beam(arguments.runner, arguments.beam) if arguments.runner else in_processes(arguments.workers)
  start = time.perf_counter()
  with closing(open_display("shard")) as display:
    manifest = prepare(
      tokenizer_options(config),
      files,
      arguments.to,
      runner,
      column=arguments.column,
      train=arguments.train_tokenizer,
      shard_size=int(arguments.shard_megabytes * 2**20),
      skip_bad=arguments.skip_bad,
      display=display,
    )
  print(
    f"{arguments.to}: {plural(manifest['documents'], 'document')}, {manifest['tokens']:,} tokens of "
    f"{manifest['tokenizer']['vocab_size']:,} kinds, {plural(len(manifest['shards']), 'shard')}, "
    f"{time.perf_counter() - start:.1f} s"
  )
  if skipped := manifest.get("skipped", 0):
    print(f"{arguments.to}: without {plural(skipped, 'record')} that could not be read")
  return 0


def _refuse(arguments: argparse.Namespace) -> None:
  if not arguments.sources and not arguments.stdlib:
    raise ConfigError("data prepare needs text: --from PATH, or --stdlib.")
  if arguments.workers < 1 or arguments.shard_megabytes <= 0:
    flags = f"--workers {arguments.workers} --shard-megabytes {arguments.shard_megabytes:g}"
    raise ConfigError(f"{flags}: at least 1, and above 0.")
  if arguments.skip_bad < 0:
    raise ConfigError(f"--skip-bad {arguments.skip_bad}: at least 0.")
  if arguments.beam and not arguments.runner:
    raise ConfigError(f"--beam {arguments.beam[0]} has no effect without --runner.")


def _bench(arguments: argparse.Namespace) -> int:
  config = resolve_overrides(arguments.overrides, arguments.strict).config
  import jax

  from maxtext.bench.dataloader import abstract_batch, measure_stages, measure_throughput
  from maxtext.configs.derived import global_batch_size
  from maxtext.data.options import data_options

  options = data_options(config)
  batch = abstract_batch((global_batch_size(config, jax.device_count()), config.max_target_length))
  found = measure_throughput(options, batch, arguments.seconds / 2)
  print(
    f"as configured: {found.tokens_per_second:,.0f} tokens/s, {found.packing_efficiency:.1%} of the rows filled",
    flush=True,
  )
  if shares := measure_stages(options, batch, arguments.seconds / 2):
    print("one process:   " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    print(f"bound by:      {max(shares, key=lambda name: shares[name])}")
  return 0
