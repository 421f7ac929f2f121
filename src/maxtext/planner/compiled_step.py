"""What the compiler says of a step."""

import re
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from maxtext.configs import ConfigError
from maxtext.status_line import show_phase
from maxtext.training.compiled import save
from maxtext.training.program import Program

_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


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


def lower_step(program: Program) -> jax.stages.Lowered:
  """Traces a step, for a compiler."""
  try:
    return program.lower()
  except RuntimeError as error:
    if "cuDNN" not in str(error):
      raise
    raise ConfigError(
      f"attention={program.config.attention} is cuDNN's on GPUs, and cuDNN is not installed here: pip install "
      "'maxtext[cuda]', or write attention=chunked."
    ) from error


def compile_step(program: Program, lowered: jax.stages.Lowered, earlier: CompiledStep | None = None) -> CompiledStep:
  """Compiles a step; `earlier` is one that took about as long."""
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


def compiler_versions() -> list[str]:
  """Of what compiles here."""
  return [found for name in _COMPILERS if (found := _version(name))]


def needed_bytes(message: str) -> int:
  """The bytes that an out-of-memory message of the compiler reports; raises for other messages."""
  if unknown := re.search("No such compile option: '(.*?)'", message):
    raise ConfigError(f"compile_xla_flags: the compiler has no option '{unknown[1]}'; leave it out.")
  units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
  if not found:
    raise RuntimeError(message)
  return int(float(found[1]) * units[found[2]])


def _version(package: str) -> str | None:
  try:
    return version(package)
  except PackageNotFoundError:
    return None
