"""The dtypes in which an engine's programs read parameters, where these are stored in wider ones for training.

A program that casts a weight reads the wider one in every step. The compiler moves the casts of a stack out of the loop
over its layers, so it even writes all of them and reads them again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from maxtext.inference.decode_state import forward_step, prefill
from maxtext.models.model import Model, Params

_VIEWS = (
  "slice", "dynamic_slice", "squeeze", "reshape", "transpose", "broadcast_in_dim", "sharding_constraint", "copy",
)  # fmt: skip
_CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "shard_map", "custom_jvp_call", "custom_vjp_call")
_TOKENS = 128  # of a chunk that stands for all chunks: whole blocks of every attention kernel


def as_read(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
  """Parameters and buffers as the programs of an engine read them: in a narrower dtype than they are stored in if every
  use of one casts it to that first, so that it may be cast once without a change of any result.

  On CPUs they are as stored: products of bfloat16 are computed in float32 there, and may leave the cast out.
  """
  stored, execution = model.params | model.buffers, model.execution
  wider = any(_narrower(execution.numerics.dtype, struct.dtype) for struct in stored.values())
  if not wider or execution.sharding.mesh.devices.flat[0].platform == "cpu":
    return stored
  return {path: _with_dtype(stored[path], dtype) for path, dtype in read_dtypes(model).items()}


def cast(params: Params, read: dict[str, jax.ShapeDtypeStruct]) -> Params:
  """Parameters in the dtypes of `as_read`; those that have them are not copied."""
  return {path: a if a.dtype == read[path].dtype else a.astype(read[path].dtype) for path, a in params.items()}


def read_dtypes(model: Model) -> dict[str, Any]:
  """The dtype of every parameter and buffer as decode steps and prefills of a model read it."""
  stored, model = model.params | model.buffers, Model.of(model.spec, model.execution.replace(pages=None))
  cache = jax.eval_shape(lambda params: model.bind(params).init_cache(1, _TOKENS), stored)
  row, one = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
  first = jax.ShapeDtypeStruct((), jnp.int32)

  def read_prompt(params: Params, cache: Any, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Any:
    return prefill(model, params, cache, tokens, start, count)

  traced = (
    jax.make_jaxpr(partial(forward_step, model))(stored, cache, jax.ShapeDtypeStruct((1, 1), jnp.int32), one),
    jax.make_jaxpr(read_prompt)(stored, cache, row, first, one),
  )
  found: dict[str, Any] = {}
  for number, path in enumerate(sorted(stored)):  # as a dictionary is flattened
    dtypes = {dtype for program in traced for dtype in _reads(program.jaxpr, program.jaxpr.invars[number])}
    [dtype] = dtypes if len(dtypes) == 1 else [stored[path].dtype]
    found[path] = dtype if _narrower(dtype, stored[path].dtype) else stored[path].dtype
  return found


def _reads(jaxpr: core.Jaxpr, variable: core.Var) -> Iterator[Any]:
  """The dtypes to which a variable is cast where it is used, and its own for other uses."""
  own = _dtype(variable)
  if any(out is variable for out in jaxpr.outvars):
    yield own
  for eqn in jaxpr.eqns:
    for place, operand in enumerate(eqn.invars):
      if operand is not variable:
        continue
      name, inner = eqn.primitive.name, list(_inner(eqn, place))
      if name == "convert_element_type":
        yield eqn.params["new_dtype"]
      elif name in _VIEWS and place == 0:
        yield from _reads(jaxpr, eqn.outvars[0])
      elif name == "split":
        for part in eqn.outvars:
          yield from _reads(jaxpr, part)
      elif inner:
        for one, argument in inner:
          yield from _reads(one, argument)
      else:
        yield own


def _inner(eqn: core.JaxprEqn, place: int) -> Iterator[tuple[core.Jaxpr, core.Var]]:
  """The programs that an operation runs, with the variable that an operand is in each; none if that may change."""
  name, params = eqn.primitive.name, eqn.params
  if name == "scan" and not params["num_consts"] <= place < params["num_consts"] + params["num_carry"]:
    yield params["jaxpr"].jaxpr, params["jaxpr"].jaxpr.invars[place]
  elif name == "cond" and place:
    for branch in params["branches"]:
      yield branch.jaxpr, branch.jaxpr.invars[place - 1]
  elif name in _CALLS:
    called: Any = params.get("jaxpr", params.get("call_jaxpr"))
    called = getattr(called, "jaxpr", called)
    yield called, called.invars[place]


def _dtype(variable: core.Var) -> Any:
  array: Any = variable.aval
  return array.dtype


def _narrower(dtype: Any, than: Any) -> bool:
  floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(than, jnp.floating)
  return floats and jnp.dtype(dtype).itemsize < jnp.dtype(than).itemsize


def _with_dtype(struct: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(struct.shape, dtype, sharding=struct.sharding)
