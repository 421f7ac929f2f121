"""What a decode step of a real model moves on TPUs that are not here, as the TPU's own compiler schedules it.

  python -m benchmarks.decode_compiled --json

The step of the engine is compiled for a topology. Its traffic, from and to each chip's memory, is compared with what
any step must read: every weight once, but for the table of which only rows are looked up, the whole cache, and the LoRA
adapter of every slot (`--max-loras`).
"""

import argparse
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.figures import show
from maxtext import MaxTextConfig, load_config
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.decode_state import DecodeState, decode_step, init_decode_state
from maxtext.inference.engine import dropless, with_adapters
from maxtext.inference.sampling import full_token_bitmask
from maxtext.layers.multi_lora import is_table
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.topology import Topology
from maxtext.models.build import build_model
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.memory_traffic import memory_traffic
from maxtext.planner.plan import bytes_per_device


@dataclass(frozen=True)
class Compiled:
  """A step, compiled: bytes of one chip."""

  program: CompiledProgram
  weights: int
  cache: int
  adapters: int
  temporary: int

  @property
  def moved(self) -> int:
    """By the step."""
    return sum(bytes for _, bytes in memory_traffic(self.program))

  @property
  def ratio(self) -> float:
    """To what must be read."""
    return self.moved / (self.weights + self.cache + self.adapters)


def compiled(config: MaxTextConfig, slots: int, adapters: AdapterOptions | None = None) -> Compiled:
  """The step that `maxtext serve` would run on `compile_topology`, with so many slots, each with an adapter if any."""
  mesh = make_mesh(config, Topology.named(config.compile_topology, 1).devices())
  model = dropless(build_model(config, mesh, serving=True))
  if adapters is not None:
    model = with_adapters(model, AdapterManager(config, adapters).matmul)
  params, everywhere = model.params | model.buffers, NamedSharding(mesh, PartitionSpec())
  begin = partial(init_decode_state, model, slots=slots, max_model_len=config.max_target_length)
  shardings = jax.jit(begin).lower(params).compile().output_shardings

  def placed(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

  state: DecodeState = jax.tree.map(placed, jax.eval_shape(begin, params), shardings)
  active = jax.ShapeDtypeStruct((slots,), bool, sharding=everywhere)
  token_bitmask = placed(jax.eval_shape(partial(full_token_bitmask, slots, model.spec.vocab)), everywhere)
  step = jax.jit(partial(decode_step, model), donate_argnums=1, out_shardings=(shardings, everywhere))
  executable = step.lower(params, state, active, token_bitmask).compile()
  tables = [a for name, a in params.items() if is_table(name)]
  read = [
    a for name, a in params.items() if not is_table(name) and (model.spec.tied or not name.startswith("embedding/"))
  ]
  return Compiled(
    CompiledProgram.parse(executable.as_text()),
    bytes_per_device(read),
    bytes_per_device(state.cache),
    0 if adapters is None else bytes_per_device(tables) * slots // (adapters.num_slots + 1),
    executable.memory_analysis().temp_size_in_bytes,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  parser.add_argument("--model", default="llama3.1-8b")
  parser.add_argument("--topology", default="v5p-8")
  parser.add_argument("--slots", type=int, default=32)
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--weight-format", default="", help="of weights at rest; the run's dtype if left out")
  parser.add_argument("--quantization", default="", help="of matmuls, with weights at rest in that format")
  parser.add_argument("--max-loras", type=int, help="LoRA adapters that are loaded; every slot has one")
  parser.add_argument("--max-lora-rank", type=int, default=16)
  parser.add_argument("--layers", type=int, help="of the model; all of them are left out")
  arguments = parser.parse_args()
  layers = {} if arguments.layers is None else {"base_num_decoder_layers": arguments.layers}
  config = load_config(
    model_name=arguments.model, override_model_config=bool(layers), compile_topology=arguments.topology,
    max_target_length=arguments.length, dtype="bfloat16", weight_dtype="bfloat16", ici_tensor_parallelism=-1,
    ici_fsdp_parallelism=1, weight_format=arguments.weight_format, quantization=arguments.quantization, **layers,
  )  # fmt: skip
  loras = arguments.max_loras and AdapterOptions(max_loras=arguments.max_loras, max_lora_rank=arguments.max_lora_rank)
  found = compiled(config, arguments.slots, loras or None)
  result = {"weights_gb": found.weights / 1e9, "cache_gb": found.cache / 1e9, "moved_gb": found.moved / 1e9}
  result |= {"adapters_gb": found.adapters / 1e9} if loras else {}
  show(result | {"temporary_gb": found.temporary / 1e9, "ratio": found.ratio}, arguments.json)


if __name__ == "__main__":
  main()
