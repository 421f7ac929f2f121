"""The engine's decode step, compiled for a topology that is not here."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.inference.decode_state import DecodeState, decode_step, init_decode_state
from maxtext.inference.sampling import full_token_bitmask
from maxtext.layers.multi_lora import is_table
from maxtext.models.model import Model
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.memory_traffic import memory_traffic
from maxtext.training.state import bytes_per_device


@dataclass(frozen=True)
class CompiledDecodeStep:
  """A step, compiled: bytes of one device.

  Attributes:
    program: what the compiler made.
    weights: those that a step reads; of an embedding only rows are looked up.
    cache: of all slots.
    tables: of LoRA adapters.
    temporary: while the step runs.
  """

  program: CompiledProgram
  weights: int
  cache: int
  tables: int
  temporary: int

  @property
  def moved(self) -> int:
    """By the step, from and to memory."""
    return sum(size for _, size in memory_traffic(self.program))


def compiled_decode_step(
  model: Model, slots: int, max_model_len: int, params: Mapping[str, jax.ShapeDtypeStruct] | None = None
) -> CompiledDecodeStep:
  """The step of an engine of this model (`dropless`), which may be for devices that are not here.

  `params` are shapes and dtypes of its parameters and buffers; None is as the model stores them.
  """
  everywhere = NamedSharding(model.execution.sharding.mesh, PartitionSpec())
  params = dict(params or model.params | model.buffers)
  begin = partial(init_decode_state, model, slots=slots, max_model_len=max_model_len)
  shardings = jax.jit(begin).lower(params).compile().output_shardings

  def placed(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

  state: DecodeState = jax.tree.map(placed, jax.eval_shape(begin, params), shardings)
  active = jax.ShapeDtypeStruct((slots,), bool, sharding=everywhere)
  token_bitmask = placed(jax.eval_shape(partial(full_token_bitmask, slots, model.spec.vocab)), everywhere)
  step = jax.jit(partial(decode_step, model), donate_argnums=1, out_shardings=(shardings, everywhere))
  executable = step.lower(params, state, active, token_bitmask).compile()
  text, memory = executable.as_text(), executable.memory_analysis()
  assert text is not None
  assert memory is not None
  tables = [a for name, a in params.items() if is_table(name)]
  read = [
    a for name, a in params.items() if not is_table(name) and (model.spec.tied or not name.startswith("embedding/"))
  ]
  return CompiledDecodeStep(
    CompiledProgram.parse(text),
    bytes_per_device(read),
    bytes_per_device(state.cache),
    bytes_per_device(tables),
    memory.temp_size_in_bytes,
  )
