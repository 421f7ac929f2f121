"""Attention: softmax(q k^T) v, causal or not, with windows or chunks, segments, spans, a soft cap on logits and sinks.

`reference` is the plain implementation, which tests compare the others with; `AttentionKernel` dispatches to one of
them.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D head dim.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding, match_kv_heads
from maxtext.kernels.attention_mask import MASKED, ScoreSpec, Tokens, gathered, scores
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.kernels.online_softmax import OnlineSoftmax
from maxtext.kernels.ring_attention import ring
from maxtext.kernels.splash_attention import SplashBlocks, splash
from maxtext.mesh.explicit import auto_axes
from maxtext.mesh.rules import mesh_axes_of, num_shards_of

Kernel = Literal["dot_product", "chunked", "splash", "cudnn"]

# The checkpoint name of the output, by which a remat policy may save it.
RESULT = "context"


@dataclass(frozen=True)
class AttentionKernel:
  """Self-attention of whole sequences, by one of the kernels.

  Attributes:
    ring: where rows are sharded along the sequence, use ring attention; otherwise keys are all-gathered.
    order: the order of the tokens of a row; None is that of the text.
    interpret: run Pallas kernels as plain operations, to test them without a TPU.
  """

  kernel: Kernel = "dot_product"
  precision: str = "default"
  blocks: SplashBlocks = field(default_factory=SplashBlocks)
  ring: bool = False
  order: LoadBalancedOrder | None = None
  interpret: bool = False

  def __call__(
    self,
    inputs: AttentionInputs,
    scoring: ScoreSpec,
    sharding: AttentionSharding,
    matmuls: AttentionMatmuls = PLAIN,
  ) -> jax.Array:
    """The output [B,S,H,D].

    Tokens of a segment must be in the order of their positions, since kernels take the causal mask from the order of
    tokens; with `order`, they must be in that order instead. Inputs with selected keys are computed by `chunked`,
    whatever the kernel, because the others skip whole blocks of keys only. The splash and cuDNN kernels do not support
    spans, and do not call `matmuls`.
    """
    assert matmuls == PLAIN or not self.fused, "checked when the layer is built"
    if inputs.tokens.spans is not None and self.kernel in ("splash", "cudnn"):
      raise ValueError(f"spans are not supported by the {self.kernel} kernel: write attention=chunked or dot_product.")
    if inputs.selected is not None:
      assert inputs.tokens.spans is None, "checked by the decoder"
      assert self.order is None, "checked when the model is built"
      return checkpoint_name(_on_whole_rows(chunked, inputs, scoring, self.precision, matmuls), RESULT)
    if self.kernel == "splash":
      return splash(inputs, scoring, sharding, self.blocks, self.order, result=RESULT, interpret=self.interpret)
    if self.kernel == "cudnn":
      out = auto_axes(lambda inputs: _cudnn(inputs, scoring), sharding.output, inputs)
    elif sharding.q_spec[1]:
      out = self._context_parallel(inputs, scoring, sharding, matmuls)
    else:
      plain: Callable[..., jax.Array] = chunked if self.kernel == "chunked" else reference
      run = partial(_on_whole_rows, plain, scoring=scoring, precision=self.precision, matmuls=matmuls)
      out = auto_axes(lambda inputs: run(inputs), sharding.output, inputs)
    return checkpoint_name(out, RESULT)

  @property
  def fused(self) -> bool:
    """Whether the kernel is one program that does its own matmuls."""
    return self.kernel in ("splash", "cudnn")

  def _context_parallel(
    self, inputs: AttentionInputs, scoring: ScoreSpec, sharding: AttentionSharding, matmuls: AttentionMatmuls
  ) -> jax.Array:
    """Attention of rows that are sharded along the sequence: a device has its queries, and gets the keys of the whole
    row by an all-gather, or those of one device at a time in a ring."""
    inputs, sharding = match_kv_heads(inputs, sharding)
    mesh, axes = sharding.mesh, mesh_axes_of(sharding.q_spec[1])
    attend: Callable[..., jax.Array] = partial(chunked, ordered=False) if self.kernel == "chunked" else reference

    def local(inputs: AttentionInputs) -> jax.Array:
      if self.ring:
        return ring(inputs, scoring, self.precision, axes=axes, shards=num_shards_of(mesh, axes), matmuls=matmuls)
      q, *kv, tokens, sinks, _ = inputs
      k, v, keys = gathered((*kv, tokens), axes, None)
      return attend(q, k, v, tokens, keys, scoring, sinks, self.precision, matmuls=matmuls)

    specs, out_specs = sharding.partition(inputs), sharding.q_spec
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(inputs)


def _on_whole_rows(
  attend: Callable[..., jax.Array],
  inputs: AttentionInputs,
  scoring: ScoreSpec,
  precision: str,
  matmuls: AttentionMatmuls,
) -> jax.Array:
  """`reference` or `chunked` on inputs whose queries and keys are the same tokens."""
  q, k, v, tokens, sinks, selected = inputs
  return attend(q, k, v, tokens, tokens, scoring, sinks, precision, selected=selected, matmuls=matmuls)


def reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  selected: jax.Array | None = None,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """The plain implementation: a key is visible if `ScoreSpec.sees` it, it is of the same segment, and it is selected.

  Args:
    sinks: [H] a logit per head that takes part in the softmax and has no value.
    selected: [B,1 or H,S,T] whether a query may see a key.
  """
  B, S, H, _ = q.shape
  logits = scores(q, k, queries, keys, scoring, precision, selected, matmuls)
  if sinks is not None:
    column = sinks.astype(jnp.float32).reshape(1, *logits.shape[1:3], 1, 1)
    logits = jnp.concatenate([logits, jnp.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
  weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
  return matmuls.values("bkgst,btkd->bskgd", weights, v, precision=precision).reshape(B, S, H, v.shape[-1])


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  chunks: int = 8,
  selected: jax.Array | None = None,
  ordered: bool = True,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """`reference` on one chunk of queries at a time, so that only one chunk's logits exist at once, in the backward pass
  too.

  Args:
    ordered: queries and keys are the same tokens in the order of their positions. Keys after a chunk are then not read,
      unless spans or bidirectional attention need them.
  """
  S = q.shape[1]
  bidirectional = not ordered or not scoring.causal or queries.spans is not None
  size = max(128, -(-S // chunks))
  attend = partial(reference, scoring=scoring, precision=precision, matmuls=matmuls)
  one: Callable[..., jax.Array] = jax.checkpoint(attend) if size < S else attend
  out = []
  for start in range(0, S, size):
    end = min(start + size, S)
    first, last = 0, k.shape[1] if bidirectional else end
    if ordered and scoring.causal and scoring.window is not None:
      first = max(0, start - scoring.window + 1)
    own = None if selected is None else selected[:, :, start:end, first:last]
    here, there = queries.part(start, end), keys.part(first, last)
    out.append(one(q[:, start:end], k[:, first:last], v[:, first:last], here, there, sinks=sinks, selected=own))
  return jnp.concatenate(out, axis=1)


def blockwise(
  q: jax.Array,
  read: Callable[[jax.Array], tuple[jax.Array, jax.Array, Tokens]],
  blocks: jax.Array,
  queries: Tokens,
  scoring: ScoreSpec,
  sinks: jax.Array | None = None,
  precision: str = "default",
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """`reference` over the first `blocks` blocks of keys and values, read one at a time by `read(block)`.

  A block of which a query sees no key leaves its output unchanged to the bit.
  """
  B, S, H, _ = q.shape
  _, values, _ = jax.eval_shape(read, jnp.zeros((), jnp.int32))
  K, D = values.shape[2:]

  def join(block: jax.Array, sums: OnlineSoftmax) -> OnlineSoftmax:
    k, v, keys = read(block)
    return sums.join(q, k, v, queries, keys, scoring, precision, matmuls)

  return jax.lax.fori_loop(0, blocks, join, OnlineSoftmax.empty((B, K, H // K, S), D, sinks)).mean.astype(values.dtype)


def largest_logits(
  q: jax.Array, k: jax.Array, tokens: Tokens, scoring: ScoreSpec, precision: str = "default", chunks: int = 8
) -> jax.Array:
  """The largest logit of each head [H], before any cap, over all queries and the keys they see; no gradient flows
  through it."""
  q, k = jax.lax.stop_gradient((q, k))
  uncapped = dataclasses.replace(scoring, cap=None)
  found = []
  S = q.shape[1]
  bidirectional = not scoring.causal or tokens.spans is not None
  size = -(-S // chunks)
  for start in range(0, S, size):
    end = min(start + size, S)
    last = S if bidirectional else end
    here, there = tokens.part(start, end), tokens.part(0, last)
    found.append(scores(q[:, start:end], k[:, :last], here, there, uncapped, precision).max((0, 3, 4)))
  return jnp.stack(found).max(0).reshape(q.shape[2])


def mean_weights(
  q: jax.Array,
  k: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  precision: str = "default",
  selected: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The attention weights as the mean over heads, [B,S,T] in float32, and which keys a query sees, [B,S,T]; all heads
  must see the same."""
  logits = scores(q, k, queries, keys, scoring, precision, selected)
  return jax.nn.softmax(logits, axis=-1).mean((1, 2)), logits[:, 0, 0] > MASKED


def _cudnn(inputs: AttentionInputs, scoring: ScoreSpec) -> jax.Array:
  assert inputs.sinks is None, "checked when the model is built"
  assert scoring.cap is None, "checked when the model is built"
  assert not scoring.chunked, "checked when the model is built"
  (q, k, v, *_), segments = inputs, inputs.tokens.segments
  mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
  local = None if scoring.window is None else (scoring.window - 1, 0 if scoring.causal else scoring.window - 1)
  return jax.nn.dot_product_attention(
    q, k, v, mask=mask, scale=scoring.scale, is_causal=scoring.causal, local_window_size=local, implementation="cudnn"
  )
