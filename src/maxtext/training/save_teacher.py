"""Saves a teacher's likeliest next tokens for the data of a run, from which students learn without it."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.tokenizer import keep_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import training_steps
from maxtext.configs.errors import RunError, plural
from maxtext.data.batch import Batch, BatchWithState
from maxtext.data.options import data_options
from maxtext.data.output_folder import OutputFolder
from maxtext.data.teacher_outputs import TEACHER_LOG_PROBS, TEACHER_TOKENS, SavedOutputs, local_folder
from maxtext.distributed.multihost import broadcast_from_first, check_joined, join
from maxtext.kernels.cross_entropy import tiled
from maxtext.kernels.divergence import top_k_log_probs
from maxtext.logs import readable_duration, readable_size
from maxtext.mesh.devices import make_mesh
from maxtext.models.decoder import Decoder
from maxtext.status_line import status_line
from maxtext.training.consistency import agree_on_start
from maxtext.training.frozen import frozen_params
from maxtext.training.program import Program
from maxtext.training.reference import parameter_digest
from maxtext.training.teacher import check_parameters, check_tokenizers, teacher_config

_LOG = logging.getLogger(__name__)
_SHARD_BYTES = 2**26


def save_teacher_outputs(config: MaxTextConfig, top_k: int) -> None:
  """Writes `offline_data_dir`: for `steps` batches of the run's data, or all that there are, each position's `top_k`
  tokens. Started again, it goes on after the last shard. Process 0 writes.

  Raises:
    ConfigError: there is no teacher or no folder, or the folder holds outputs of another teacher or of other data.
    RunError: the folder cannot be written.
  """
  teacher, vocab_size = _checked(config, top_k)
  join(config)
  check_joined(config)
  agree_on_start(config)
  program = Program.of(teacher, make_mesh(teacher))
  program.data.check()
  params = frozen_params(teacher, program.model)
  feed = iter(program.feed())
  first = next(feed)
  rows, length = program.batch.inputs.shape
  wanted = SavedOutputs(
    top_k, config.distill_temperature, length, vocab_size, rows, parameter_digest(params), _described(config, first)
  )
  output = _Output(config, wanted)
  steps = training_steps(config)
  run = program.forward(_top_k(program, config.distill_temperature, top_k, vocab_size))
  with status_line() as status:
    for number, fed in enumerate(islice(chain([first], feed), output.batches, steps), output.batches + 1):
      output.add(jax.tree.map(np.asarray, run(params, fed.batch)))
      text = f"saving teacher outputs  {number:,} of {steps:,} batches"
      status.show(lambda width, text=text: text)  # type: ignore[misc]
  output.close()


class _Output:
  """A folder of outputs that is gone on with; on other processes than the first nothing is written."""

  def __init__(self, config: MaxTextConfig, wanted: SavedOutputs) -> None:
    assert config.offline_data_dir is not None, "checked before"
    self._name, self._saved, self._start = config.offline_data_dir, wanted, time.monotonic()
    self._is_first = jax.process_index() == 0
    self._pending: list[np.ndarray] = []
    self._added = 0  # bytes since the last shard
    self._on_first(lambda: self._begin(config))
    self._done = int(broadcast_from_first(str(self._saved.rows)))

  @property
  def batches(self) -> int:
    """That were saved before."""
    return self._done // self._saved.rows_per_batch

  def add(self, made: dict[str, np.ndarray]) -> None:
    """Adds the rows of a batch."""
    if self._is_first:
      records = np.empty(len(made["inputs"]), self._saved.record)
      for name, values in made.items():
        records[name] = values
      self._pending.append(records)
    self._added += self._saved.record.itemsize * self._saved.rows_per_batch
    if self._added >= _SHARD_BYTES:
      self._write()

  def close(self) -> None:
    """Writes what is left, and says what there is."""
    self._write()
    if self._is_first:
      saved = self._saved
      seconds, size = (
        readable_duration(time.monotonic() - self._start),
        readable_size(saved.rows * saved.record.itemsize),
      )
      added = plural(saved.rows - self._done, "row")
      _LOG.info(
        f"maxtext: {added} of teacher outputs in {seconds}; {self._name} has {saved.rows:,}, {size} uncompressed."
      )

  def _begin(self, config: MaxTextConfig) -> None:
    found = SavedOutputs.read(self._name)
    if found is not None:
      _check_same(self._name, found, self._saved)
      self._saved = found
    else:
      self._saved.write(OutputFolder(str(local_folder(self._name))))
    keep_tokenizer(data_options(config), config.load_parameters_path, str(local_folder(self._name)))

  def _write(self) -> None:
    self._added = 0
    self._on_first(self._write_shard)

  def _write_shard(self) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    if not self._pending:
      return
    folder, name = OutputFolder(str(local_folder(self._name))), f"teacher-{len(self._saved.shards):05}.array_record"
    with folder.scratch() as scratch:
      file = Path(scratch, name)
      writer = ArrayRecordWriter(str(file), "group_size:1")
      for record in chain.from_iterable(self._pending):
        writer.write(record.tobytes())
      writer.close()
      folder.publish(file, name)
    self._saved = replace(self._saved, shards=(*self._saved.shards, (name, sum(map(len, self._pending)))))
    self._saved.write(folder)
    self._pending.clear()

  def _on_first(self, work: Callable[[], None]) -> None:
    """Does what process 0 alone does; its failure is everybody's, since the others would wait."""
    problem, kind = "", "run"
    if self._is_first:
      try:
        work()
      except ConfigError as error:
        problem, kind = str(error), "config"
      except (OSError, RuntimeError) as error:
        problem = f"offline_data_dir={self._name} cannot be written: {getattr(error, 'strerror', None) or error}."
    kind, _, problem = broadcast_from_first(f"{kind}:{problem}").partition(":")
    if problem:
      raise ConfigError(problem) if kind == "config" else RunError(problem)


