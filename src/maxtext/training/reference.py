"""Computes the log-probabilities of a run's reference model once, before step 1, where they are not on disk yet."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import plural
from maxtext.data.batch import Batch
from maxtext.data.documents import DataSource
from maxtext.data.local_rows import make_batch
from maxtext.data.packing import Packing
from maxtext.data.reference_log_probs import ReferenceLogProbs
from maxtext.data.spans import Items
from maxtext.data.splits import SplitName
from maxtext.data.streams import PackedStreams, Rows
from maxtext.distributed.multihost import broadcast_from_first
from maxtext.logs import readable_duration
from maxtext.models.model import Params
from maxtext.training.objectives.preference import PreferenceOptimization, answer_log_probs
from maxtext.training.program import Program

_LOG = logging.getLogger(__name__)
_READ_AHEAD = 64


def attach_reference(program: Program, folder: str, initial: Callable[[], Params], is_new: bool) -> None:
  """Makes the data of a run bring the reference model's log-probabilities, if its objective needs them.

  They are read from `folder`, or computed and written there.

  Args:
    program: the run.
    folder: of the files.
    initial: returns parameters and buffers of the reference model: those that the run starts from.
    is_new: the run starts at step 0, so that `initial` costs nothing, and what is on disk is checked against it.

  Raises:
    ConfigError: the folder has those of another model or of other data, or the data has no numbered documents.
  """
  objective = program.objective
  if (
    not isinstance(objective, PreferenceOptimization) or not objective.reads_reference or not program.data.is_configured
  ):
    return
  params: Params | None = None
  for split in program.data.splits:
    sources = program.data.opened(split).sources
    if not sources:
      raise ConfigError("precompute_ref_log_probs=true needs data on disk: set it to false for streamed data.")
    there = broadcast_from_first(str(ReferenceLogProbs.read(folder, split, sources) is not None)) == "True"
    if params is None and (is_new or not there):
      params = initial()
    if not there:
      assert params is not None
      _compute(program, objective, folder, split, sources, params)
    found = ReferenceLogProbs.read(folder, split, sources)
    if found is None:
      raise ConfigError(
        f"{folder} is not on storage that all processes of the run share: set reference_log_probs_path."
      )
    if is_new and params is not None and found.model != parameter_digest(params):
      raise ConfigError(
        f"{folder} has the reference log-probabilities of another model than the one that this run starts from: set "
        f"reference_log_probs_path to another folder, or delete this one."
      )
    program.data.attach_reference(folder, split, found)


def parameter_digest(params: Params) -> str:
  """A digest of the values of parameters, whatever their sharding: two numbers of 32 bits for each array."""
  hashes = jax.jit(lambda arrays: {name: _hash(array) for name, array in arrays.items()})(dict(params))
  text = "".join(f"{name} {params[name].shape} {np.asarray(hashes[name]).tolist()}\n" for name in sorted(hashes))
  return hashlib.sha256(text.encode()).hexdigest()


def _hash(array: jax.Array) -> jax.Array:
  """Sums of a hash of each value and its index: integers, so that the order of the sum does not matter."""
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
  index, stride = jnp.zeros((), jnp.uint32), 1
  for dimension in reversed(range(array.ndim)):
    index = index + jax.lax.broadcasted_iota(jnp.uint32, array.shape, dimension) * jnp.uint32(stride % 2**32)
    stride *= array.shape[dimension]
  sums = []
  for factor in (0x9E3779B1, 0x85EBCA77):
    mixed = (bits + index * jnp.uint32(factor)) * jnp.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x27D4EB2F)
    sums.append((mixed ^ (mixed >> 13)).sum(dtype=jnp.uint32))
  return jnp.stack(sums)


def _compute(
  program: Program,
  objective: PreferenceOptimization,
  folder: str,
  split: SplitName,
  sources: Sequence[DataSource],
  params: Params,
) -> None:
  start = time.monotonic()
  run = program.forward(lambda decoder, batch: answer_log_probs(decoder, batch, objective.tiles)[0])
  parts = [_of_source(program, source, partial(run, params)) for source in sources]
  count = int(sum(np.isfinite(part[:, 0]).sum() for part in parts))
  if not jax.process_index():
    ReferenceLogProbs.write(folder, split, sources, parameter_digest(params), parts)
    seconds = readable_duration(time.monotonic() - start)
    _LOG.info(f"maxtext: reference log-probabilities of {plural(count, f'{split} pair')} in {seconds}: {folder}")
  else:
    parameter_digest(params)  # all processes take part
  broadcast_from_first("written")


def _of_source(program: Program, source: DataSource, run: Callable[[Batch], jax.Array]) -> np.ndarray:
  """[documents, 2], NaN for those that are left out. Every process reads all of them."""
  count = sum(source.documents.sizes)
  found = np.full((count, 2), np.nan, np.float32)
  pairs = _InOrder(source, program.config.vocab_size, count)
  for rows in _batches(program, pairs):
    values = np.asarray(run(_place(program, rows)))
    in_rows = rows.segments.max(axis=1) // 2
    for row, number in enumerate(in_rows):
      found[pairs.take(number)] = values[row, :number]
  return found


class _InOrder:
  """The pairs of a source as one stream, which remembers the numbers of those that are not empty."""

  def __init__(self, source: DataSource, vocab_size: int, count: int) -> None:
    self._items, self._count = Items(source, vocab_size), count
    self._kept: list[int] = []
    self._next = 0

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """See `StreamDocuments`."""
    numbers = [k for _, k in wanted]
    assert numbers == list(range(self._next, self._next + len(numbers)))
    self._next += len(numbers)
    there = [k for k in numbers if k < self._count]
    found = self._items.read(there)
    self._kept += [k for k, pair in zip(there, found, strict=True) if len(pair)]
    return [*found, *[None] * (len(numbers) - len(there))]

  def take(self, number: int) -> list[int]:
    """The numbers of the next pairs."""
    taken, self._kept = self._kept[:number], self._kept[number:]
    return taken


def _batches(program: Program, pairs: _InOrder) -> Iterator[Rows]:
  rows, length = program.batch.inputs.shape
  rows //= program.config.gradient_accumulation_steps
  streams = PackedStreams(pairs, Packing(length, "concat_then_split", look_ahead=1), [0], read_ahead=_READ_AHEAD)
  while (made := streams.rows([0] * rows)).segments.any():
    yield made


def _place(program: Program, rows: Rows) -> Batch:
  sharding = program.batch.inputs.sharding
  return make_batch(rows, lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__))
