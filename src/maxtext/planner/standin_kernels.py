"""Stand-ins for the Pallas kernels of a step, with which it compiles in a fraction of the time.

The planner takes a kernel's time from its FLOPs, so what is in a kernel need not be compiled, and the compiler takes
longer over attention kernels with large blocks than over all the rest of a step. A stand-in has the operands, results,
layouts, name and metadata of the kernel, and does nothing.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
from jax.experimental import pallas as pl

_TARGET = "tpu_custom_call"
_CONFIG = "backend_config"
_BODY = "custom_call_config"
_DTYPES = {
  "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "ui8": "uint8", "ui16": "uint16", "ui32": "uint32",
  "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
}  # fmt: skip
_OF_BODY = ("body", "serialization_format", "needs_layout_passes", "needs_hlo_passes")  # of its entries: the program


def stand_in_for_kernels(lowered: jax.stages.Lowered) -> int:
  """Replaces the kernels of a lowered step; returns how many there were."""
  module: Any = lowered.compiler_ir()
  found = 0
  for operation in _operations(module.operation):
    if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _TARGET:
      operands, results = (tuple(str(v.type) for v in of) for of in (operation.operands, operation.results))
      config = json.loads(operation.attributes[_CONFIG].value)
      config[_BODY] = {k: v for k, v in config[_BODY].items() if k not in _OF_BODY} | _nothing(operands, results)
      with module.context:
        operation.attributes[_CONFIG] = type(operation.attributes[_CONFIG]).get(json.dumps(config))
      found += 1
  return found


def _operations(operation: Any) -> Iterator[Any]:
  for region in operation.regions:
    for block in region:
      for inner in block:
        yield inner.operation
        yield from _operations(inner.operation)


@cache
def _nothing(operands: tuple[str, ...], results: tuple[str, ...]) -> dict[str, Any]:
  """The program of a kernel with arrays of these MLIR types that does nothing."""
  kernel = pl.pallas_call(
    lambda *_: None,
    [_struct(kind) for kind in results],
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
    out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(results),
  )
  lowered = jax.jit(kernel).trace(*map(_struct, operands)).lower(lowering_platforms=("tpu",))
  calls = (o for o in _operations(lowered.compiler_ir().operation) if o.name == "stablehlo.custom_call")
  config = json.loads(next(calls).attributes[_CONFIG].value)[_BODY]
  return {key: config[key] for key in _OF_BODY if key in config}


def _struct(kind: str) -> jax.ShapeDtypeStruct:
  """The array of an MLIR type such as tensor<4x8xbf16>."""
  *shape, dtype = kind.removeprefix("tensor<").removesuffix(">").split("x")
  return jax.ShapeDtypeStruct([int(size) for size in shape], _DTYPES[dtype])
