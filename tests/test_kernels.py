"""Every fast path equals its plain reference, in values and in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import Attention, SplashBlocks, Tokens, chunked, reference
from maxtext.kernels.cross_entropy import cross_entropy, tiled_cross_entropy
from maxtext.mesh.devices import make_mesh
from tests.support import tiny

B, S, H, K, D = 2, 256, 4, 2, 32
SCALE = D**-0.5


def draw(seed: int, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def qkv():
  return draw(0, B, S, H, D), draw(1, B, S, K, D), draw(2, B, S, K, D)


@pytest.fixture(scope="module")
def packed():
  """Positions and segments of rows that hold several documents."""
  segments = np.ones((B, S), np.int32)
  segments[0, 70:200], segments[0, 200:], segments[1, 129:] = 2, 3, 2
  start = np.zeros_like(segments)
  for row in range(B):
    for s in range(1, S):
      start[row, s] = start[row, s - 1] if segments[row, s] == segments[row, s - 1] else s
  return Tokens(jnp.asarray(np.arange(S) - start), jnp.asarray(segments))


UNPACKED = Tokens(np.broadcast_to(np.arange(S), (B, S)))


def gradients(attend, qkv):
  probe = draw(3, B, S, H, D)
  return jax.jit(jax.value_and_grad(lambda q, k, v: (attend(q, k, v) * probe).sum(), (0, 1, 2)))(*qkv)


def check(attend, plain, qkv, tolerance):
  (value, grads), (expected, expected_grads) = gradients(attend, qkv), gradients(plain, qkv)
  np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance * 100)
  for grad, other in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(grad, other, atol=tolerance * float(jnp.abs(other).max()), rtol=0)


CASES = [(None, False), (None, True), (40, False), (40, True)]


@pytest.mark.parametrize(("window", "segmented"), CASES)
def test_chunked_attention(qkv, packed, window, segmented):
  tokens = packed if segmented else UNPACKED
  check(
    lambda q, k, v: chunked(q, k, v, tokens, SCALE, window, chunks=2),
    lambda q, k, v: reference(q, k, v, tokens, tokens, SCALE, window),
    qkv,
    1e-5,
  )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("window", "segmented"), CASES)
def test_splash_attention(packed, window, segmented, fused):
  """On two by two devices, with as many key heads as fit (K=2) and too few to split (K=1)."""
  tokens = packed if segmented else UNPACKED
  config = tiny(ici_data_parallelism=2, ici_fsdp_parallelism=1, ici_tensor_parallelism=2)
  mesh = make_mesh(config, jax.devices()[:4])
  P = jax.sharding.PartitionSpec
  attention = Attention("splash", blocks=SplashBlocks(*(128,) * 8, fused_backward=fused), interpret=True)
  for kv_heads in (2, 1) if fused else (2,):
    qkv = draw(0, B, S, H, 128), draw(1, B, S, kv_heads, 128), draw(2, B, S, kv_heads, 128)
    where = {
      "mesh": mesh,
      "q_spec": P("data", None, "tensor", None),
      "kv_spec": P("data", None, "tensor" if kv_heads == 2 else None, None),
    }
    probe = draw(3, B, S, H, 128)

    def run(attend, qkv=qkv, probe=probe):
      return jax.jit(jax.value_and_grad(lambda q, k, v: (attend(q, k, v) * probe).sum(), (0, 1, 2)))(*qkv)

    value, grads = run(lambda q, k, v, where=where: attention(q, k, v, tokens, SCALE, window, **where))
    expected, others = run(lambda q, k, v: reference(q, k, v, tokens, tokens, SCALE, window))
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-3)
    for grad, other in zip(grads, others, strict=True):
      np.testing.assert_allclose(grad, other, atol=2e-5 * float(jnp.abs(other).max()), rtol=0)


def test_cross_entropy_by_hand():
  logits, targets = draw(0, 2, 4, 8), jnp.arange(8).reshape(2, 4)
  log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
  gold = np.take_along_axis(np.asarray(logits), np.asarray(targets)[..., None], -1)[..., 0]
  np.testing.assert_allclose(cross_entropy(logits, targets, 0.5), log_z - gold + 0.5 * log_z**2, rtol=1e-6)


def test_tiled_cross_entropy_never_holds_all_logits():
  V, E = 512, 16
  hidden, head, targets = draw(0, 2, 64, E), draw(1, E, V), jnp.asarray(np.arange(128).reshape(2, 64))

  def run(tiles):
    def loss(h, w):
      return tiled_cross_entropy(h, lambda x: x @ w, targets, 1e-2, tiles).sum()

    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, head)
    return lowered.compile()(hidden, head), lowered.as_text()

  (whole, whole_grads), text = run(1)
  assert "2x64x512xf32" in text
  (tiled, tiled_grads), text = run(4)
  assert "2x64x512xf32" not in text
  np.testing.assert_allclose(tiled, whole, rtol=1e-6)
  for a, b in zip(tiled_grads, whole_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
