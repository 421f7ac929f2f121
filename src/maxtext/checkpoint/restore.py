"""Restoring a checkpoint, onto any mesh and any number of processes.

`resume` takes a run's latest good step, and quarantines every corrupt checkpoint; `load_state` and `load_parameters`
take another run's, which they never touch.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from maxtext.checkpoint.files import read
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.location import locate, steps_in, unfinished_in
from maxtext.checkpoint.metadata import (
  SCHEMA,
  ArrayMetadata,
  Base,
  CheckpointMetadata,
  CorruptCheckpointError,
  NotFiniteError,
)
from maxtext.checkpoint.notes import CorruptionNote, NonfiniteNote
from maxtext.checkpoint.options import RestoreOptions
from maxtext.checkpoint.storage import StorageError
from maxtext.checkpoint.tree import like, named
from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.configs.secrets import SECRET_KEYS
from maxtext.configs.types import DerivedValues, Lora
from maxtext.distributed.multihost import any_process, broadcast_from_first
from maxtext.layers.lora import is_adapter

_LOG = logging.getLogger(__name__)

_TRIED = 50  # the latest steps that are tried
_DATA = "data/"
_NONFINITE = "nonfinite"  # behind the name of a step that no run can resume from
_UNPROVEN = "unproven"  # of one after which a device was found to be wrong


T = TypeVar("T")
Structs = Mapping[str, jax.ShapeDtypeStruct]
LoadBase = Callable[[epath.Path, Base, Structs], Mapping[str, jax.Array]]
"""Loads those arrays of the base of a checkpoint in a folder."""


class Restored(NamedTuple):
  """A state as it was saved, where the data stood after it, and what of the state its checkpoint does not hold."""

  state: Any
  position: dict[str, jax.Array | np.ndarray]
  folder: epath.Path
  base: Base | None = None


def resume(
  options: RestoreOptions, folder: epath.Path, abstract: Any, load_base: LoadBase | None = None
) -> Restored | None:
  """The latest good step under a run's folder of checkpoints, or None where there is no step.

  Process 0 names what was never finished, and renames what is damaged or not finite, so that nothing is lost that a
  person may want. Where no step is good, nothing is touched and the run ends: that is more than one accident.
  """
  if jax.process_index() == 0:
    for path in unfinished_in(folder):
      _LOG.warning(f"maxtext: {path} was never finished; it is skipped and removed.")
      path.rmtree(missing_ok=True)
  bad: dict[epath.Path, tuple[str, str]] = {}
  for step in _steps_of_first_process(steps_in(folder)[::-1]):
    path = folder / str(step)
    try:
      found = _state(options, path, abstract, load_base)
    except (CorruptCheckpointError, NotFiniteError) as problem:
      kind = "damaged" if isinstance(problem, CorruptCheckpointError) else _NONFINITE
      bad[path] = kind, f"is {kind}: {problem}"
      continue
    if jax.process_index() == 0:
      for other, (kind, why) in bad.items():
        _LOG.warning(f"maxtext: {other} {why}. It is now {quarantine(other, kind).name}.")
    return found
  if bad:
    latest, (_, why) = next(iter(bad.items()))
    raise RunError(
      f"none of the {len(bad)} checkpoints in {folder} can be taken; {latest.name} {why}. "
      f"Choose another run_name to start anew."
    )
  return None


def quarantine_blamed(folder: epath.Path) -> int | None:
  """Prints whether the last start of this run ended in numbers that are not finite. The step that led there is
  quarantined, if it is the latest one, and returned: a run that resumes from it gets there again."""
  note = NonfiniteNote.read(folder) if jax.process_index() == 0 else None
  blamed, error = None, ""
  if note is not None:
    steps = steps_in(folder)
    blamed = note.blamed if not steps or steps[-1] <= (note.blamed or 0) else None
    said = f"maxtext: step {note.step} was not finite ({note.what})"
    if not steps or steps[-1] != blamed:
      _LOG.warning(f"{said}; what is kept is from before it.")
    elif len(steps) > 1 or note.began == 0:
      name = quarantine(folder / str(blamed), _NONFINITE).name
      rest = f"the last good checkpoint is step {steps[-2]}" if len(steps) > 1 else "there is no other checkpoint"
      _LOG.warning(f"{said}, and step {blamed} led to it: it is now {name}; {rest}.")
    else:
      error = (
        f"step {note.step} was not finite ({note.what}), and {folder / str(blamed)}, which led to it, is the only "
        f"checkpoint. Choose another run_name to start anew, or remove {NonfiniteNote.file(folder)} to try it again."
      )
  error, _, number = broadcast_from_first(f"{error}\n{'' if blamed is None else blamed}").partition("\n")
  if error:
    raise RunError(error)
  return int(number) if number else None


def quarantine_unproven(folder: epath.Path) -> int | None:
  """Prints whether the last start of this run found a device that was wrong. The steps after the last one that was
  proven right are quarantined, and that one is returned. Where storage fails, the note stays for the next start."""
  proven, error = None, ""
  note = CorruptionNote.read(folder) if jax.process_index() == 0 else None
  if note is not None:
    proven, steps = note.proven, steps_in(folder)
    later = [step for step in steps if step > proven]
    if later and len(later) == len(steps) and proven:
      error = (
        f"{note.what} at step {note.step}, and of the checkpoints in {folder} none is from step {proven} or before, "
        f"which were proven right. Choose another run_name to start anew, or remove {note.file(folder)} to trust step "
        f"{steps[-1]}."
      )
    else:
      names = [quarantine(folder / str(step), _UNPROVEN).name for step in later]
      took = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out" if names else "none is later"
      _LOG.warning(f"maxtext: {note.what} at step {note.step}: only steps up to {proven} are proven right; {took}.")
  error, _, number = broadcast_from_first(f"{error}\n{'' if proven is None else proven}").partition("\n")
  if error:
    raise RunError(error)
  return int(number) if number else None


def forget_corruption(folder: epath.Path) -> None:
  """Removes the note, once no process has a step that is not proven right; all of them call it."""
  any_process(False)  # waits for all
  if jax.process_index() == 0:
    CorruptionNote.remove(folder)


def load_state(
  options: RestoreOptions, key: str, path: str, abstract: Any, load_base: LoadBase | None = None
) -> Restored:
  """The whole state of a checkpoint that a key of the configuration names."""
  return with_key_in_errors(key, path, lambda: _state(options, locate(path), abstract, load_base))


def load_parameters(
  options: RestoreOptions, key: str, path: str, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Parameters and buffers alone, of a whole state or of exported parameters in any layout, without a base that is
  elsewhere."""
  return with_key_in_errors(key, path, lambda: _parameters(options, locate(path), wanted))


