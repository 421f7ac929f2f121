"""Flips random bits of a training run on virtual CPU devices, and counts which of them the checks find, and how late.

  python -m benchmarks.bit_flips --flips 200 ici_data_parallelism=4 ici_fsdp_parallelism=1 ici_tensor_parallelism=2
  python -m benchmarks.bit_flips --cost

Each flip is one bit, once, at a random step: in the memory in which one device holds parameters or the optimizer's
state, in the gradient that one device has after gradients were summed (`gradient`), or in the gradient that all devices
get (`arithmetic`), as when one device has computed its part of the sum wrongly. Replicas are compared every PERIOD
steps, and every PERIOD-th step is replayed.

`--cost` measures what a step costs with the journal, the heartbeat and the checks, in turn with a step without them.
"""

import argparse
import ctypes
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
  # More threads than devices, so that collectives which wait do not block all of them.
  os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from maxtext import MaxTextConfig, load_config
from maxtext.configs.errors import RunError
from maxtext.configs.loader import parse_assignments
from maxtext.distributed import heartbeat
from maxtext.mesh.devices import make_mesh
from maxtext.observe.goodput_journal import GoodputJournal
from maxtext.observe.phases import PhaseClock
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.options import optimizer_options
from maxtext.training.callbacks.compare_replicas import CompareReplicas
from maxtext.training.callbacks.goodput import KeepJournal
from maxtext.training.device_checksums import DeviceChecksums
from maxtext.training.loop import run_loop
from maxtext.training.program import Program
from maxtext.training.replayed_step import ReplayedStep
from maxtext.training.state import TrainState, update_shardings

MODEL: dict[str, Any] = {
  "vocab_size": 512, "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_decoder_layers": 2, "base_num_query_heads": 4,
  "base_num_kv_heads": 4, "head_dim": 16, "max_target_length": 64, "per_device_batch_size": 1, "dtype": "float32",
  "dataset_type": "synthetic", "learning_rate": 1e-3, "steps": 100, "warmup_steps_fraction": 0.01, "jax_cache_dir": "",
  "enable_checkpointing": False, "base_output_directory": tempfile.gettempdir(),
}  # fmt: skip
KINDS = ("parameters", "optimizer state", "gradient", "arithmetic")
EVERYWHERE = -1


