"""Our training loop beside a hand-written JAX step of the same model, interleaved in one run.

  python -m benchmarks.train_step --json

Start-up is from the start of a process to the end of its first step, without a compilation cache. Host overhead is what
one turn of the loop costs when the step itself does nothing.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

from benchmarks import bare
from benchmarks.figures import show
from maxtext import MaxTextConfig, load_config
from maxtext.mesh.devices import make_mesh
from maxtext.training.loop import run_loop
from maxtext.training.program import Program


def values_of(size: bare.Size, dtype: str) -> dict:
  """The same model and batch as keys."""
  return size.keys | {
    "dataset_type": "synthetic",
    "dtype": dtype,
    "remat_policy": "full",
    "jax_cache_dir": "",
    "base_output_directory": tempfile.gettempdir(),
    "run_name": "maxtext-benchmark",
    "enable_checkpointing": False,
    "steps": 1,
  }


def step_times(config: MaxTextConfig, size: bare.Size, dtype: str, rounds: int, steps: int) -> tuple[list, list]:
  """Seconds per step of ours and of the bare one, a pair per round; first and second in turn."""
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  state, feed = program.init(), program.feed()
  bare_step, bare_state, data = bare.make_step(size, jnp.dtype(dtype)), bare.init(size), bare.batch(size)

  def ours():
    nonlocal state
    state = run_loop(program.step, state, feed, range(steps))

  def theirs():
    nonlocal bare_state
    last = None
    for _ in range(steps):
      bare_state, loss = bare_step(bare_state, *data)
      if last is not None:
        float(last)  # read one step late, as our loop does
      last = loss
    float(last)

  ours(), theirs()
  times: dict = {ours: [], theirs: []}
  for i in range(rounds):
    for run in (ours, theirs) if i % 2 else (theirs, ours):
      start = time.perf_counter()
      run()
      times[run].append((time.perf_counter() - start) / steps)
  return times[ours], times[theirs]


def host_overhead(config: MaxTextConfig, turns: int = 300) -> float:
  """Seconds per turn of the loop around a step that returns its state unchanged."""
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  zero = jnp.zeros(())
  metrics = {name: zero for name in ("loss", "grad_norm", "learning_rate", "tokens")}
  nothing = jax.jit(lambda state, batch: (state, metrics), donate_argnums=0)
  state = run_loop(nothing, program.init(), program.feed(), range(10))
  start = time.perf_counter()
  run_loop(nothing, state, program.feed(), range(turns))
  return (time.perf_counter() - start) / turns


def startup(command: list[str]) -> float:
  """Seconds from the start of a process to the line that says its first step is done."""
  # A cache named by the environment would serve one of the two and not the other.
  environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"JAX_PLATFORMS": "cpu"}
  start = time.perf_counter()
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as p:
    assert p.stdout is not None
    for line in p.stdout:
      if line.startswith("step 1"):
        return time.perf_counter() - start
  raise RuntimeError(f"no first step from {command}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
  parser.add_argument("--rounds", type=int, default=6)
  parser.add_argument("--steps", type=int, default=3, help="steps per round")
  parser.add_argument("--small", action="store_true", help="a toy size, to see that the benchmark runs")
  arguments = parser.parse_args()

  size = bare.SMALL if arguments.small else bare.Size()
  values = values_of(size, arguments.dtype)
  config = load_config(**values)
  small = ["--small"] if arguments.small else []
  ours_command = [sys.executable, "-m", "maxtext.train", *(f"{k}={v}" for k, v in values.items())]
  bare_command = [sys.executable, "-m", "benchmarks.bare", "--dtype", arguments.dtype, *small]

  starts = [(startup(ours_command), startup(bare_command)) for _ in range(3)]
  ours, theirs = step_times(config, size, arguments.dtype, arguments.rounds, arguments.steps)
  result = {
    "ours_ms": 1e3 * statistics.median(ours),
    "bare_ms": 1e3 * statistics.median(theirs),
    "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    "startup_ours_s": statistics.median(a for a, _ in starts),
    "startup_bare_s": statistics.median(b for _, b in starts),
    "startup_ratio": statistics.median(a / b for a, b in starts),
    "host_overhead_us": 1e6 * host_overhead(config),
  }
  show(result, arguments.json)


if __name__ == "__main__":
  main()
