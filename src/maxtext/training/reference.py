"""Computes the log-probabilities of a run's reference model once, before step 1, where they are not on disk yet."""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError, plural
from maxtext.data.batch import Batch
from maxtext.data.documents import DataSource
from maxtext.data.local_rows import make_batch
from maxtext.data.packing import Packing
from maxtext.data.reference_log_probs import PAIR_RECORD, REFERENCE, ReferenceLogProbs, pair_checksum
from maxtext.data.spans import Items
from maxtext.data.splits import SplitName
from maxtext.data.streams import PackedStreams, Rows
from maxtext.distributed.multihost import any_process, broadcast_from_first
from maxtext.logs import readable_duration
from maxtext.models.model import Params
from maxtext.status_line import status_line
from maxtext.training.objectives.preference import answer_log_probs
from maxtext.training.program import Program
from maxtext.training.state import on_devices
from maxtext.training.synchronized_compile import SynchronizedCompile

_LOG = logging.getLogger(__name__)
_READ_AHEAD = 64


def attach_reference(
  program: Program, folder: str, initial: Callable[[], Params], *, is_new: bool = True, is_shared: bool = True
) -> None:
  """Makes the data of a run bring the reference model's log-probabilities, if its objective needs them.

  They are read from `folder`, or computed and written there.

  Args:
    program: the run.
    folder: of the files.
    initial: returns parameters and buffers of the reference model: those that the run starts from.
    is_new: the run starts now, so that `initial` costs nothing, and what is on disk is checked against it.
    is_shared: the user named the folder, so files in it that do not fit are an error. Others are computed again.

  Raises:
    ConfigError: a shared folder has those of another model or of other data, or damaged ones.
  """
  if not program.data.is_configured or REFERENCE not in program.batch.extra:
    return

  @cache
  def reference() -> tuple[Params, str]:
    params = _on_devices(initial())
    return params, parameter_digest(params)

  for split in program.data.splits:
    sources, digest = program.data.opened(split).sources, reference()[1] if is_new else ""
    # Hosts cache for a while what a shared folder has, so process 0 alone looks before the files are there.
    problem = broadcast_from_first("" if jax.process_index() else _problem(folder, split, sources, digest))
    if problem and problem != _MISSING and is_shared:
      raise ConfigError(problem)
    if problem:
      _compute(program, folder, split, sources, *reference())
    try:
      found = ReferenceLogProbs.read(folder, split, sources)
    except ConfigError as error:
      found, problem = None, str(error)
    if any_process(found is None):
      raise ConfigError(f"reference_log_probs_path={folder} is not on storage that all processes share. {problem}")
    assert found is not None
    program.data.attach_reference(split, found)


def parameter_digest(params: Params) -> str:
  """A digest of the values of parameters, whatever their sharding: two numbers of 32 bits for each array."""
  mesh = getattr(next(iter(params.values())).sharding, "mesh", None)
  replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
  hashes = SynchronizedCompile(jax.jit(_hashes, out_shardings=replicated), batch=0)(dict(params))
  text = "".join(f"{name} {params[name].shape} {np.asarray(hashes[name]).tolist()}\n" for name in sorted(hashes))
  return hashlib.sha256(text.encode()).hexdigest()


_MISSING = "missing"


def _problem(folder: str, split: SplitName, sources: Sequence[DataSource], digest: str) -> str:
  """Why the folder's files cannot be used; empty where they can. A digest is compared if there is one."""
  try:
    found = ReferenceLogProbs.read(folder, split, sources)
  except ConfigError as error:
    return str(error)
  if found is None:
    return _MISSING
  if digest and found.model != digest:
    return (
      f"{folder} has the reference log-probabilities of another model than the one that this run starts from: set "
      f"reference_log_probs_path to another folder."
    )
  return ""


def _on_devices(params: Params) -> Params:
  """Parameters that rest in the host's memory are used on the devices."""
  return on_devices(dict(params), {name: array.sharding for name, array in params.items()})


