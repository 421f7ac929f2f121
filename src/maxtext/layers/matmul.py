"""The matmul seam: the one operation that every matmul of a model calls, and that a run can wrap or replace.

All matmuls of weights with activations, and those of attention, go through `matmul`. Quantization, fp8 scaling, LoRA
and statistics are `Matmul`s in `ExecutionConfig.matmul`; how a weight is stored is a `WeightFormat`. Without any,
`PlainMatmul` computes the result.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.layers.matmul_call import ATTENTION, MatmulCall, Next, Site
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.sent_weight import SentWeight
from maxtext.layers.weight_format import StoredWeight
from maxtext.mesh import explicit


class UnfitWeightError(ValueError):
  """A weight has a shape that an implementation cannot take; the message names the key and the module."""


@dataclass(frozen=True)
class Matmul:
  """An implementation of the seam; this one changes nothing. Hashable: it is part of what a program depends on.

  Attributes:
    name: part of the paths of its variables, `<module>/matmul/<name>/...`; unique within a run.
  """

  name: str = "plain"

  def wants(self, site: Site) -> bool:
    """Whether it applies to this matmul. It may not want those of attention where a fused kernel does them."""
    return site.role not in ATTENTION

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """Variables that belong to a weight with these logical axes. Only sites with a weight have any."""
    return {}

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result. `next_(call, x, weight)` is the next implementation's, or the plain one.

    `weight` is the second operand: an array, a `StoredWeight` where the run's format is not the plain one, or the keys
    or values of attention. It is not cast to `call.dtype`, nor sliced to `call.part`. Buffers among its variables may
    be assigned to, if they have a `combine` (`ParamFactory`).
    """
    return next_(call, x, weight)

  def sent(self, site: Site, weight: jax.Array, dtype: Any) -> Any:
    """What devices gather of the experts' weight at a site, which is then the second operand: the weight as it is
    stored, or a pytree of arrays with as many dimensions. Asked only where no other implementation wants the site."""
    return weight

  def table(self, path: str, table: jax.Array, dtype: Any) -> jax.Array:
    """The table [V,E] of the embedding at a path, for a lookup in that dtype."""
    return table

  def end_update(self, site: Site, own: Mapping[str, nnx.Variable], weight: nnx.Variable | None) -> None:
    """Called after the optimizer's update. Here variables have the leading dimensions of layers and experts. `weight`
    is the updated one; None for a tied layer."""


def matmul_variables(
  implementations: Sequence[Matmul],
  factory: ParamFactory,
  site: Site,
  inputs: Mapping[str, int],
  outputs: Mapping[str, int],
) -> nnx.Dict:
  """The variables of all implementations for a weight, by the names of the implementations."""
  wanting = [one for one in implementations if one.wants(site)]
  below = factory.scope("matmul")
  return nnx.Dict({one.name: nnx.Dict(one.variables(below.scope(one.name), site, inputs, outputs)) for one in wanting})


def matmul(
  implementations: Sequence[Matmul],
  variables: Mapping[str, Mapping[str, nnx.Variable]],
  call: MatmulCall,
  x: jax.Array,
  weight: Any,
  mesh: Mesh | None = None,
) -> jax.Array:
  """One matmul of the model, through all implementations that want it, the first one outermost.

  Args:
    mesh: the mesh, under explicit sharding; otherwise None.
  """
  step: Next = PlainMatmul(mesh)
  for one in reversed(implementations):
    if one.wants(call.site):
      step = partial(_link, one, variables.get(one.name, {}), step)
  return step(call, x, weight)


def sent_weight(implementations: Sequence[Matmul], site: Site, weight: jax.Array, dtype: Any) -> Any:
  """What devices gather of the experts' weight at a site: in the run's dtype where nothing needs the stored value."""
  wanting = [one for one in implementations if one.wants(site)]
  if not wanting:
    return weight.astype(dtype)
  return wanting[0].sent(site, weight, dtype) if len(wanting) == 1 else weight


def innermost(next_: Next) -> Next:
  """The plain operation below all further implementations, for matmuls that none of them should see."""
  while isinstance(next_, partial):
    next_ = next_.args[2]
  return next_


def attention_matmuls(implementations: Sequence[Matmul], path: str, fused: str | None) -> AttentionMatmuls:
  """The two matmuls of attention at a path. `fused` names the setting that selects a fused kernel, if any."""
  sites = Site(path, "attention_scores"), Site(path, "attention_values")
  wanting = [one for one in implementations if any(one.wants(site) for site in sites)]
  if not wanting:
    return PLAIN
  if fused is not None:
    raise ValueError(
      f"The matmul implementation {wanting[0].name!r} wants the matmuls of attention at {path!r}, and {fused} is a "
      "fused kernel that does them itself: choose attention=chunked or attention=dot_product and leave the kernels of "
      "the cache out, or let the implementation's `wants` leave out attention_scores and attention_values."
    )
  scores, values = (_AttentionEinsum(tuple(implementations), site) for site in sites)
  return AttentionMatmuls(scores, values)


