"""`maxtext data`: text made ready for training, rows as the model sees them, and how fast they can be read.

Preparing imports no JAX."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli.config import add_overrides, resolve_overrides
from maxtext.cli.display import open_display
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import plural

if TYPE_CHECKING:
  from maxtext.data.batch import Batch
  from maxtext.data.options import DataOptions


def add_commands(commands: Any) -> None:
  """Adds the actions of `maxtext data` to the parser."""
  parser = commands.add_parser("data", help="make text ready for training, show it, measure how fast it is read")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  prepare = actions.add_parser(
    "prepare",
    help="text to tokenised shards",
    description="Turn text into tokenised ArrayRecord shards with a manifest. Started again, it resumes.",
  )
  add_overrides(prepare)
  prepare.add_argument(
    "--from", dest="sources", action="append", default=[], metavar="PATH",
    help="a text file, a .jsonl or .parquet file, or a folder of them; may be repeated. A text file is one document; "
    "one that is alone is cut into documents at ends of paragraphs and lines",
  )  # fmt: skip
  prepare.add_argument("--stdlib", action="store_true", help="the source files of this Python's own library")
  prepare.add_argument(
    "--to", metavar="FOLDER", help="where the shards go (default data/NAME, with the name of what --from gives)"
  )
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
  prepare.add_argument(
    "--held-out", type=float, metavar="SHARE",
    help="of the text that is held out from training, for evaluation; 0 holds out nothing (default 0.01, and at most "
    "about 4 MB)",
  )  # fmt: skip
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  prepare.add_argument("--workers", type=int, default=cores, metavar="N", help="processes (default one for each core)")
  prepare.add_argument("--runner", metavar="NAME", help="run on Apache Beam: DirectRunner, DataflowRunner, FlinkRunner")
  prepare.add_argument(
    "--beam", action="append", default=[], metavar="KEY=VALUE", help="an option of the Beam pipeline; may be repeated"
  )
  prepare.set_defaults(run=_prepare)
  show = actions.add_parser(
    "show",
    help="rows as the model will see them",
    description="Show the first rows of a run's data as the model will see them: sequences, special tokens, which "
    "tokens train, and counts. Needs no weights. NO_COLOR=1 shows brackets instead of colours.",
  )
  add_overrides(show)
  show.add_argument("--rows", type=int, default=4, metavar="N", help="how many (default 4)")
  show.add_argument("--html", type=Path, metavar="FILE", help="write a page instead, and print only the counts")
  show.set_defaults(run=_show)
  teacher = actions.add_parser(
    "teacher",
    help="save a teacher's outputs for distillation without it",
    description="Save the likeliest next tokens of teacher_overrides for `steps` batches of a run's data in "
    "offline_data_dir. Started again, it resumes.",
  )
  add_overrides(teacher)
  teacher.add_argument("--top-k", type=int, default=64, metavar="K", help="tokens to keep of each (default 64)")
  teacher.set_defaults(run=_teacher)
  bench = actions.add_parser(
    "bench",
    help="how fast a run's data is made",
    description="Make the batches of a run without the run: tokens a second, and what bounds them.",
  )
  add_overrides(bench)
  bench.add_argument("--seconds", type=float, default=10, metavar="S", help="how long to look (default 10)")
  bench.set_defaults(run=_bench)


def _prepare(arguments: argparse.Namespace) -> int:
  from maxtext.data.held_out import DEFAULT_RULE, HeldOutRule
  from maxtext.data.options import tokenizer_options
  from maxtext.data.prepare import in_beam, in_processes, prepare
  from maxtext.data.raw_text import find_files, standard_library

  _refuse(arguments)
  to = arguments.to or _default_folder(arguments)
  overrides = [*arguments.overrides, "dataset_type=grain"]  # Grain reads what is made
  config = resolve_overrides(overrides, arguments.strict).config
  files = [*find_files(arguments.sources, arguments.suffix), *(standard_library() if arguments.stdlib else ())]
  runner = in_beam(arguments.runner, arguments.beam) if arguments.runner else in_processes(arguments.workers)
  start = time.perf_counter()
  with closing(open_display("shard")) as display:
    manifest = prepare(
      tokenizer_options(config),
      files,
      to,
      runner,
      column=arguments.column,
      train=arguments.train_tokenizer,
      shard_size=int(arguments.shard_megabytes * 2**20),
      skip_bad=arguments.skip_bad,
      held_out=DEFAULT_RULE if arguments.held_out is None else HeldOutRule(arguments.held_out),
      display=display,
    )
  for line in _describe(manifest, time.perf_counter() - start):
    print(f"{to}: {line}")
  return 0


def _describe(manifest: dict[str, Any], seconds: float) -> Iterator[str]:
  """What was made."""
  held_out = manifest.get("held_out", {"share": None, "documents": 0, "tokens": 0})
  documents, tokens = (manifest[name] + held_out[name] for name in ("documents", "tokens"))
  shards = plural(len(manifest["shards"]), "shard")
  kinds = f"{manifest['tokenizer']['vocab_size']:,} kinds"
  yield f"{plural(documents, 'document')}, {plural(tokens, 'token')} of {kinds}, {shards}, {seconds:.1f} s"
  if skipped := manifest.get("skipped", 0):
    yield f"without {plural(skipped, 'record')} that could not be read"
  if held_out["documents"]:
    share = held_out["tokens"] / tokens
    yield (
      f"{plural(held_out['documents'], 'document')} with {plural(held_out['tokens'], 'token')} ({share:.1%}) held out "
      f"for evaluation"
    )
  elif held_out["share"] is None:
    yield "prepared by an older version, so nothing is held out for evaluation; another --to prepares it again"
  elif held_out["share"]:
    yield "nothing is held out for evaluation: every document is too large a part of so little text"


def _default_folder(arguments: argparse.Namespace) -> str:
  """`data/` and the name of the only source."""
  names = [source.rstrip("/").rsplit("/", 1)[-1] for source in arguments.sources] + ["stdlib"] * arguments.stdlib
  name = names[0].lstrip(".").split(".")[0] if len(names) == 1 else ""
  if not name:
    raise ConfigError("data prepare needs --to FOLDER: there is no one name to call it by.")
  return f"data/{name}"


def _refuse(arguments: argparse.Namespace) -> None:
  if not arguments.sources and not arguments.stdlib:
    raise ConfigError("data prepare needs text: --from PATH, or --stdlib.")
  if arguments.workers < 1 or arguments.shard_megabytes <= 0:
    flags = f"--workers {arguments.workers} --shard-megabytes {arguments.shard_megabytes:g}"
    raise ConfigError(f"{flags}: at least 1, and above 0.")
  if arguments.skip_bad < 0:
    raise ConfigError(f"--skip-bad {arguments.skip_bad}: at least 0.")
  if arguments.held_out is not None and not 0 <= arguments.held_out <= 0.5:
    raise ConfigError(f"--held-out {arguments.held_out:g}: a share of 0 to 0.5.")
  if arguments.beam and not arguments.runner:
    raise ConfigError(f"--beam {arguments.beam[0]} has no effect without --runner.")


def _show(arguments: argparse.Namespace) -> int:
  if arguments.rows < 1:
    raise ConfigError(f"--rows {arguments.rows}: at least 1.")
  resolved = resolve_overrides(arguments.overrides, arguments.strict)
  from maxtext.checkpoint.tokenizer import open_data_tokenizer
  from maxtext.data.inspect import RowCounts, read_rows
  from maxtext.data.inspect_format import as_html, as_text, describe_counts

  options, batch = _data_and_batch(resolved.config)
  with ExitStack() as opened:
    tokenizer, problem = None, "tokenizer_path is not set."
    try:
      tokenizer = opened.enter_context(open_data_tokenizer(options, resolved.config.load_parameters_path))
    except ConfigError as error:  # raised again by data that needs it
      problem = str(error)
    rows = read_rows(options, batch, tokenizer, arguments.rows)
  if tokenizer is None and options.has_documents:
    _print(f"tokens are shown by their ids: {problem}")
  count, length = batch.inputs.shape
  title = f"{options.kind.value} data, in batches of {plural(count, 'row')} of {length} tokens"
  if arguments.html:
    _write_page(arguments.html, as_html(rows, title))
  else:
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _print(title, *as_text(rows, colours), "")
  _print(*describe_counts(RowCounts.of(rows)))
  return 0


def _teacher(arguments: argparse.Namespace) -> int:
  config = resolve_overrides(arguments.overrides, arguments.strict).config
  from maxtext.training.save_teacher import save_teacher_outputs

  save_teacher_outputs(config, arguments.top_k)
  return 0


def _print(*lines: str) -> None:
  """Prints lines, with escapes for characters that the output's encoding does not have."""
  encoding = sys.stdout.encoding or "utf-8"
  for line in lines:
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def _write_page(file: Path, text: str) -> None:
  try:
    file.write_text(text, encoding="utf-8")
  except OSError as error:
    raise ConfigError(f"--html {file} cannot be written: {error.strerror}.") from None
  print(f"wrote {file}")


def _data_and_batch(config: MaxTextConfig) -> "tuple[DataOptions, Batch]":
  """The data of a run on the devices that JAX finds, and an abstract batch."""
  import jax

  from maxtext.bench.dataloader import abstract_batch
  from maxtext.configs.derived import global_batch_size
  from maxtext.data.options import data_options

  shape = global_batch_size(config, jax.device_count()), config.max_target_length
  return data_options(config), abstract_batch(shape)


def _bench(arguments: argparse.Namespace) -> int:
  options, batch = _data_and_batch(resolve_overrides(arguments.overrides, arguments.strict).config)
  from maxtext.bench.dataloader import measure_stages, measure_throughput

  found = measure_throughput(options, batch, arguments.seconds / 2)
  print(
    f"as configured: {found.tokens_per_second:,.0f} tokens/s, {found.packing_efficiency:.1%} of the rows filled",
    flush=True,
  )
  if shares := measure_stages(options, batch, arguments.seconds / 2):
    print("one process:   " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    print(f"bound by:      {max(shares, key=lambda name: shares[name])}")
  return 0
