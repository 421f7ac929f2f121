"""The fastest configuration that fits, in few compilations.

Candidates are ordered by an optimistic estimate: the model's FLOPs and recomputation at the chip's peak, or the bytes
of collectives where these take longer. Candidates whose state and saved tensors cannot fit are never compiled. The most
promising of the others are compiled by the plan command in subprocesses. One that does not fit rules out those that
need more memory, and the ratio of compiled to estimated time corrects the other estimates. Blocks of attention kernels
come
last: the best ones depend on the model and the chip alone.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from statistics import median
from typing import Any

import jax.numpy as jnp

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import RematAndOffload, RematLocation
from maxtext.configs.values import default_of, plain_value
from maxtext.mesh.topology import Topology
from maxtext.models.execution.execution import execution_config
from maxtext.models.flops import train_flops_per_token
from maxtext.planner.compile import program_for
from maxtext.planner.cost_model import forward_costs, saved_bytes
from maxtext.planner.kernel_blocks import best_blocks
from maxtext.training.program import Program

Keys = dict[str, Any]

# Keys that report where a tensor of a layer is kept; those of the user give way to a candidate's.
_REMAT_KEYS = tuple(key for key in RematAndOffload.model_fields if isinstance(default_of(key), RematLocation))
# All outputs of matmuls and attention that a layer's backward pass needs.
_SAVED_NAMES: Keys = dict.fromkeys(
  ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1",
   "moe_mlpwo"), "device",
)  # fmt: skip
_WITHOUT_UP = {key: place for key, place in _SAVED_NAMES.items() if not key.endswith("mlpwi_1")}
# The output of a feed-forward layer is not needed: only the residual sum uses it.
_NEVER_RECOMPUTED = {"mlpwo"}

POLICIES: tuple[Keys, ...] = (
  {"remat_policy": "custom", **_SAVED_NAMES},
  {"remat_policy": "custom,save_dot_with_context_except_mlp", **_SAVED_NAMES},
  {"remat_policy": "custom,save_dot_with_context_except_mlp", **_WITHOUT_UP},
  {"remat_policy": "save_dot_with_context_except_mlp"},
  {"remat_policy": "save_dot_except_mlp"},
  {"remat_policy": "save_qkv_proj"},
  {"remat_policy": "full"},
)
BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
  """A configuration that was not compiled yet.

  Attributes:
    keys: what differs from the configuration that was given.
    estimate: seconds a token and chip, at best.
    travel: of them, and beside them, what the links are busy with weights.
    kept: bytes a device that it keeps at least, state and activations.
  """

  keys: Keys
  estimate: float
  travel: float
  kept: float


@dataclass(frozen=True)
class SearchResult:
  """A candidate that was compiled, and the plan's JSON of it."""

  candidate: Candidate
  plan: dict[str, Any]

  @property
  def seconds_per_token(self) -> float:
    """Of one chip; without end where it does not fit."""
    speed = self.plan["estimated_tokens_per_second_per_chip"]
    return 1 / speed if self.plan["fits"] and speed else float("inf")


def search(
  config: MaxTextConfig, overrides: Sequence[str], compiles: int, jobs: int, report: Callable[[str], None]
) -> SearchResult:
  """Compiles at most `compiles` candidates, `jobs` at a time, and returns the fastest that fits.

  Args:
    config: the run.
    overrides: the arguments of the command that describe the configuration.
    compiles: most compilations.
    jobs: compilations at a time.
    report: is called with a line for every result.
  """
  program, topology = program_for(config.model_copy(update={"per_device_batch_size": 1.0, "remat_policy": "full"}))
  waiting, done = candidates(config, program, topology), list[SearchResult]()
  report(f"{len(waiting)} candidates may fit; at most {compiles} are compiled, {jobs} at a time")
  with ThreadPoolExecutor(jobs) as pool:
    in_flight: dict[Future[dict[str, Any]], Candidate] = {}
    while True:
      while len(in_flight) < jobs and len(done) + len(in_flight) < compiles and (new := _next_candidate(waiting, done)):
        waiting.remove(new)
        in_flight[pool.submit(plan_in_subprocess, overrides, new.keys)] = new
      if not in_flight:
        break
      for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
        done.append(SearchResult(in_flight.pop(future), future.result()))
        report(_format_result(len(done), done[-1]))
  best = min(done, key=lambda f: f.seconds_per_token, default=None)
  if best is None or best.seconds_per_token == float("inf"):
    raise ConfigError(
      f"compile_topology={config.compile_topology}: none of {len(done)} configurations fits; take more chips, or a "
      "shorter max_target_length."
    )
  if len(done) < compiles and (blocks := best_blocks(program, topology)):
    candidate = replace(best.candidate, keys=best.candidate.keys | blocks)
    done.append(SearchResult(candidate, plan_in_subprocess(overrides, candidate.keys)))
    report(_format_result(len(done), done[-1]))
  return min(done, key=lambda f: f.seconds_per_token)


