"""A folder that keeps steps as compilers described them: a program that takes minutes is compiled once."""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from dataclasses import asdict
from pathlib import Path

import jax

from maxtext.configs import MaxTextConfig
from maxtext.mesh.compiler import FLAG_VARIABLES
from maxtext.mesh.topology import Topology
from maxtext.planner.compiled_step import CompiledStep, compile_step, compiler_versions, lower_step
from maxtext.planner.scheduled_step import scheduled_step
from maxtext.status_line import show_phase
from maxtext.storage.atomic import atomic_file
from maxtext.training.program import Program, run_compiler_options

_FORMAT = 4  # of files in a cache; another number is another file
_EFFORTS = ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort")


def find_step(program: Program, topology: Topology, cache: Path | None = None, *, quick: bool = False) -> CompiledStep:
  """Compiles a step, a quick one as far as its schedule, or finds it in the folder `cache`.

  A folder knows programs by their operations: the source lines of one that it keeps may be those of another release.
  """
  if quick and cache is None:
    return scheduled_step(program)
  show_phase("tracing the step")
  lowered = lower_step(program)
  if cache is None:
    return compile_step(program, lowered)
  config, digest = program.config, _digest(program, topology, lowered, quick)
  if not _leaves_files(config) and (kept := _newest(cache, f"*{digest}.json.gz")):
    return kept
  about = f"{config.model_name}-{config.compile_topology}{'-quick' if quick else ''}"
  earlier = _newest(cache, f"{glob.escape(about)}-*.json.gz")
  found = scheduled_step(program) if quick else compile_step(program, lowered, earlier)
  cache.mkdir(parents=True, exist_ok=True)
  file = cache / f"{about}-{digest}.json.gz"
  with atomic_file(file, unfinished=file.with_suffix(f".{os.getpid()}")) as target:
    target.write(gzip.compress(json.dumps(asdict(found)).encode()))
  return found


def _leaves_files(config: MaxTextConfig) -> bool:
  """Whether compiling has another result than the step's description."""
  return bool(config.compiled_trainstep_file or config.dump_hlo)


def _newest(folder: Path, pattern: str) -> CompiledStep | None:
  """The step that was kept last among the files of a pattern; None if there is none, or it cannot be read."""
  try:
    file = max(folder.glob(pattern), key=lambda file: file.stat().st_mtime)
    return CompiledStep(**json.loads(gzip.decompress(file.read_bytes())))
  except (OSError, EOFError, ValueError, TypeError, zlib.error):
    return None


def _digest(program: Program, topology: Topology, lowered: jax.stages.Lowered, quick: bool = False) -> str:
  """What tells one compilation from another; the program's text does not say which device has which place."""
  mesh = program.model.execution.sharding.mesh
  about = {
    "format": _FORMAT,
    "quick": quick,
    "program": re.sub(r"loc\(.*?\)", "", lowered.as_text()),
    "devices": [device.id for device in mesh.devices.flat],
    "topology": asdict(topology),
    "options": run_compiler_options(program.config, mesh),
    "environment": {name: os.environ.get(name, "") for name in FLAG_VARIABLES},
    "efforts": [jax.config.values[name] for name in _EFFORTS],
    "versions": compiler_versions(),
  }
  return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
