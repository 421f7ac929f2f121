"""What the compiler says of a step, and a folder that keeps it: a program that takes minutes is compiled once."""

import glob
import gzip
import hashlib
import json
import os
import re
import time
import warnings
import zlib
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.mesh.compiler import FLAG_VARIABLES
from maxtext.mesh.topology import Topology
from maxtext.status_line import show_phase
from maxtext.storage.atomic import atomic_file
from maxtext.training.compiled import save
from maxtext.training.program import Program, run_compiler_options

_FORMAT = 3  # of files in a cache; another number is another file
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_EFFORTS = ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort")


@dataclass(frozen=True)
class CompiledStep:
  """A compiled step.

  Attributes:
    text: the scheduled program; None if it does not fit.
    peak: bytes of a device that it needs at its peak.
    temporaries: of them, what is neither argument nor result.
    seconds: what the compiler took.
  """

  text: str | None
  peak: int
  temporaries: int
  seconds: float


def compiled_step(program: Program, topology: Topology, cache: Path | None = None) -> CompiledStep:
  """Compiles a step, or finds it in the folder `cache`.

  A folder knows programs by their operations: the source lines of one that it keeps may be those of another release.
  """
  show_phase("tracing the step")
  lowered = _lower(program)
  if cache is None:
    return _compile(program, topology, lowered)
  config, digest = program.config, _digest(program, topology, lowered)
  if not _leaves_files(config) and (kept := _newest(cache, f"*{digest}.json.gz")):
    return kept
  about = f"{config.model_name}-{config.compile_topology}"
  earlier = _newest(cache, f"{glob.escape(about)}-*.json.gz")
  found = _compile(program, topology, lowered, earlier)
  cache.mkdir(parents=True, exist_ok=True)
  file = cache / f"{about}-{digest}.json.gz"
  with atomic_file(file, unfinished=file.with_suffix(f".{os.getpid()}")) as target:
    target.write(gzip.compress(json.dumps(asdict(found)).encode()))
  return found


def compiler_versions() -> list[str]:
  """Of what compiles here."""
  return [found for name in _COMPILERS if (found := _version(name))]


def _lower(program: Program) -> jax.stages.Lowered:
  try:
    return program.lower()
  except RuntimeError as error:
    if "cuDNN" not in str(error):
      raise
    raise ConfigError(
      f"attention={program.config.attention} is cuDNN's on GPUs, and cuDNN is not installed here: pip install "
      "'maxtext[cuda]', or write attention=chunked."
    ) from error


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


def _compile(
  program: Program, topology: Topology, lowered: jax.stages.Lowered, earlier: CompiledStep | None = None
) -> CompiledStep:
  long = f"an earlier compilation took {earlier.seconds:.0f} s" if earlier else "minutes, for large models"
  show_phase(f"compiling for {program.config.compile_topology} ({long})")
  start = time.perf_counter()
  try:
    with warnings.catch_warnings():  # JAX's own cache cannot read back what it keeps of programs for absent GPUs
      warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
      compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = needed_bytes(str(error))
    return CompiledStep(None, needed, needed, time.perf_counter() - start)
  if program.config.compiled_trainstep_file:
    save(program, lowered, compiled, Path(program.config.compiled_trainstep_file))
  stats, text = compiled.memory_analysis(), compiled.as_text()
  assert stats is not None, "the compilers for TPUs and GPUs return both"
  assert text is not None
  return CompiledStep(text, stats.peak_memory_in_bytes, stats.temp_size_in_bytes, time.perf_counter() - start)


def _digest(program: Program, topology: Topology, lowered: jax.stages.Lowered) -> str:
  """What tells one compilation from another; the program's text does not say which device has which place."""
  mesh = program.model.execution.sharding.mesh
  about = {
    "format": _FORMAT,
    "program": re.sub(r"loc\(.*?\)", "", lowered.as_text()),
    "devices": [device.id for device in mesh.devices.flat],
    "topology": asdict(topology),
    "options": run_compiler_options(program.config, mesh),
    "environment": {name: os.environ.get(name, "") for name in FLAG_VARIABLES},
    "efforts": [jax.config.values[name] for name in _EFFORTS],
    "versions": compiler_versions(),
  }
  return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
  try:
    return version(package)
  except PackageNotFoundError:
    return None


def needed_bytes(message: str) -> int:
  """The bytes that an out-of-memory message of the compiler reports; raises for other messages."""
  if unknown := re.search("No such compile option: '(.*?)'", message):
    raise ConfigError(f"compile_xla_flags: the compiler has no option '{unknown[1]}'; leave it out.")
  units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
  if not found:
    raise RuntimeError(message)
  return int(float(found[1]) * units[found[2]])