def _hashes(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return {name: _hash(array) for name, array in params.items()}


def _hash(array: jax.Array) -> jax.Array:
  """Sums of a hash of each value and its index: integers, so that the order of the sum does not matter."""
  if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize * 8 == jnp.finfo(array.dtype).bits:
    array = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
  bits = array.astype(jnp.uint32)
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
  program: Program, folder: str, split: SplitName, sources: Sequence[DataSource], params: Params, digest: str
) -> None:
  start, tiles = time.monotonic(), program.config.num_vocab_tiling
  run = partial(program.forward(lambda decoder, batch: answer_log_probs(decoder, batch, tiles)[0]), params)
  parts = [_of_source(program, source, run) for source in sources]
  problem = ""
  if not jax.process_index():
    try:
      ReferenceLogProbs.write(folder, split, sources, digest, parts)
    except OSError as error:
      problem = f"reference log-probabilities cannot be written to {folder}: {error.strerror or error}."
  if problem := broadcast_from_first(problem):
    raise RunError(problem)
  if not jax.process_index():
    count = int(sum(np.isfinite(part["log_probs"][:, 0]).sum() for part in parts))
    seconds = readable_duration(time.monotonic() - start)
    _LOG.info(f"maxtext: reference log-probabilities of {plural(count, f'{split} pair')} in {seconds}: {folder}")


def _of_source(program: Program, source: DataSource, run: Callable[[Batch], jax.Array]) -> np.ndarray:
  """`PAIR_RECORD` of all documents. Every process reads all of them."""
  count, done = sum(source.documents.sizes), 0
  found = np.zeros(count, PAIR_RECORD)
  found["log_probs"] = np.nan
  pairs = _InOrder(source, program.config.vocab_size, count)
  with status_line() as status:
    for rows in _batches(program, pairs):
      values, segments = np.asarray(run(_place(program, rows))), rows.segments.max(axis=1)
      assert not (segments % 2).any(), "a row has half a pair"
      for row, size in enumerate((segments // 2).tolist()):
        numbers, checksums = pairs.take(size)
        found["log_probs"][numbers], found["checksum"][numbers] = values[row, :size], checksums
        if size and not np.isfinite(values[row, :size]).all():
          bad = numbers[int(np.flatnonzero(~np.isfinite(values[row, :size]).all(axis=1))[0])]
          raise RunError(f"{source.documents.where(bad)}: the reference model's log-probability is not finite.")
        done += size
      text = f"computing reference log-probabilities  {done:,} of {count:,} pairs"
      status.show(lambda width, text=text: text)  # type: ignore[misc]
  assert pairs.all_taken
  return found


class _InOrder:
  """The pairs of a source as one stream, which remembers numbers and checksums of those that are not empty."""

  def __init__(self, source: DataSource, vocab_size: int, count: int) -> None:
    self._items, self._count, self._next = Items(source, vocab_size), count, 0
    self._read: deque[tuple[int, int]] = deque()

  @property
  def all_taken(self) -> bool:
    """Whether nothing is left that was read."""
    return not self._read

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """See `StreamDocuments`."""
    numbers = [k for _, k in wanted]
    assert numbers == list(range(self._next, self._next + len(numbers)))
    self._next += len(numbers)
    there = [k for k in numbers if k < self._count]
    found = self._items.read(there)
    self._read += [(k, pair_checksum(pair)) for k, pair in zip(there, found, strict=True) if len(pair)]
    return [*found, *[None] * (len(numbers) - len(there))]

  def take(self, size: int) -> tuple[list[int], list[int]]:
    """Numbers and checksums of the next pairs."""
    taken = [self._read.popleft() for _ in range(size)]
    return [number for number, _ in taken], [checksum for _, checksum in taken]


def _batches(program: Program, pairs: _InOrder) -> Iterator[Rows]:
  rows, length = program.batch.inputs.shape
  rows //= program.config.gradient_accumulation_steps
  streams = PackedStreams(pairs, Packing(length, "concat_then_split", look_ahead=1), [0], read_ahead=_READ_AHEAD)
  while (made := streams.rows([0] * rows)).segments.any():
    yield made


def _place(program: Program, rows: Rows) -> Batch:
  sharding = program.batch.inputs.sharding
  return make_batch(rows, lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__))