def candidates(config: MaxTextConfig, program: Program, topology: Topology) -> list[Candidate]:
  """Meshes, rematerialisation and batches, the most promising first; what cannot fit is left out."""
  model, mesh, chip = program.model, program.model.execution.sharding.mesh, topology.chip
  costs, inputs = forward_costs(program)
  weights = sum(a.size for a in model.params.values()) * jnp.dtype(model.execution.numerics.dtype).itemsize
  links = topology.links * chip.link_bandwidth
  layers = sum(group.repeats * len(group.cycle) for group in model.spec.groups)
  length, total = config.max_target_length, program.batch.inputs.size
  state, flops = program.state_bytes, train_flops_per_token(model, length)
  attention = (flops - train_flops_per_token(model, 0)) / 3  # of the forward pass
  found = []
  own = {key: plain_value(default_of(key)) for key in _REMAT_KEYS if getattr(config, key) != default_of(key)}
  for all_keys in POLICIES:
    names = {*costs, "context"}
    policy = own | {key: value for key, value in all_keys.items() if key not in _SAVED_NAMES or key in names}
    turns = execution_config(config.model_copy(update=_typed(policy)), mesh).remat
    keeps = saved_bytes(costs, turns)
    again = sum(w.flops for turn in turns for name, w in costs.items() if name not in {*turn.saved, *_NEVER_RECOMPUTED})
    attended = attention * sum("context" not in turn.saved for turn in turns)
    compute = (flops + (again / total + attended) / len(turns)) / chip.flops
    for axes, batch in product(_meshes(config, topology), BATCHES):
      kept = (state + (inputs + keeps) * batch) / mesh.size
      # Weights are gathered for the forward and the backward pass, and gradients are reduced.
      tensor = axes["ici_tensor_parallelism"]
      travel = 3 * weights / tensor / links / (batch * length)
      # Tensor parallelism reduces a layer's activations twice in each pass, and the next operation waits.
      sums = 4 * layers * 2 * (tensor - 1) * model.spec.width * 2 / (min(topology.links, 2) * chip.link_bandwidth)
      if kept <= chip.hbm_bytes // chip.devices:
        keys = axes | policy | {"per_device_batch_size": batch}
        found.append(Candidate(keys, max(compute, travel) + sums, travel, kept))
  return sorted(found, key=lambda c: (c.estimate, c.travel))


def _typed(policy: Keys) -> Keys:
  return {key: value if key == "remat_policy" else RematLocation(value) for key, value in policy.items()}


def _meshes(config: MaxTextConfig, topology: Topology) -> Iterator[Keys]:
  """Meshes: tensor parallelism up to 8, expert parallelism for mixture-of-experts models, FSDP over the rest."""
  devices = prod(topology.shape) * topology.chip.devices
  for tensor, expert in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
    fits = devices % (tensor * expert) == 0 and config.base_num_kv_heads % tensor == 0
    if fits and (expert == 1 or (config.num_experts % expert == 0 and config.num_experts > 1)):
      yield {
        "ici_fsdp_parallelism": devices // (tensor * expert),
        "ici_tensor_parallelism": tensor,
        "ici_expert_parallelism": expert,
      }


def _next_candidate(waiting: list[Candidate], done: list[SearchResult]) -> Candidate | None:
  """The most promising candidate that may fit and may still be the fastest; None if there is none."""
  ratio = median([f.seconds_per_token / f.candidate.estimate for f in done if f.plan["fits"]] or [1.0])
  best = min((f.seconds_per_token for f in done), default=float("inf"))
  for candidate in waiting:
    too_large = [f.candidate for f in done if not f.plan["fits"] and "error" not in f.plan]
    hopeless = any(_needs_more_memory(candidate, other) for other in too_large)
    if not hopeless and candidate.estimate * ratio < best:
      return candidate
  return None


def _needs_more_memory(one: Candidate, other: Candidate) -> bool:
  same = all(one.keys[key] == other.keys[key] for key in one.keys if key.startswith("ici_"))
  return same and one.kept >= other.kept


def plan_in_subprocess(overrides: Sequence[str], keys: Keys) -> dict[str, Any]:
  """The plan of a candidate, from a subprocess, so that compilations run in parallel."""
  command = [sys.executable, "-m", "maxtext.cli", "plan", *overrides, *(f"{k}={v}" for k, v in keys.items()), "--json"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    return {"fits": False, "estimated_tokens_per_second_per_chip": None, "error": done.stderr.strip()}
  return json.loads(done.stdout)


def _format_result(number: int, found: SearchResult) -> str:
  plan, keys = found.plan, found.candidate.keys
  kept = ",".join(k.removesuffix("_proj") for k in _REMAT_KEYS if keys.get(k) == "device")
  told = {k: v for k, v in keys.items() if v != 1 and k not in _REMAT_KEYS}
  told["remat_policy"] = str(told["remat_policy"]).replace("custom", f"custom[{kept}]")
  shown = " ".join(f"{k.removeprefix('ici_').removesuffix('_parallelism')}={v}" for k, v in told.items())
  if not plan["fits"]:
    return f"{number:3}  {plan.get('error') or 'does not fit'}  {shown}"
  memory = plan["peak_hbm_bytes_per_chip"] / 2**30
  speed = plan["estimated_tokens_per_second_per_chip"]
  return f"{number:3}  {speed:8,.0f} tokens/s/chip  {plan['estimated_mfu']:.1%} MFU  {memory:5.1f} GiB  {shown}"