def _checked(config: MaxTextConfig, top_k: int) -> tuple[MaxTextConfig, int]:
  """The teacher's configuration, and the tokens that both models have."""
  if not config.offline_data_dir or not config.teacher_overrides:
    raise ConfigError("data teacher needs offline_data_dir=FOLDER, to write to, and teacher_overrides.")
  if config.distill_temperature_schedule != "constant":
    raise ConfigError("data teacher saves one temperature: write distill_temperature_schedule=constant.")
  teacher = teacher_config(config)
  check_parameters(teacher)
  check_tokenizers(config, teacher)
  vocab_size = min(teacher.vocab_size, config.vocab_size)
  if not 1 <= top_k <= vocab_size:
    raise ConfigError(f"--top-k {top_k}: from 1 to vocab_size={vocab_size}.")
  return teacher, vocab_size


def _described(config: MaxTextConfig, fed: BatchWithState) -> Any:
  """What determines the rows and their order."""
  about = fed.iterator_state().get("about")
  if about is None:
    return {"dataset_type": config.dataset_type.value, "seed": config.data_shuffle_seed}
  return json.loads(np.asarray(about).tobytes())


def _check_same(folder: str, found: SavedOutputs, wanted: SavedOutputs) -> None:
  for name in ("top_k", "temperature", "length", "vocab_size", "rows_per_batch"):
    ours, theirs = getattr(wanted, name), getattr(found, name)
    if ours != theirs:
      raise ConfigError(
        f"offline_data_dir={folder} was begun with {name}={theirs}, and this is {ours}: choose another folder."
      )
  if found.model != wanted.model or found.data != json.loads(json.dumps(wanted.data)):
    what = "another teacher" if found.model != wanted.model else "other data, or of another order"
    raise ConfigError(f"offline_data_dir={folder} has outputs of {what}: choose another folder.")


def _top_k(program: Program, temperature: float, top_k: int, vocab_size: int) -> Any:
  """The rows of a batch with the teacher's likeliest tokens, in the order of the text."""
  order, tiles = program.model.execution.kernels.attention.order, program.config.num_vocab_tiling

  def run(decoder: Decoder, batch: Batch) -> dict[str, jax.Array]:
    hidden, _, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    tokens, log_probs = tiled(
      lambda x: top_k_log_probs(decoder.logits(x), temperature, top_k, vocab_size), tiles, hidden
    )
    segments = jnp.ones_like(batch.inputs) if batch.segments is None else batch.segments
    row = {"inputs": batch.inputs, "targets": batch.targets, "positions": batch.positions, "segments": segments,
           "weights": batch.weights, TEACHER_TOKENS: tokens, TEACHER_LOG_PROBS: log_probs}  # fmt: skip
    return row if order is None else {name: order.undo(value) for name, value in row.items()}

  return run
