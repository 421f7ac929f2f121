"""Cost model of the forward pass: bytes and FLOPs of each named tensor, from the trace alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import jax
from jax.extend import core

from maxtext.configs.types import RematPolicy
from maxtext.layers.execution import RematSpec
from maxtext.models.execution.remat_policy import remat
from maxtext.training.program import Program


@dataclass(frozen=True)
class TensorCost:
  """Cost of the tensors of one checkpoint name, in all layers together, for one batch."""

  bytes: int
  flops: float  # of matmuls since the previous named tensor


def forward_costs(program: Program) -> tuple[dict[str, TensorCost], int]:
  """The cost of each checkpoint name, and the bytes of the layers' inputs, which are always saved."""
  model, batch = program.model, program.batch

  def forward(params: Any, batch: Any) -> Any:
    return model.bind(params).hidden(
      batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
    )[0]

  traced = jax.make_jaxpr(forward)(model.params | model.buffers, batch)
  sizes: dict[str, int] = defaultdict(int)
  flops: dict[str, float] = defaultdict(float)
  inputs, since = 0, 0.0
  for eqn, times in _equations(traced.jaxpr, 1):
    name = eqn.primitive.name
    if name == "dot_general":
      since += times * _matmul_flops(eqn)
    elif name == "name":
      sizes[eqn.params["name"]] += times * _bytes(eqn)
      flops[eqn.params["name"]] += since
      since = 0.0
    elif name in ("remat2", "checkpoint"):
      inputs += times * _bytes(eqn)
  return {name: TensorCost(size, flops[name]) for name, size in sizes.items()}, inputs


def saved_bytes(costs: Mapping[str, TensorCost], turns: Sequence[RematSpec]) -> float:
  """Bytes that layers save under alternating remat policies, without their inputs."""
  return sum(costs[name].bytes for turn in turns for name in turn.saved if name in costs) / len(turns)


def policy_that_fits(program: Program, free: int) -> tuple[str, int] | None:
  """The `remat_policy` that saves most in so many free bytes of a device beside all that is saved now, and its bytes,
  if every device has its share of every tensor."""
  config, execution = program.config, program.model.execution
  costs, _ = forward_costs(program)
  devices = execution.sharding.mesh.size * config.gradient_accumulation_steps
  policies = {policy.value: remat(config.model_copy(update={"remat_policy": policy.value})) for policy in RematPolicy}
  now = saved_bytes(costs, execution.remat)
  more = {name: int((saved_bytes(costs, turns) - now) / devices) for name, turns in policies.items()}
  kept = {tensor for turn in execution.remat for tensor in turn.saved}
  fitting = [
    (size, name)
    for name, size in more.items()
    if 0 < size <= free and not policies[name][0].offloaded and kept <= set(policies[name][0].saved)
  ]
  size, name = max(fitting, default=(0, ""))
  return (name, size) if name else None


def _equations(jaxpr: core.Jaxpr, times: int) -> Iterator[tuple[core.JaxprEqn, int]]:
  """All equations, inner ones after the outer one, with how often they run on all devices together."""
  for eqn in jaxpr.eqns:
    yield eqn, times
    if eqn.primitive.name == "pallas_call":
      continue  # written for one block
    inside = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
    if eqn.primitive.name == "shard_map":
      inside *= eqn.params["mesh"].size
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        closed = getattr(inner, "jaxpr", inner)
        if isinstance(closed, core.Jaxpr):
          yield from _equations(closed, inside)


def _matmul_flops(eqn: core.JaxprEqn) -> float:
  (contracted, _), _ = eqn.params["dimension_numbers"]
  left, out = (cast(Any, variables[0].aval) for variables in (eqn.invars, eqn.outvars))
  return 2.0 * out.size * prod(left.shape[d] for d in contracted)


def _bytes(eqn: core.JaxprEqn) -> int:
  aval = cast(Any, eqn.outvars[0].aval)
  return aval.size * aval.dtype.itemsize
