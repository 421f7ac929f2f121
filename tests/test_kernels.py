"""Every fast path equals its plain reference, in values and in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxtext.kernels.attention import AttentionKernel, blockwise, chunked, reference
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.cross_entropy import cross_entropy, tiled_cross_entropy
from maxtext.kernels.decode_attention import step
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.kernels.splash_attention import SplashBlocks
from maxtext.mesh.devices import make_mesh
from tests.support import tiny

B, S, H, K, D = 2, 256, 4, 2, 32
SCALE = D**-0.5


def draw(seed: int, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def qkv():
  return draw(0, B, S, H, D), draw(1, B, S, K, D), draw(2, B, S, K, D)


STEPS = {
  "plain": ({}, None, (5, 41)),
  "capped, with sinks": ({"cap": 2.0}, draw(3, H), (5, 41)),
  "a window that has come round": ({"window": 40}, None, (30, 131)),
  "a chunk": ({"window": 48, "chunked": True}, draw(3, H), (47, 100)),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_over_a_cache_equals_the_reference(case):
  """It writes one place of one layer, and reads nothing that the row has not come to, in three blocks."""
  R, T, wide = 3, 48, 128
  changes, sinks, last = STEPS[case]
  mesh, cached = make_mesh(tiny(), jax.devices()[:1]), PartitionSpec(None, None, None)
  q, new = draw(0, B, H, wide), (draw(1, B, K, wide), draw(2, B, K, wide))
  positions, scoring = jnp.array(last), ScoreSpec(wide**-0.5, **changes)
  held = positions[:, None] - (positions[:, None] - jnp.arange(T)) % T
  never = (held < 0)[:, None, :, None]
  cache = tuple(jnp.where(never, jnp.nan if i == 0 else 0.0, draw(4 + i, R, B, K, T, wide)) for i in range(2))
  out, found = step(
    q, new, cache, jnp.int32(1), positions, scoring, sinks, mesh=mesh, cache_spec=cached, most=16, interpret=True
  )
  expected = [c.at[1, jnp.arange(B), :, positions % T].set(n) for c, n in zip(cache, new, strict=True)]
  jax.tree.map(np.testing.assert_array_equal, list(found), expected)
  keys, values = (c[1].swapaxes(1, 2) for c in expected)
  where = Tokens(jnp.where(held < 0, 2**30, held))
  plain = reference(q[:, None], keys, values, Tokens(positions[:, None]), where, scoring, sinks)
  np.testing.assert_allclose(out, plain[:, 0], atol=1e-5, rtol=0)


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


SINKS = draw(4, H)
CASES = {
  "causal": (ScoreSpec(SCALE), None),
  "window": (ScoreSpec(SCALE, 40), None),
  "chunk": (ScoreSpec(SCALE, 40, chunked=True), None),
  "cap": (ScoreSpec(SCALE, cap=0.5), None),
  "sinks": (ScoreSpec(SCALE, 40), SINKS),
}
every_case = pytest.mark.parametrize(("scoring", "sinks"), CASES.values(), ids=CASES.keys())


@every_case
@pytest.mark.parametrize("segmented", [pytest.param(False, marks=pytest.mark.slow), True])
def test_chunked_attention(qkv, packed, scoring, sinks, segmented):
  tokens = packed if segmented else UNPACKED
  check(
    lambda q, k, v: chunked(q, k, v, tokens, tokens, scoring, sinks, chunks=2),
    lambda q, k, v: reference(q, k, v, tokens, tokens, scoring, sinks),
    qkv,
    1e-5,
  )


def test_reference_attention_by_hand(qkv):
  """Caps, chunks and sinks, in plain numpy."""
  q, k, v = (np.asarray(x[:1, :6], np.float64) for x in qkv)
  scoring = ScoreSpec(0.3, 4, chunked=True, cap=0.5)
  found = reference(*(x[:1, :6] for x in qkv), *(Tokens(UNPACKED.positions[:1, :6]),) * 2, scoring, SINKS)
  for h in range(H):
    for s in range(6):
      seen = range(s // 4 * 4, s + 1)
      logits = np.array([0.5 * np.tanh(0.3 * q[0, s, h] @ k[0, t, h // 2] / 0.5) for t in seen])
      weights = np.exp(logits) / (np.exp(logits).sum() + np.exp(float(SINKS[h])))
      np.testing.assert_allclose(found[0, s, h], weights @ v[0, list(seen), h // 2], rtol=2e-5, atol=1e-6)


def on_devices(kernel, qkv, tokens, scoring, sinks, **options):
  """On two by two devices; value and gradients, those of the sinks too."""
  config = tiny(ici_data_parallelism=2, ici_fsdp_parallelism=1, ici_tensor_parallelism=2)
  mesh = make_mesh(config, jax.devices()[:4])
  P = jax.sharding.PartitionSpec
  kv = P("data", None, "tensor" if qkv[1].shape[2] == 2 else None, None)
  sharding = AttentionSharding(mesh, P("data", None, "tensor", None), kv)
  attention, probe = AttentionKernel(kernel, **options), draw(3, *qkv[0].shape)

  def loss(qkv, sinks):
    return (attention(AttentionInputs(*qkv, tokens, sinks), scoring, sharding) * probe).sum()

  return jax.jit(jax.value_and_grad(loss, (0, 1) if sinks is not None else (0,)))(qkv, sinks)


@pytest.mark.parametrize(
  ("case", "segmented", "fused", "kv_heads"),
  [
    pytest.param(case, segmented, segmented, 2, marks=[pytest.mark.slow] * (case != "sinks" or not segmented))
    for case in CASES
    for segmented in (False, True)
  ]
  + [("window", True, True, 1)],
)
def test_splash_attention(packed, case, segmented, fused, kv_heads):
  """With as many key heads as can be split like the query heads, and with too few."""
  scoring, sinks = CASES[case]
  tokens = packed if segmented else UNPACKED
  qkv = draw(0, B, S, H, 128), draw(1, B, S, kv_heads, 128), draw(2, B, S, kv_heads, 128)
  blocks = SplashBlocks(*(128,) * 8, fused_backward=fused)
  value, grads = on_devices("splash", qkv, tokens, scoring, sinks, blocks=blocks, interpret=True)
  expected, others = on_devices("dot_product", qkv, tokens, scoring, sinks)
  np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-3)
  for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
    np.testing.assert_allclose(grad, other, atol=2e-5 * float(jnp.abs(other).max()), rtol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_layouts_of_splash_attention(packed, fused):
  """They say how operands are stored, and change nothing else."""
  scoring, sinks = CASES["sinks"]
  qkv = draw(0, B, S, H, 128), draw(1, B, S, 2, 128), draw(2, B, S, 2, 128)
  other = ("SEQ_MINOR", "SEQ_MINOR", "HEAD_DIM_MINOR") if fused else ("SEQ_MINOR", "HEAD_DIM_MINOR", "SEQ_MINOR")
  plain, found = (
    on_devices("splash", qkv, packed, scoring, sinks, interpret=True,
               blocks=SplashBlocks(*(128,) * 8, fused_backward=fused, layouts=layouts))
    for layouts in (("HEAD_DIM_MINOR",) * 3, other)
  )  # fmt: skip
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6 * float(jnp.abs(two).max()))


SPLIT = {
  "gathered": ("chunked", {}),
  "gathered, striped": ("dot_product", {"order": LoadBalancedOrder("striped", 4)}),
  "ring": ("chunked", {"ring": True}),
  "ring, chunks swapped": ("dot_product", {"ring": True, "order": LoadBalancedOrder("dual_chunk_swap", 4)}),
  "splash": ("splash", {"blocks": SplashBlocks(*(128,) * 8), "interpret": True}),
  "splash, chunks swapped": (
    "splash",
    {"blocks": SplashBlocks(*(128,) * 8), "interpret": True, "order": LoadBalancedOrder("dual_chunk_swap", 4)},
  ),
}


@pytest.mark.parametrize(
  ("case", "kernel", "options"),
  [
    pytest.param(case, *split, id=f"{case}, {name}", marks=[pytest.mark.slow] * (case != "sinks"))
    for name, split in SPLIT.items()
    for case in CASES
    if split[0] != "splash" or case in ("causal", "sinks")
  ],
)
def test_rows_split_over_devices(packed, case, kernel, options):
  """Four devices hold a part of each row; in whatever order the tokens stand, the result is that of whole rows."""
  (scoring, sinks), length = CASES[case], 4 * 128 if kernel == "splash" else S
  mesh = make_mesh(tiny(ici_tensor_parallelism=2, ici_fsdp_parallelism=4), jax.devices()[:8])
  spec = jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)
  copies = [Tokens(packed.positions, packed.segments + 3 * copy) for copy in range(length // S)]
  tokens = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *copies)
  qkv = draw(0, B, length, H, 128), draw(1, B, length, K, 128), draw(2, B, length, K, 128)
  probe, attention = draw(3, *qkv[0].shape), AttentionKernel(kernel, **options)
  order = attention.order or LoadBalancedOrder("striped", 1)

  def loss(qkv, sinks):
    ordered = jax.tree.map(order.apply, (*qkv, tokens))
    out = attention(AttentionInputs(*ordered, sinks), scoring, AttentionSharding(mesh, spec, spec))
    return (order.undo(out) * probe).sum()

  def plain(qkv, sinks):
    return (reference(*qkv, tokens, tokens, scoring, sinks) * probe).sum()

  wanted = (0, 1) if sinks is not None else (0,)
  (value, grads), (expected, others) = (jax.jit(jax.value_and_grad(f, wanted))(qkv, sinks) for f in (loss, plain))
  np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-3)
  for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
    np.testing.assert_allclose(grad, other, atol=2e-5 * float(jnp.abs(other).max()), rtol=0)


@pytest.mark.mesh
def test_parts_of_keys_add_up_in_float32():
  """Of bfloat16, in 8 parts round a ring or in 16 blocks: no further from the truth than all keys at once."""
  mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
  q, k, v = (a.astype(jnp.bfloat16) for a in (draw(0, 1, 1024, H, D), draw(1, 1, 1024, K, D), draw(2, 1, 1024, K, D)))
  tokens, scoring = Tokens(jnp.arange(1024)[None]), ScoreSpec(SCALE)
  exact = reference(*(a.astype(jnp.float32) for a in (q, k, v)), tokens, tokens, scoring, precision="highest")
  spec = PartitionSpec(None, "context", None, None)
  split = AttentionKernel("chunked", ring=True)

  def read(block):
    keys, values = (jax.lax.dynamic_slice_in_dim(a, block * 64, 64, 1) for a in (k, v))
    return keys, values, Tokens(block * 64 + jnp.arange(64)[None])

  def unrounded(found):
    return np.abs(np.asarray(found, np.float32) - np.asarray(exact))[:, 512:].mean()

  once = unrounded(reference(q, k, v, tokens, tokens, scoring))
  ring = unrounded(
    jax.jit(lambda: split(AttentionInputs(q, k, v, tokens), scoring, AttentionSharding(mesh, spec, spec)))()
  )
  blocks = unrounded(jax.jit(lambda: blockwise(q, read, jnp.int32(16), tokens, scoring))())
  print(f"errors over that of all keys at once: ring {ring / once:.3f}, blocks {blocks / once:.3f}")
  assert max(ring, blocks) < 1.05 * once


def test_cross_entropy_by_hand():
  logits, targets = draw(0, 2, 4, 8), jnp.arange(8).reshape(2, 4)
  log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
  gold = np.take_along_axis(np.asarray(logits), np.asarray(targets)[..., None], -1)[..., 0]
  np.testing.assert_allclose(cross_entropy(logits, targets, 0.5), log_z - gold + 0.5 * log_z**2, rtol=1e-6)


def test_cross_entropy_of_rounded_logits_is_summed_in_float32():
  logits = (8 * draw(0, 2, 64, 4096)).astype(jnp.bfloat16)
  targets = jnp.arange(128).reshape(2, 64)
  exact = np.asarray(logits, np.float64)
  log_z = np.log(np.exp(exact - 40).sum(-1)) + 40
  gold = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
  np.testing.assert_allclose(cross_entropy(logits, targets, 0.0), log_z - gold, rtol=1e-5)


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
