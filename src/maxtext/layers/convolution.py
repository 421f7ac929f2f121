"""A depthwise causal convolution, which does not cross the start of a document.

Shapes: B batch, S sequence, H and D channels, W earlier tokens that it needs.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import latest
from maxtext.layers.matmul import matmul, matmul_variables, within
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.layers.param_factory import ParamFactory


class CausalConvolution(nnx.Module):
  """Each channel is a weighted sum of its last `span` tokens, `step` apart."""

  def __init__(
    self,
    factory: ParamFactory,
    span: int,
    channels: Mapping[str, int],
    execution: ExecutionConfig,
    step: int = 1,
    std: float | None = None,
  ) -> None:
    self.execution, self.span, self.step, self.site = execution, span, step, Site(factory.module_path, "convolution")
    std = span**-0.5 if std is None else std
    self.weight = factory("weight", (span, *channels.values()), (None, *channels), std=std)
    self.matmul = matmul_variables(execution.matmul, factory, self.site, {"taps": span}, channels)

  @property
  def reach(self) -> int:
    """Number of earlier tokens that the first token needs."""
    return (self.span - 1) * self.step

  def __call__(self, x: jax.Array, context: Context, tail: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """x [B,S,H,D] and the tokens before it [B,W,H,D] to the sums, and the tail for the next call."""
    B = x.shape[0]
    if tail is None:
      tail = jnp.zeros((B, self.reach, *x.shape[2:]), x.dtype)
    document = jnp.cumsum(context.begins, axis=1)
    x = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    documents = jnp.pad(document, ((0, 0), (self.reach, 0)))
    taps = self.span, self.step
    call = MatmulCall(self.site, "btcd,wcd->bscd", x.dtype, taps=taps, documents=(document, documents))
    y = matmul(self.execution.matmul, self.matmul, call, x, self.weight[...])
    return y, within(latest(x, self.reach, context), latest(documents, self.reach, context), document[:, -1:])

  def end_update(self) -> None:
    """Calls `end_update` of the implementations of the matmul."""
    for one in self.execution.matmul:
      if one.wants(self.site):
        one.end_update(self.site, self.matmul[one.name], self.weight)
