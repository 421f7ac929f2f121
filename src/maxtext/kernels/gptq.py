"""GPTQ: values of a weight at rest that are chosen one row after the other, so that later rows make up for what
rounding the earlier ones did to the outputs (Frantar et al. 2022).

Scales are those of rounding to nearest, of the weight as it was, so that what is stored has the same form. Rows are
taken in the order of how much of the inputs they meet.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp

from maxtext.kernels.weight_quantize import StoredFormat, encode, nearest, row_scales, values_of

_DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal, added to it
_LAZY = 128  # rows after which the others are corrected, at most


@partial(jax.jit, static_argnames=("format_", "block"))
def gptq(weight: jax.Array, moments: jax.Array, format_: StoredFormat, block: int) -> dict[str, jax.Array]:
  """The arrays of a weight [F,O] by name, with the values [F,O] as `nearest` has them, not packed.

  Args:
    moments: [F,F] the sum of the products of all pairs of inputs, over the tokens of a calibration text. Inputs that
      were never seen are rounded to nearest.
  """
  weight = weight.astype(jnp.float32)
  scales = {name: array for name, array in encode(weight, format_, block).items() if name != "weight"}
  order = jnp.argsort(-jnp.diag(moments))
  back = jnp.argsort(order)
  units = row_scales(scales, format_, block, weight.shape[0])[order]
  codes = _rounded(weight[order], _correction(moments[order][:, order]), units, format_)
  return {"weight": codes[back], **scales}


def _correction(moments: jax.Array) -> jax.Array:
  """The upper Cholesky factor of the inverse: row i holds what an error of row i does to the rows after it.

  With more damping where float32 does not resolve the factor, in the end so much that rows are rounded to nearest.
  """
  upper = _factor(moments, _DAMPING[0])
  for damping in _DAMPING[1:]:
    found = upper
    upper = jax.lax.cond(
      jnp.isfinite(found).all(), lambda found=found: found, lambda damping=damping: _factor(moments, damping)
    )
  return jnp.where(jnp.isfinite(upper).all(), upper, jnp.eye(len(moments)))


def _factor(moments: jax.Array, damping: float) -> jax.Array:
  diagonal = jnp.diag(moments)
  mean = jnp.mean(diagonal)
  damped = moments + jnp.diag(jnp.where(diagonal == 0, jnp.maximum(mean, 1.0), damping * mean))
  inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(len(moments)))
  return jnp.linalg.cholesky(inverse, upper=True)


def _rounded(weight: jax.Array, upper: jax.Array, scale: jax.Array, format_: StoredFormat) -> jax.Array:
  rows = weight.shape[0]
  size = gcd(rows, _LAZY)

  def some_rows(k: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    weight, codes = carry
    start = k * size
    own, factor = jax.lax.dynamic_slice_in_dim(weight, start, size), jax.lax.dynamic_slice_in_dim(upper, start, size)
    block = jax.lax.dynamic_slice_in_dim(factor, start, size, 1)
    units = jax.lax.dynamic_slice_in_dim(scale, start, size)

    def one_row(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      own, errors, codes = carry
      code = nearest(own[i] / units[i], format_)
      error = (own[i] - values_of(code, format_) * units[i]) / block[i, i]
      return own - block[i][:, None] * error, errors.at[i].set(error), codes.at[start + i].set(code)

    _, errors, codes = jax.lax.fori_loop(0, size, one_row, (own, jnp.zeros_like(own), codes))
    return weight - jnp.matmul(factor.T, errors, precision="highest"), codes

  codes = jnp.zeros(weight.shape, nearest(weight[:1], format_).dtype)
  return jax.lax.fori_loop(0, rows // size, some_rows, (weight, codes))[1]