def _state(options: RestoreOptions, folder: epath.Path, abstract: Any, load_base: LoadBase | None) -> Restored:
  metadata = readable(folder)
  wanted, base = named(abstract), metadata.base
  refuse_other(options.values, folder, metadata, wanted)
  position = [name for name in metadata.arrays if name.startswith(_DATA)]
  apart = {} if base is None else {path: name for name, path in base.stored_names.items() if name in wanted}
  here = {name: struct for name, struct in wanted.items() if name not in apart.values()}
  arrays = read(options.storage, folder, here | dict.fromkeys(position), metadata, finite=True)
  if base is not None:
    assert load_base is not None, "who restores a run of adapters says how its base is loaded"
    loaded = load_base(folder, base, {path: wanted[name] for path, name in apart.items()})
    arrays |= {apart[path]: array for path, array in loaded.items()}
  return Restored(like(abstract, arrays), {n.removeprefix(_DATA): arrays[n] for n in position}, folder, base)


def _parameters(
  options: RestoreOptions, folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  metadata = readable(folder)
  layout, where = Layout(metadata.stacked), metadata.parameters
  stored = {n: s for name, struct in wanted.items() for n, s in layout.stored(name, struct).items()}
  refuse_other(options.values, folder, metadata, {where.get(n, f"params/{n}"): s for n, s in stored.items()})
  arrays = read(options.storage, folder, {where[n]: s for n, s in stored.items()}, metadata)
  own = {n: arrays[where[n]] for n in stored}
  return {name: layout.load(name, struct, own) for name, struct in wanted.items()}


def readable(folder: epath.Path) -> CheckpointMetadata:
  """Its metadata, on all processes; that of a later release is an error."""
  metadata: CheckpointMetadata | None = None
  problem: CorruptCheckpointError | StorageError | None = None
  try:
    metadata = CheckpointMetadata.read(folder)
  except (CorruptCheckpointError, StorageError) as error:
    problem = error
  for kind in (StorageError, CorruptCheckpointError):
    if any_process(isinstance(problem, kind)):
      raise problem if isinstance(problem, kind) else kind("another process cannot read its metadata")
  assert metadata is not None
  if metadata.schema > SCHEMA:
    raise ConfigError(
      f"{folder} has schema {metadata.schema}, and this release reads up to {SCHEMA}: take a newer one."
    )
  if metadata.moved is not None:
    raise ConfigError(
      f"{folder} has schema {metadata.schema}, in which {metadata.moved} had another name than in this release: start "
      f"a new run, with another run_name."
    )
  return metadata


def refuse_other(
  values: Mapping[str, Any],
  folder: epath.Path,
  metadata: CheckpointMetadata,
  wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """A checkpoint of something else is the user's mistake, not damage."""
  _refuse_other_scale(values, folder, metadata, wanted)
  there = metadata.arrays_with_base
  for name, struct in wanted.items():
    has, wants = there.get(name), ArrayMetadata(tuple(struct.shape), str(struct.dtype))
    if has is None or (has.shape, has.dtype) != (wants.shape, wants.dtype):
      found = "has none" if has is None else f"has {has.dtype}{list(has.shape)}"
      here = f"this run wants {wants.dtype}{list(wants.shape)}"
      raise ConfigError(f"{folder} {found} for {name}, and {here}.{_differences(values, metadata)}")


def _refuse_other_scale(
  values: Mapping[str, Any], folder: epath.Path, metadata: CheckpointMetadata, wanted: Collection[str]
) -> None:
  """Adapters that are read with other keys than they were trained with are not what they were."""
  for key in Lora.model_fields if any(map(is_adapter, wanted)) else ():
    trained = metadata.config.get(key, {}).get("value")
    if key != "lora_targets" and trained is not None and trained != values.get(key):
      raise ConfigError(
        f"{key}={values.get(key)} contradicts {folder}, whose adapters were trained with {trained}: leave it out. New "
        "adapters start from merged weights (maxtext convert to-hf)."
      )


def _differences(values: Mapping[str, Any], metadata: CheckpointMetadata) -> str:
  """Keys that changed since, as the end of a message; those that cannot change a shape would only distract."""
  names = (
    "run_name",
    "base_output_directory",
    "steps",
    "load_",
    "checkpoint_",
    "jax_",
    "log_",
    *SECRET_KEYS,
    *DerivedValues.model_fields,
  )
  changed = [
    f"{key}={entry['value']} there, {value} here"
    for key, entry in metadata.config.items()
    if not key.startswith(names) and str(value := values.get(key)) != str(entry["value"])
  ]
  return f" Keys that differ: {'; '.join(changed[:5])}." if changed else ""


def with_key_in_errors(key: str, path: str, load: Callable[[], T]) -> T:
  """What `load` returns; damage is named together with the key of its path."""
  try:
    return load()
  except CorruptCheckpointError as damage:
    raise RunError(f"{key}={path} is damaged: {damage}.") from None
  except NotFiniteError as problem:
    raise RunError(f"{key}={path} holds no state to resume from: {problem}.") from None


def _steps_of_first_process(steps: list[int]) -> list[int]:
  """What process 0 sees: a shared folder may look different elsewhere for a moment."""
  return [int(step) for step in broadcast_from_first(" ".join(map(str, steps[:_TRIED]))).split()]


def quarantine(path: epath.Path, kind: str) -> epath.Path:
  """Quarantines a step: renames it, so that no run takes it and a person can look at it. `kind` is the new suffix.

  A run that is restarted unchanged comes to the same nonfinite numbers again, so only one such step is kept.
  """
  if kind == _NONFINITE:
    path.with_name(f"{path.name}.{kind}").rmtree(missing_ok=True)
  names = (path.with_name(f"{path.name}.{kind}{n}") for n in ("", *(f"-{i}" for i in range(2, 1000))))
  free = next(name for name in names if not name.exists())
  return path.rename(free)