@dataclass(frozen=True)
class PlainMatmul:
  """The plain operation, in all three passes; it depends on the call and the operands only."""

  mesh: Mesh | None = None

  def __call__(self, call: MatmulCall, x: jax.Array, weight: Any) -> jax.Array:
    """The result; for the pass `weight_gradient`, `weight` is the gradient of the forward result."""
    if isinstance(weight, StoredWeight):
      return weight.format.matmul(call, self, x, weight.arrays)
    if call.site.pass_ != "forward":
      return self._gradient(call, x, weight)
    if call.dtype is not None:
      x, weight = x.astype(call.dtype), weight.astype(call.dtype)
    if call.part is not None:
      weight = weight[..., slice(*call.part)]
    if call.taps is not None:
      return _convolution(call, x, weight)
    if call.group_sizes is not None:
      assert call.kernel is not None
      return call.kernel(x, weight, call.group_sizes)
    kind = call.preferred_element_type
    if call.site.role in ("linear", "head", "router"):
      first, _, result = call.terms
      contracted = sum(c not in result for c in first)
      if self.mesh is not None:
        return explicit.matmul(x, weight, contracted, call.precision, self.mesh, kind)
      return jnp.tensordot(x, weight, contracted, precision=call.precision, preferred_element_type=kind)
    return jnp.einsum(call.contraction, x, weight, precision=call.precision, preferred_element_type=kind)

  def _gradient(self, call: MatmulCall, first: jax.Array, second: jax.Array) -> jax.Array:
    """The matmul is linear in each operand, so its gradients are its transposes, at any value of the operand."""
    assert call.part is None, "there are no gradients through a cache"
    a, b, result = call.terms
    sizes = dict(zip(a + b, first.shape + second.shape, strict=True))
    if call.group_sizes is not None:
      sizes["x"] = call.group_sizes.shape[0]
    if call.documents is not None and call.taps is not None:
      sizes |= {"t": call.documents[1].shape[1], "w": call.taps[0]}
    nothing = jnp.zeros([sizes[c] for c in result], call.dtype or first.dtype)
    by_input = call.site.pass_ == "input_gradient"
    contraction = f"{result},{b}->{a}" if by_input else f"{a},{result}->{b}"
    forward = dataclasses.replace(call, site=dataclasses.replace(call.site, pass_="forward"), contraction=contraction)
    run = (lambda x: self(forward, x, second)) if by_input else (lambda weight: self(forward, first, weight))
    out, transpose = jax.vjp(run, nothing)
    return transpose((first if by_input else second).astype(out.dtype))[0]


def each_pass(
  operation: Callable[[MatmulCall, Next, jax.Array, Any], jax.Array],
  call: MatmulCall,
  next_: Next,
  x: jax.Array,
  weight: jax.Array | SentWeight,
) -> jax.Array:
  """A matmul whose three passes are all computed by `operation(call, next_, first, second)`, distinguished by
  `call.site.pass_`.

  The operands are (x, weight) in the forward pass, (gradient, weight) for the gradient of x, and (x, gradient) for that
  of the weight, with the contraction of that pass; `next_` computes any of them. The result is taken as the gradient
  whatever was done to the operands, so quantization is straight-through. `operation` must not close over arrays. The
  implementation must be the last of `ExecutionConfig.matmul`, since the variables of others do not exist in the
  backward pass.
  """
  assert isinstance(next_, PlainMatmul), (
    "an implementation that uses each_pass is the last one of ExecutionConfig.matmul"
  )
  if next_.mesh is not None:
    raise ValueError(
      "a matmul that does its own gradients (each_pass) needs shard_mode=auto: its shardings are no types"
    )
  return _each_pass(operation, next_, call, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _each_pass(
  operation: Any, plain: Next, call: MatmulCall, x: jax.Array, weight: jax.Array | SentWeight
) -> jax.Array:
  return operation(call, plain, x, weight)


def _each_pass_forward(
  operation: Any, plain: Next, call: MatmulCall, x: jax.Array, weight: jax.Array | SentWeight
) -> tuple[jax.Array, tuple[MatmulCall, jax.Array, jax.Array | SentWeight]]:
  return operation(call, plain, x, weight), (call, x, weight)


def _each_pass_backward(
  operation: Any, plain: Next, saved: tuple[MatmulCall, jax.Array, jax.Array | SentWeight], grad: jax.Array
) -> tuple[None, jax.Array, jax.Array | SentWeight]:
  call, x, weight = saved
  by_input = operation(call.transposed("input_gradient"), plain, grad, weight)
  by_weight = operation(call.transposed("weight_gradient"), plain, x, grad)
  of_weight = weight.with_gradient(by_weight) if isinstance(weight, SentWeight) else by_weight.astype(weight.dtype)
  return None, by_input.astype(x.dtype), of_weight


_each_pass.defvjp(_each_pass_forward, _each_pass_backward)


def _link(
  one: Matmul, own: Mapping[str, nnx.Variable], next_: Next, call: MatmulCall, x: jax.Array, weight: Any
) -> jax.Array:
  return one(call, own, next_, x, weight)


@dataclass(frozen=True)
class _AttentionEinsum:
  """A matmul of attention at its site, through the seam."""

  implementations: tuple[Matmul, ...]
  site: Site

  def __call__(
    self, subscripts: str, a: jax.Array, b: jax.Array, *, precision: str, preferred_element_type: Any = None
  ) -> jax.Array:
    call = MatmulCall(self.site, subscripts, None, precision, preferred_element_type)
    return matmul(self.implementations, {}, call, a, b)


def _convolution(call: MatmulCall, x: jax.Array, weight: jax.Array) -> jax.Array:
  """Tokens [B,T,...], which begin with earlier ones, and weights [W,...] to sums [B,S,...] within documents."""
  assert call.taps is not None
  assert call.documents is not None
  (span, step), (own, every) = call.taps, call.documents

  def back(start: int) -> jax.Array:
    end = start + own.shape[1]
    return within(x[:, start:end], every[:, start:end], own)

  return sum((back(i * step) * weight[i] for i in range(span)), jnp.zeros((), x.dtype))


def within(x: jax.Array, documents: jax.Array, own: jax.Array) -> jax.Array:
  """Tokens [B,S,...], set to zero where their `documents` [B,S] differ from `own`."""
  return jnp.where((documents == own)[(..., *(None,) * (x.ndim - 2))], x, 0)
