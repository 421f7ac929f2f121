"""Grouped matmul: rows sorted by group, each group times its own weight, without padding or dropping rows.

`reference` is the plain implementation, which tests compare the others with; `GroupedMatmul` dispatches to one of them.

Shapes: M rows, G groups, I inputs, O outputs, T rows of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

Kernel = Literal["reference", "megablox", "ragged_dot", "tiled"]


@dataclass(frozen=True)
class Tiles:
  """Tile sizes of one matmul, which are reduced to its dimensions where they are larger."""

  rows: int = 512
  inputs: int = 1024
  outputs: int = 1024


@dataclass(frozen=True)
class GroupedMatmul:
  """x [M,I], weights [G,I,O] and sizes [G] to [M,O]; rows after the last group become zeros.

  Attributes:
    kernel: megablox is JAX's Pallas kernel, for TPU; ragged_dot is XLA's, which multiplies every row by every group's
      weight on a CPU and on a GPU; tiled loops over tiles of rows, which is faster on a CPU.
    gradient: the kernel of the gradient of weights, if another. XLA has none on a TPU for its ragged_dot: it multiplies
      all rows for every group.
    forward, by_rows, by_weights: tiles of megablox in the forward matmul, and in the gradients of rows and of weights.
  """

  kernel: Kernel = "tiled"
  gradient: Kernel | None = None
  precision: str = "default"
  forward: Tiles = Tiles()
  by_rows: Tiles = Tiles()
  by_weights: Tiles = Tiles()
  interpret: bool = False  # run Pallas kernels as plain operations, to test them without a TPU

  def __call__(self, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The result, in the dtype of x."""
    if self.kernel == "reference":
      return reference(x, weights, sizes, self.precision)
    if self.kernel == "ragged_dot" and self.gradient is None:
      return self._matmul(x, weights, sizes, self.forward, transposed=False)
    return _with_vjp(self, x, weights, sizes)

  def quantized(self, x: jax.Array, weights: jax.Array, sizes: jax.Array, total: Any, dtype: Any) -> jax.Array:
    """The result of operands of few bits, summed in `total`, which a kernel for TPUs may return in the float `dtype`,
    in fewer bytes. No gradients."""
    if self.kernel in ("tiled", "reference"):
      return _tiled_matmul(x, weights, sizes, self.precision, total)
    # XLA's kernel multiplies integers on a TPU; megablox takes floats only.
    if x.dtype != weights.dtype:
      x, weights = x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)  # exact
    out = jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=total if total == jnp.int32 else dtype)
    return jnp.where(_in_groups(x, sizes), out, 0)

  def quantized_weights_gradient(
    self, x: jax.Array, grad: jax.Array, sizes: jax.Array, total: Any, dtype: Any
  ) -> jax.Array:
    """The gradient [G,I,O] from rows [M,I] and [M,O] of few bits; tiles are summed in `total`. A kernel for TPUs sums
    in float32 and returns it in `dtype`: the gradients of all experts are the largest arrays of a step."""
    if self._gradient_kernel == "megablox":  # its operands are floats, and eight bits are exact in bfloat16
      return self._weights_gradient(x.astype(jnp.bfloat16), grad.astype(jnp.bfloat16), sizes, dtype)
    return _tiled_weights_gradient(x, grad, sizes, self.precision, total)

  @property
  def _gradient_kernel(self) -> Kernel:
    return self.gradient or self.kernel

  def _matmul(self, x: jax.Array, weights: jax.Array, sizes: jax.Array, tiles: Tiles, transposed: bool) -> jax.Array:
    if self.kernel != "megablox":
      weights = weights.swapaxes(1, 2) if transposed else weights
      if self.kernel == "tiled":
        return _tiled_matmul(x, weights, sizes, self.precision, x.dtype)
      out = jax.lax.ragged_dot(x, weights, sizes, precision=self.precision)
      return jnp.where(_in_groups(x, sizes), out, 0)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    shape = weights.shape[:0:-1] if transposed else weights.shape[1:]
    x, tiling, M = _whole_tiles(x, shape, tiles)
    sizes = _with_rest(sizes, x.shape[0])
    return gmm(x, weights, sizes, x.dtype, tiling, transpose_rhs=transposed, interpret=self.interpret)[:M]

  def _weights_gradient(self, x: jax.Array, grad: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    if self._gradient_kernel == "tiled":
      return _tiled_weights_gradient(x, grad, sizes, self.precision, jnp.float32)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    shape = x.shape[1], grad.shape[1]
    (x, tiling, _), (grad, _, _) = (_whole_tiles(a, shape, self.by_weights) for a in (x, grad))
    groups, sizes = sizes.shape[0], _with_rest(sizes, x.shape[0])
    return tgmm(x.swapaxes(0, 1), grad, sizes, dtype, tiling, num_actual_groups=groups, interpret=self.interpret)


def reference(x: jax.Array, weights: jax.Array, sizes: jax.Array, precision: str = "default") -> jax.Array:
  """The plain implementation: every row times every weight, masked to that of its group."""
  ends = jnp.cumsum(sizes)
  row = jnp.arange(x.shape[0])[:, None]
  own = (row >= ends - sizes) & (row < ends)
  return jnp.einsum("mi,gio,mg->mo", x, weights, own.astype(x.dtype), precision=precision)


def group_of_each_row(sizes: jax.Array, rows: int) -> jax.Array:
  """The group of each row [M]; rows after the last group have the last one."""
  return jnp.searchsorted(jnp.cumsum(sizes)[:-1], jnp.arange(rows), side="right")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_vjp(kernel: GroupedMatmul, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
  return kernel._matmul(x, weights, sizes, kernel.forward, transposed=False)


def _forward(
  kernel: GroupedMatmul, x: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _with_vjp(kernel, x, weights, sizes), (x, weights, sizes)


def _backward(
  kernel: GroupedMatmul, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x, weights, sizes = saved
  by_rows = kernel._matmul(grad, weights, sizes, kernel.by_rows, transposed=True)
  return by_rows, kernel._weights_gradient(x, grad, sizes, x.dtype).astype(weights.dtype), None


_with_vjp.defvjp(_forward, _backward)


def _in_groups(x: jax.Array, sizes: jax.Array) -> jax.Array:
  return jnp.arange(x.shape[0])[:, None] < sizes.sum()


_TILES = (1024, 256, 64, 16)


def _over_tiles(state: Any, start: jax.Array, end: jax.Array, rows: int, step: Callable[..., Any]) -> Any:
  """Loops over rows [start, end) in tiles, large ones first: state = step(size, row, state). The last tile may extend
  beyond the end."""
  sizes = [size for size in _TILES if size <= rows or size == _TILES[-1]]
  carry = start, state
  for size in sizes:
    least = 1 if size == sizes[-1] else size

    def fits(carry: tuple[jax.Array, Any], least: int = least) -> jax.Array:
      return carry[0] + least <= end

    def tile(carry: tuple[jax.Array, Any], size: int = size) -> tuple[jax.Array, Any]:
      return carry[0] + size, step(size, *carry)

    carry = jax.lax.while_loop(fits, tile, carry)
  return carry[1]


def _tiled_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array, precision: str, dtype: Any) -> jax.Array:
  """Loops over groups, and over the tiles of each. Rows that a tile writes beyond the end of its group are overwritten
  by the next group."""
  M = x.shape[0]
  padded = jnp.pad(x, ((0, _TILES[-1]), (0, 0)))

  def group(carry: tuple[jax.Array, jax.Array], own: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
    (out, start), (weight, size) = carry, own

    def step(T: int, row: jax.Array, out: jax.Array) -> jax.Array:
      rows = jax.lax.dynamic_slice_in_dim(padded, row, T)
      product = _dot(rows, weight, precision, dtype)
      return jax.lax.dynamic_update_slice_in_dim(out, product, row, 0)

    return (_over_tiles(out, start, start + size, M, step), start + size), None

  out = jnp.zeros((padded.shape[0], weights.shape[2]), dtype)
  (out, end), _ = jax.lax.scan(group, (out, jnp.zeros((), sizes.dtype)), (weights, sizes))
  return jax.lax.dynamic_update_slice_in_dim(out, jnp.zeros((_TILES[-1], out.shape[1]), out.dtype), end, 0)[:M]


def _dot(x: jax.Array, y: jax.Array, precision: str, dtype: Any) -> jax.Array:
  """As `jnp.dot`, which would convert operands of two formats to one."""
  return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=dtype)


def _tiled_weights_gradient(x: jax.Array, grad: jax.Array, sizes: jax.Array, precision: str, dtype: Any) -> jax.Array:
  M = x.shape[0]
  x, grad = (jnp.pad(a, ((0, _TILES[-1]), (0, 0))) for a in (x, grad))

  def group(start: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    end = start + size

    def step(T: int, row: jax.Array, total: jax.Array) -> jax.Array:
      rows, grads = (jax.lax.dynamic_slice_in_dim(a, row, T) for a in (x, grad))
      rows = jnp.where((row + jnp.arange(T) < end)[:, None], rows, 0)
      return total + _dot(rows.T, grads, precision, dtype).astype(jnp.float32)

    return end, _over_tiles(jnp.zeros((x.shape[1], grad.shape[1]), jnp.float32), start, end, M, step)

  return jax.lax.scan(group, jnp.zeros((), sizes.dtype), sizes)[1]


def _whole_tiles(x: jax.Array, weight: tuple[int, ...], tiles: Tiles) -> tuple[jax.Array, tuple[int, int, int], int]:
  """Rows padded to whole tiles, the tiles reduced to the dimensions, and the number of rows before padding."""
  M = x.shape[0]
  rows = min(tiles.rows, -(-M // 128) * 128)
  tiling = (rows, min(tiles.inputs, weight[0]), min(tiles.outputs, weight[1]))
  return jnp.pad(x, ((0, -M % rows), (0, 0))), tiling, M


def _with_rest(sizes: jax.Array, rows: int) -> jax.Array:
  """The sizes with one more group, which has no weight, for the rows after the last group."""
  return jnp.concatenate([sizes, rows - sizes.sum(keepdims=True)]).astype(jnp.int32)
