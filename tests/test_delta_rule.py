"""The delta rule in chunks is the delta rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.delta_rule import chunked, recurrent

B, S, H, K, V = 2, 37, 3, 8, 5


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)
  q, k, v, state, probe = (
    jnp.asarray(rng.standard_normal(s), jnp.float32)
    for s in ((B, S, H, K), (B, S, H, K), (B, S, H, V), (B, H, K, V), (B, S, H, V))
  )
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  g = -jnp.asarray(rng.exponential(1.0, (B, S, H)), jnp.float32)
  g = g.at[0, 20].set(-200.0)  # forgets everything: its exponential is zero
  beta = jnp.asarray(rng.uniform(0, 1, (B, S, H)), jnp.float32)
  return (q, k, v, g, beta, state), probe


def begins(*first):
  where = np.zeros((B, S), bool)
  for row, place in first:
    where[row, place] = True
  return jnp.asarray(where)


# None; at the start, within a chunk twice, at the start of a chunk, at the very end.
DOCUMENTS = {"one": begins(), "several": begins((0, 0), (0, 3), (0, 5), (1, 16), (1, 36))}


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_chunked_equals_recurrent(arrays, documents, size):
  inputs, probe = arrays

  def run(rule):
    def value(q, k, v, g, beta, state):
      out, last = rule(q, k, v, g, beta, DOCUMENTS[documents], state)
      return (out * probe).sum() + (last**2).sum(), (out, last)

    return jax.jit(jax.grad(value, argnums=range(6), has_aux=True))(*inputs)

  found, expected = run(lambda *a: chunked(*a, size=size)), run(recurrent)
  for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert jnp.isfinite(ours).all()
    np.testing.assert_allclose(ours, plain, atol=1e-4 * max(1.0, float(jnp.abs(plain).max())), rtol=0)


def test_a_document_does_not_see_the_one_before(arrays):
  (q, k, v, g, beta, state), _ = arrays
  first = begins((0, 10), (1, 10))
  out, last = chunked(q, k, v, g, beta, first, state, size=16)
  alone, alone_last = recurrent(*(a[:, 10:] for a in (q, k, v, g, beta, first)), jnp.zeros_like(state))
  np.testing.assert_allclose(out[:, 10:], alone, atol=1e-4)
  np.testing.assert_allclose(last, alone_last, atol=1e-4)
