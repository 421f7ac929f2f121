"""What a decode step of a real model moves on TPUs that are not here, as the TPU's own compiler schedules it.

  python -m benchmarks.decode_compiled --json

The step of the engine is compiled for a topology. Its traffic, from and to each chip's memory, is compared with what
any step must read: every weight once, but for the table of which only rows are looked up, the whole cache, and the LoRA
adapter of every slot (`--max-loras`).
"""

import argparse
from dataclasses import dataclass

from benchmarks.figures import show
from maxtext import MaxTextConfig, load_config
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.engine import dropless, with_adapters
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.topology import Topology
from maxtext.models.build import build_model
from maxtext.planner.decode_step import CompiledDecodeStep, compiled_decode_step


@dataclass(frozen=True)
class Compiled:
  """A step, beside what it must read: bytes of one chip."""

  step: CompiledDecodeStep
  adapters: int

  @property
  def ratio(self) -> float:
    """Of what it moves to what must be read."""
    return self.step.moved / (self.step.weights + self.step.cache + self.adapters)


def compiled(config: MaxTextConfig, slots: int, adapters: AdapterOptions | None = None) -> Compiled:
  """The step that `maxtext serve` would run on `compile_topology`, with so many slots, each with an adapter if any."""
  mesh = make_mesh(config, Topology.named(config.compile_topology, 1).devices())
  model = dropless(build_model(config, mesh, serving=True))
  if adapters is not None:
    model = with_adapters(model, AdapterManager(config, adapters).matmul)
  step = compiled_decode_step(model, slots, config.max_target_length)
  return Compiled(step, 0 if adapters is None else step.tables * slots // (adapters.num_slots + 1))


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
  step = found.step
  result = {"weights_gb": step.weights / 1e9, "cache_gb": step.cache / 1e9, "moved_gb": step.moved / 1e9}
  result |= {"adapters_gb": found.adapters / 1e9} if loras else {}
  show(result | {"temporary_gb": step.temporary / 1e9, "ratio": found.ratio}, arguments.json)


if __name__ == "__main__":
  main()
