"""Every grouped product equals the plain one, in values and in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.grouped_matmul import GroupedMatmul, Tiles, reference

M, I, O = 300, 40, 56
# Rows of each group: uneven with an empty one, all rows in one, and groups that end before the rows do.
SIZES = {"uneven": [70, 0, 130, 100], "one": [0, 300, 0, 0], "rest": [17, 33, 0, 90], "none": [0, 0, 0, 0]}
SMALL = Tiles(128, 128, 128)
KERNELS = {
  "ragged_dot": GroupedMatmul("ragged_dot"),
  "ragged_dot, weights by megablox": GroupedMatmul("ragged_dot", "megablox", interpret=True),
  "tiled": GroupedMatmul("tiled"),
  "megablox": GroupedMatmul(
    "megablox", forward=SMALL, by_rows=Tiles(128, 256, 128), by_weights=Tiles(256, 128, 128), interpret=True
  ),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_equals_the_reference(kernel):
  rng = np.random.default_rng(0)
  x, w, probe = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((M, I), (4, I, O), (M, O)))

  @jax.jit
  def run(x, w, sizes):
    return tuple(
      (product(x, w, sizes), *jax.grad(lambda x, w, p=product: (p(x, w, sizes) * probe).sum(), (0, 1))(x, w))
      for product in (kernel, reference)
    )

  for name, sizes in SIZES.items():
    for ours, plain in zip(*run(x, w, jnp.asarray(sizes, jnp.int32)), strict=True):
      np.testing.assert_allclose(ours, plain, atol=1e-4, rtol=1e-5, err_msg=name)


def test_tiled_multiplies_each_row_once():
  """What XLA counts for the loop's largest tile shows that a tile meets one group's weight, not all of them."""
  x, w, sizes = jnp.zeros((M, I)), jnp.zeros((4, I, O)), jnp.zeros(4, jnp.int32)
  dots = [line for line in jax.jit(GroupedMatmul("tiled")).lower(x, w, sizes).as_text().splitlines() if "dot_" in line]
  assert dots
  assert all(f"<{I}x{O}xf32>" in line for line in dots)