def flip_bit(array: jax.Array, device: int, bit: int) -> None:
  """Flips a bit in the memory of one CPU device, which JAX does not see."""
  shard = next(shard for shard in array.addressable_shards if shard.device.id == device).data
  shard.block_until_ready()
  memory = (ctypes.c_uint8 * shard.nbytes).from_address(shard.unsafe_buffer_pointer())
  memory[bit // 8 % shard.nbytes] ^= 1 << bit % 8


class Fault(NamedTuple):
  """The next bit of a gradient that flips; `leaf` -1 is none."""

  leaf: Any
  device: Any
  element: Any
  bit: Any


_NO_FAULT = (-1, 0, 0, 0)


def faulty(inner: optax.GradientTransformation, mesh: Mesh, specs: dict[str, PartitionSpec]) -> Any:
  """An optimizer with a fault in its state, which flips one bit of the gradients, once."""
  inner = optax.with_extra_args_support(inner)

  def init(params: Any) -> Any:
    return Fault(*(jnp.int32(n) for n in _NO_FAULT)), inner.init(params)

  def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    fault, inner_state = state

    def one(number: int, name: str) -> jax.Array:
      def local(part: jax.Array, fault: Fault) -> jax.Array:
        own = jax.lax.axis_index(mesh.axis_names)
        hit = (fault.leaf == number) & ((fault.device == own) | (fault.device == EVERYWHERE))
        bits = jax.lax.bitcast_convert_type(part, jnp.uint32).reshape(-1)
        mask = jnp.where(jnp.arange(bits.size) == fault.element % bits.size, jnp.uint32(1) << fault.bit, 0)
        bits = jnp.where(hit, bits ^ mask, bits)
        return jax.lax.bitcast_convert_type(bits.reshape(part.shape), part.dtype)

      spec = specs[name]
      return jax.shard_map(
        local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
      )(grads[name], fault)  # fmt: skip

    grads = {name: one(number, name) for number, name in enumerate(grads)}
    updates, inner_state = inner.update(grads, inner_state, params, **extra)
    return updates, (Fault(*(jnp.int32(n) for n in _NO_FAULT)), inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


class Campaign:
  """Runs of `period` steps, the same each time but for one flip."""

  def __init__(self, config: MaxTextConfig, period: int) -> None:
    mesh = make_mesh(config, jax.devices())
    plain = Program.of(config, mesh)
    updated = update_shardings(plain.model, config.shard_optimizer_over_data)
    shardings = {name: sharding.spec for name, sharding in updated.items()}
    optimizer = faulty(make_optimizer(optimizer_options(config), plain.model.matrices), mesh, shardings)
    self._program = Program.of(config, mesh, optimizer=optimizer)
    self._mesh, self._period, self._names = mesh, period, list(shardings)
    self._compare = CompareReplicas(mesh, self._program.state, period, 0, lambda *_: None)
    self._checksums, self.share = DeviceChecksums(mesh), self._compare.share
    state, feed = self._program.init(), self._program.feed()
    state, _ = self._program.step(state, next(feed).batch)
    self._batches = [next(feed).batch for _ in range(period)]
    self._states, self._copy = list[TrainState](), jax.jit(lambda s: jax.tree.map(jnp.copy, s))
    for batch in self._batches:
      self._states.append(self._copy(state))
      state, _ = self._program.step(state, batch)
    self._clean = self._checksums(state)

  def flip(self, kind: str, rng: random.Random) -> tuple[str, int]:
    """What became of a flip, and how many steps after it."""
    at, device, bit = rng.randrange(self._period), rng.randrange(self._mesh.size), rng.randrange(2**30)
    state, fault = self._copy(self._states[at]), None
    named = self._mesh.devices.flat[device].id
    if kind == "parameters":
      flip_bit(_weighted(list(state.params.values()), rng), named, bit)
    elif kind == "optimizer state":
      flip_bit(_weighted([a for a in jax.tree.leaves(state.opt_state[1]) if a.ndim], rng), named, bit)
    else:
      leaf = rng.randrange(len(self._names))
      fault = Fault(leaf, EVERYWHERE if kind == "arithmetic" else device, rng.randrange(2**30), rng.randrange(32))
    twice = rng.random() < 0.5  # the fault is in the second of two runs of the step
    replayed, late = at == self._period - 1, self._period - at
    run = _once(self._program.step, fault, twice and replayed)
    step = ReplayedStep(run, self._mesh, self._period, at, lambda *_: None)
    try:
      for batch in self._batches[at:]:
        state, _ = step(state, batch)
      self._compare.check(self._period, state)
    except RunError as error:
      self._compare._proven = 0
      if kind == "arithmetic" or f"device {named} of" in str(error):
        alone = kind == "arithmetic" or len(re.findall(r"device \d+ of", str(error))) == 1
        return ("found" if alone else "found, as one of a pair"), late
      return "found, and another device named", late
    self._compare._proven = 0
    if (self._checksums(state) == self._clean).all():
      return "left no trace", late
    return "missed, in a step that was not replayed" if kind == "arithmetic" and not replayed else "missed", late


def _weighted(arrays: list[jax.Array], rng: random.Random) -> jax.Array:
  """Every bit of memory is as likely as any other."""
  return rng.choices(arrays, [array.nbytes for array in arrays])[0]


def _once(step: Any, fault: Fault | None, second: bool) -> Any:
  """A step whose first call, or second, has a fault."""
  calls = iter(range(10**9))

  def run(state: TrainState, batch: Any) -> Any:
    if fault is not None and next(calls) == int(second):
      mesh_wide = state.opt_state[0].leaf.sharding
      armed = Fault(*(jax.device_put(np.int32(n), mesh_wide) for n in fault))
      state = replace(state, opt_state=(armed, state.opt_state[1]))
    return step(state, batch)

  return run


def cost(config: MaxTextConfig, rounds: int, steps: int) -> Iterator[tuple[str, float]]:
  """Processor time of a step with each part as a multiple of that without, every part at every step; the parts take
  turns. On a machine that others use too, time by the clock says less."""
  mesh = make_mesh(config, jax.devices())
  program = Program.of(config, mesh)
  state, feed = program.init(), program.feed()
  step = program.step
  compare = CompareReplicas(mesh, program.state, 1, -1, lambda *_: None)
  replayed = ReplayedStep(step, mesh, 1, 0, lambda *_: None)
  folder = Path(tempfile.mkdtemp())
  reader, writer = os.pipe()
  os.set_blocking(reader, False)

  def plain() -> tuple[Any, list[Any]]:
    return step, []

  def journal() -> tuple[Any, list[Any]]:
    return step, [KeepJournal(GoodputJournal(folder, None, PhaseClock(), 0, True))]

  parts: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "nothing": plain,
    "journal and heartbeat": journal,
    "replicas compared": lambda: (step, [compare]),
    "step replayed": lambda: (replayed, []),
  }
  os.environ[heartbeat.VARIABLE] = str(writer)
  heartbeat.start_heartbeat()
  times: dict[str, list[float]] = {name: [] for name in parts}
  for i in range(rounds + 1):
    for name in list(parts) if i % 2 else list(parts)[::-1]:
      run, callbacks = parts[name]()
      start = time.process_time()
      state = run_loop(run, state, feed, range(steps), callbacks)
      jax.block_until_ready(state)
      if i:  # the first round compiles
        times[name].append((time.process_time() - start) / steps)
      for callback in callbacks:
        if callback is not compare:
          callback.close()
  for name in parts:
    yield name, statistics.median(a / b for a, b in zip(times[name], times["nothing"], strict=True))
  yield "milliseconds without", 1e3 * statistics.median(times["nothing"])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--flips", type=int, default=200, help="of each kind")
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  parser.add_argument("--period", type=int, default=4, help="steps between checks")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--cost", action="store_true", help="measure the cost of a step instead")
  parser.add_argument("--rounds", type=int, default=10)
  parser.add_argument("--steps", type=int, default=5, help="of a round")
  parser.add_argument("overrides", nargs="*", help="key=value")
  arguments = parser.parse_args()
  config = load_config(**MODEL | parse_assignments(arguments.overrides))
  if arguments.cost:
    for name, value in cost(config, arguments.rounds, arguments.steps):
      print(f"{name:24} {value:.3f}")
    return
  campaign, rng = Campaign(config, arguments.period), random.Random(arguments.seed)
  print(f"{campaign.share:.0%} of the state has replicas; period {arguments.period}")
  for kind in arguments.kinds:
    found = [campaign.flip(kind, rng) for _ in range(arguments.flips)]
    delays = [late for what, late in found if what.startswith("found")]
    counts = ", ".join(f"{what} {count}" for what, count in sorted(Counter(what for what, _ in found).items()))
    print(f"{kind:16} {counts}; mean delay {statistics.mean(delays) if delays else 0:.1f} steps", flush=True)


if __name__ == "__main__":
  main()
