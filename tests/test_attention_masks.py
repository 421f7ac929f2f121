"""Who sees whom: spans that are seen both ways, and encoders, in every kernel, against masks written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxtext.kernels.attention import AttentionKernel, chunked, largest_logits, reference
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.kernels.splash_attention import SplashBlocks
from maxtext.mesh.devices import make_mesh
from tests.support import tiny

B, S, H, K, D = 2, 256, 4, 2, 16
SCALE = D**-0.5
CASES = {
  "spans": (ScoreSpec(SCALE), True),
  "spans in a window": (ScoreSpec(SCALE, 40), True),
  "spans across chunks": (ScoreSpec(SCALE, 48, chunked=True), True),
  "both ways": (ScoreSpec(SCALE, causal=False), False),
  "a window both ways": (ScoreSpec(SCALE, 40, causal=False), False),
  "chunks both ways": (ScoreSpec(SCALE, 48, chunked=True, causal=False), False),
}
every_case = pytest.mark.parametrize(("scoring", "spanned"), CASES.values(), ids=CASES.keys())


def draw(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tokens_of(spanned, segmented=True):
  """Two documents in a row, with spans that cross the chunks of queries and keys."""
  segments = np.ones((B, S), np.int32)
  segments[0, 70:], segments[1, 200:] = 2, 2
  starts = np.array([[0] * 70 + [70] * 186, [0] * 200 + [200] * 56])
  positions = np.arange(S, dtype=np.int32) - starts if segmented else np.broadcast_to(np.arange(S), (B, S))
  spans = np.zeros((B, S), np.int32)
  spans[0, 10:40], spans[0, 60:140], spans[0, 150:160], spans[1, 100:190], spans[1, 195:230] = 1, 2, 3, 1, 2
  return Tokens(positions.astype(np.int32), segments if segmented else None, spans if spanned else None)


def visible(tokens, scoring):
  """[B,S,T], one pair at a time."""
  found = np.zeros((B, S, S), bool)
  for b in range(B):
    for s in range(S):
      for t in range(S):
        q, k = int(tokens.positions[b, s]), int(tokens.positions[b, t])
        same_span = tokens.spans is not None and tokens.spans[b, s] == tokens.spans[b, t] != 0
        ahead = same_span or not scoring.causal
        if scoring.window is None:
          far = False
        elif scoring.chunked:
          chunk = q // scoring.window
          far = k < chunk * scoring.window or (not scoring.causal and k >= (chunk + 1) * scoring.window)
        else:
          far = q - k >= scoring.window or (not scoring.causal and k - q >= scoring.window)
        other = tokens.segments is not None and tokens.segments[b, s] != tokens.segments[b, t]
        found[b, s, t] = (k <= q or ahead) and not far and not other
  return found


def logits_by_hand(q, k, scoring):
  return np.einsum("bshd,bthd->bhst", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2)) * scoring.scale


def by_hand(q, k, v, tokens, scoring):
  logits = np.where(visible(tokens, scoring)[:, None], logits_by_hand(q, k, scoring), -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("bhst,bthd->bshd", weights, np.repeat(v, H // v.shape[2], axis=2))


@every_case
@pytest.mark.parametrize("segmented", [False, True])
def test_plain_and_chunked_attention_see_what_the_mask_says(scoring, spanned, segmented):
  tokens = tokens_of(spanned, segmented)
  q, k, v = draw(0, B, S, H, D), draw(1, B, S, K, D), draw(2, B, S, K, D)
  wanted = by_hand(q, k, v, tokens, scoring)
  np.testing.assert_allclose(reference(q, k, v, tokens, tokens, scoring), wanted, atol=1e-5)
  np.testing.assert_allclose(jax.jit(chunked, static_argnums=5)(q, k, v, tokens, tokens, scoring), wanted, atol=1e-5)
  seen = np.where(visible(tokens, scoring)[:, None], logits_by_hand(q, k, scoring), -np.inf).max((0, 2, 3))
  np.testing.assert_allclose(largest_logits(q, k, tokens, scoring), seen, rtol=1e-5)


SPLIT = {
  "gathered": {},
  "gathered, striped": {"order": LoadBalancedOrder("striped", 4)},
  "ring": {"ring": True},
  "ring, chunks swapped": {"ring": True, "order": LoadBalancedOrder("dual_chunk_swap", 4)},
}


@pytest.mark.parametrize("options", SPLIT.values(), ids=SPLIT.keys())
@pytest.mark.parametrize("case", ["spans", "spans in a window", "both ways"])
def test_rows_split_over_devices_see_the_same(case, options):
  scoring, spanned = CASES[case]
  tokens = tokens_of(spanned)
  q, k, v = draw(0, B, S, H, D), draw(1, B, S, K, D), draw(2, B, S, K, D)
  mesh = make_mesh(tiny(ici_tensor_parallelism=2, ici_fsdp_parallelism=4), jax.devices()[:8])
  spec = PartitionSpec(None, "fsdp", "tensor", None)
  attention = AttentionKernel("chunked", **options)
  order = attention.order or LoadBalancedOrder("striped", 1)

  @jax.jit
  def run(q, k, v, tokens):
    inputs = jax.tree.map(order.apply, AttentionInputs(q, k, v, tokens))
    return order.undo(attention(inputs, scoring, AttentionSharding(mesh, spec, spec)))

  np.testing.assert_allclose(run(q, k, v, tokens), by_hand(q, k, v, tokens, scoring), atol=1e-5)


@pytest.mark.parametrize("case", ["both ways", "a window both ways", "chunks both ways"])
def test_splash_sees_both_ways(case):
  scoring, _ = CASES[case]
  tokens = tokens_of(False, segmented=case != "a window both ways")  # a window is one of places, not of positions
  q, k, v = draw(0, B, S, H, 128), draw(1, B, S, K, 128), draw(2, B, S, K, 128)
  mesh, spec = make_mesh(tiny(), jax.devices()[:1]), PartitionSpec(None, None, None, None)
  attention = AttentionKernel("splash", blocks=SplashBlocks(*(128,) * 8), interpret=True)
  sharding = AttentionSharding(mesh, spec, spec)
  run = jax.jit(lambda q, k, v: attention(AttentionInputs(q, k, v, tokens), scoring, sharding))
  np.testing.assert_allclose(run(q, k, v), by_hand(q, k, v, tokens, scoring), atol=2e-5)


@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_kernels_without_spans_say_so(kernel):
  q, kv = jnp.zeros((B, S, H, D)), jnp.zeros((B, S, K, D))
  mesh, spec = make_mesh(tiny(), jax.devices()[:1]), PartitionSpec(None, None, None, None)
  inputs = AttentionInputs(q, kv, kv, tokens_of(True))
  with pytest.raises(ValueError, match=f"by the {kernel} kernel: write attention=chunked"):
    AttentionKernel(kernel)(inputs, ScoreSpec(SCALE), AttentionSharding(mesh, spec, spec))
