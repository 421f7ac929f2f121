"""Saves a teacher's likeliest next tokens for the data of a run, from which students learn without it."""

import json
import logging
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import training_steps
from maxtext.configs.errors import plural
from maxtext.data.batch import Batch
from maxtext.data.output_folder import OutputFolder
from maxtext.data.teacher_outputs import TEACHER_LOG_PROBS, TEACHER_TOKENS, SavedOutputs
from maxtext.distributed.multihost import broadcast_from_first
from maxtext.kernels.cross_entropy import tiled
from maxtext.kernels.divergence import top_k_log_probs
from maxtext.logs import readable_duration, readable_size
from maxtext.mesh.devices import make_mesh
from maxtext.models.decoder import Decoder
from maxtext.status_line import status_line
from maxtext.training.frozen import frozen_params
from maxtext.training.program import Program
from maxtext.training.reference import parameter_digest
from maxtext.training.teacher import teacher_config

_LOG = logging.getLogger(__name__)
_SHARD_BYTES = 2**26


def save_teacher_outputs(config: MaxTextConfig, top_k: int) -> SavedOutputs:
  """Writes `offline_data_dir`: for `steps` batches of the run's data, or all that there are, each position's `top_k`
  tokens. Started again, it goes on after the last shard.

  Raises:
    ConfigError: there is no teacher or no folder, or the folder holds outputs of another teacher or of other data.
  """
  folder, teacher = _checked(config, top_k)
  program = Program.of(teacher, make_mesh(teacher))
  program.data.check()
  params = frozen_params(teacher, program.model)
  wanted, first = _described(config, program, params, top_k), jax.process_index() == 0
  problem = "" if not first else _problem(folder, wanted)
  if problem := broadcast_from_first(problem):
    raise ConfigError(problem)
  found = SavedOutputs.read(folder) if first else None
  done = int(broadcast_from_first(str(0 if found is None else found.rows)))
  saved, start = found or wanted, time.monotonic()
  run = program.forward(_top_k(program, config.distill_temperature, top_k))
  batches, steps = done // wanted.rows_per_batch, training_steps(config)
  pending: list[np.ndarray] = []
  with status_line() as status:
    for number, fed in enumerate(islice(program.feed(), batches, steps), batches + 1):
      made = jax.tree.map(np.asarray, run(params, fed.batch))
      pending.append(_records(made, wanted) if first else np.empty(0, wanted.record))
      if first and sum(map(len, pending)) * wanted.record.itemsize >= _SHARD_BYTES:
        saved = _write_shard(OutputFolder(folder), saved, pending)
        pending.clear()
      text = f"saving teacher outputs  {number:,} of {steps:,} batches"
      status.show(lambda width, text=text: text)  # type: ignore[misc]
  if first and pending:
    saved = _write_shard(OutputFolder(folder), saved, pending)
  if first:
    seconds, size = readable_duration(time.monotonic() - start), readable_size(saved.rows * saved.record.itemsize)
    added = plural(saved.rows - done, "row")
    _LOG.info(f"maxtext: {added} of teacher outputs in {seconds}; {folder} has {saved.rows:,}, up to {size}.")
  return saved


def _checked(config: MaxTextConfig, top_k: int) -> tuple[str, MaxTextConfig]:
  if not config.offline_data_dir or not config.teacher_overrides:
    raise ConfigError("data teacher needs offline_data_dir=FOLDER, to write to, and teacher_overrides.")
  if config.distill_temperature_schedule != "constant":
    raise ConfigError("data teacher saves one temperature: write distill_temperature_schedule=constant.")
  teacher = teacher_config(config)
  if not teacher.load_parameters_path and not teacher.load_full_state_path:
    raise ConfigError("teacher_overrides names no parameters: add load_parameters_path.")
  if not 1 <= top_k <= teacher.vocab_size:
    raise ConfigError(f"--top-k {top_k}: from 1 to vocab_size={teacher.vocab_size}.")
  return config.offline_data_dir, teacher


def _described(config: MaxTextConfig, program: Program, params: Any, top_k: int) -> SavedOutputs:
  rows, length = program.batch.inputs.shape
  sources = program.data.opened("train").sources
  return SavedOutputs(
    top_k, config.distill_temperature, length, program.config.vocab_size, rows, parameter_digest(params),
    [source.documents.identity for source in sources],
  )  # fmt: skip


def _problem(folder: str, wanted: SavedOutputs) -> str:
  """Why a folder cannot be gone on with; empty where it can."""
  found = SavedOutputs.read(folder)
  if found is None or _same(found, wanted):
    return ""
  names = ("top_k", "temperature", "length", "vocab_size", "rows_per_batch")
  for name in names:
    ours, theirs = getattr(wanted, name), getattr(found, name)
    if ours != theirs:
      return f"offline_data_dir={folder} was begun with {name}={theirs}, and this is {ours}: choose another folder."
  what = "another teacher" if found.model != wanted.model else "other data"
  return f"offline_data_dir={folder} has outputs of {what}: choose another folder."


def _same(found: SavedOutputs, wanted: SavedOutputs) -> bool:
  ours, theirs = (replace(one, shards=(), data=json.dumps(one.data, sort_keys=True)) for one in (wanted, found))
  return ours == theirs


def _top_k(program: Program, temperature: float, top_k: int) -> Any:
  """The rows of a batch with the teacher's likeliest tokens, in the order of the text."""
  order, tiles = program.model.execution.kernels.attention.order, program.config.num_vocab_tiling

  def run(decoder: Decoder, batch: Batch) -> dict[str, jax.Array]:
    hidden, _, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    tokens, log_probs = tiled(lambda x: top_k_log_probs(decoder.logits(x), temperature, top_k), tiles, hidden)
    segments = jax.numpy.ones_like(batch.inputs) if batch.segments is None else batch.segments
    row = {"inputs": batch.inputs, "targets": batch.targets, "positions": batch.positions, "segments": segments,
           "weights": batch.weights, TEACHER_TOKENS: tokens, TEACHER_LOG_PROBS: log_probs}  # fmt: skip
    return row if order is None else {name: order.undo(value) for name, value in row.items()}

  return run


def _records(made: dict[str, np.ndarray], saved: SavedOutputs) -> np.ndarray:
  records = np.empty(len(made["inputs"]), saved.record)
  for name, values in made.items():
    records[name] = values
  return records


def _write_shard(folder: OutputFolder, saved: SavedOutputs, pending: list[np.ndarray]) -> SavedOutputs:
  from array_record.python.array_record_module import ArrayRecordWriter

  name = f"teacher-{len(saved.shards):05}.array_record"
  with folder.scratch() as scratch:
    file = Path(scratch, name)
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for records in pending:
      for record in records:
        writer.write(record.tobytes())
    writer.close()
    folder.publish(file, name)
  saved = replace(saved, shards=(*saved.shards, (name, sum(map(len, pending)))))
  saved.write(folder)
  return saved
