"""Time of a mixture of experts beside a dense layer with the same active arithmetic: `python -m benchmarks.experts`.

The dense layer is as wide as the experts that a token passes through. Both are forward and backward, in one process and
in turns; the time is that of the processors, which other work on the machine changes least.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext import load_config
from maxtext.layers.experts import MoE
from maxtext.layers.mlp import MLP
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.router import Router
from maxtext.mesh.devices import make_mesh
from maxtext.models.execution.execution import execution_config


def compiled(spec, width, execution, x):
  graph, state = nnx.split(spec.build(ParamFactory(0, jnp.float32), width, execution))
  step = jax.jit(jax.grad(lambda state, x: jnp.square(nnx.merge(graph, state)(x)[0]).sum(), (0, 1)))
  step = step.lower(state, x).compile()
  return lambda: jax.block_until_ready(step(state, x))


def seconds(run):
  start = time.process_time()
  run()
  return time.process_time() - start


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default in (
    ("tokens", 2048),
    ("width", 512),
    ("hidden", 1024),
    ("experts", 8),
    ("chosen", 2),
    ("times", 9),
  ):
    parser.add_argument(f"--{name}", type=int, default=default)
  a = parser.parse_args()
  config = load_config(dataset_type="synthetic", dtype="float32", num_experts=a.experts, jax_cache_dir="")
  execution = execution_config(config, make_mesh(config, jax.devices()[:1]))
  x = jax.random.normal(jax.random.key(0), (8, a.tokens // 8, a.width))
  specs = {"dense": MLP(a.chosen * a.hidden), "experts": MoE(Router(a.experts, a.chosen), a.hidden)}
  runs = {name: compiled(spec, a.width, execution, x) for name, spec in specs.items()}
  for run in runs.values():
    run()
  found = {name: [] for name in runs}
  for _ in range(a.times):
    for name, run in runs.items():
      found[name].append(seconds(run))
  best = {name: min(times) for name, times in found.items()}
  what = f"{a.tokens} tokens, width {a.width}, {a.chosen} of {a.experts} experts of {a.hidden}"
  ratio = best["experts"] / best["dense"]
  print(f"{what}: dense {best['dense']:.3f} s, experts {best['experts']:.3f} s, {ratio:.2f} times")


if __name__ == "__main__":
  main()
