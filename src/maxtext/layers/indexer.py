"""The indexer of sparse attention: a small scorer that selects the keys each query attends to.

Shapes: B batch, S queries, T keys, E width, H its heads, D its head dim, L width of the queries' latent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import xlogy

from maxtext.kernels.attention import mean_weights
from maxtext.kernels.attention_inputs import AttentionInputs
from maxtext.kernels.attention_mask import MASKED, ScoreSpec, Tokens
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.matmul import matmul
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.rope import RotaryEmbedding, rotate


@dataclass(frozen=True)
class Indexer:
  """Keys are scored by a weighted sum over heads of relu(query key), and the `count` best are selected.

  Attributes:
    rope: of the first dimensions of its queries and keys.
    loss_weight: of the loss that trains it (`KeyIndexer.loss`); 0 is no such loss.
    sparse_training: with that loss, attention is over the selected keys. False is the dense warm-up: attention is over
      all keys, and so is the loss.
  """

  heads: int
  head_dim: int
  count: int
  rope: RotaryEmbedding
  loss_weight: float = 0.0
  sparse_training: bool = False

  @property
  def selects(self) -> bool:
    """Whether attention is over the selected keys."""
    return not self.loss_weight or self.sparse_training

  def build(self, factory: ParamFactory, width: int, latent: int, execution: ExecutionConfig) -> "KeyIndexer":
    """The layer."""
    return KeyIndexer(factory, self, width, latent, execution)


class KeyIndexer(nnx.Module):
  """(x, latent of queries, context, keys) to which keys are selected; no gradient flows through the selection."""

  def __init__(self, factory: ParamFactory, spec: Indexer, width: int, latent: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution, self.site = spec, execution, Site(factory.module_path, "indexer_scores")
    heads = {"heads": spec.heads}
    self.query = Linear(
      factory.scope("query"), {"latent": latent}, {**heads, "head_dim": spec.head_dim}, execution, "indexer_query_proj"
    )
    self.key = Linear(
      factory.scope("key"), {"embed": width}, {"latent_out": spec.head_dim}, execution, "indexer_key_proj"
    )
    self.key_norm = LayerNormSpec(1e-6).build(factory.scope("key_norm"), spec.head_dim)
    self.weights = Linear(factory.scope("weights"), {"embed": width}, heads, execution, "indexer_weights")

  def keys(self, x: jax.Array, context: Context) -> jax.Array:
    """Keys [B,S,D] of tokens."""
    key = self.key_norm(self.key(x))[:, :, None]
    return rotate(key, context.table(self.spec.rope), self.spec.rope.interleaved)[:, :, 0]

  def queries(self, x: jax.Array, latent: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
    """Queries [B,S,H,D] of tokens, and the weights of their heads [B,S,H] in float32."""
    spec = self.spec
    q = rotate(self.query(latent), context.table(spec.rope), spec.rope.interleaved)
    return q, self.weights(x).astype(jnp.float32) * spec.heads**-0.5

  def scores(self, queries: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores [B,S,T] of all keys, masked or not, in float32."""
    call = MatmulCall(self.site, "bshd,btd->bsht", jnp.float32, self.execution.numerics.precision)
    products = matmul(self.execution.matmul, {}, call, queries, keys)
    return jnp.einsum("bsh,bsht->bst", weights, jax.nn.relu(products * self.spec.head_dim**-0.5))

  def __call__(
    self, x: jax.Array, latent: jax.Array, context: Context, keys: jax.Array, positions: jax.Array, rows: int = 512
  ) -> jax.Array:
    """Whether each key [B,T,D], at its position [B,T], is selected, [B,1,S,T].

    `rows` queries are scored at a time, if they divide S, so that no array holds the scores of all heads. They are
    dealt in a round-robin, so that devices that split the queries have a part of each chunk.
    """
    keys = jax.lax.stop_gradient(keys)
    S, T = x.shape[1], keys.shape[1]
    chunks = S // rows if S % rows == 0 else 1

    def deal(a: jax.Array) -> jax.Array:
      return jnp.moveaxis(a.reshape(a.shape[0], S // chunks, chunks, *a.shape[2:]), 2, 0)

    def select(own: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
      queries, weights, places, segments = own
      visible = places[:, :, None] >= positions[:, None, :]
      if segments is not None and context.segments is not None:
        visible &= segments[:, :, None] == context.segments[:, None, :]
      scores = jnp.where(visible, self.scores(queries, weights, keys), -jnp.inf)
      return visible & among_best(scores, min(self.spec.count, T))

    queries = jax.lax.stop_gradient(self.queries(x, latent, context))
    own = (*queries, context.positions, context.segments)
    found = jax.lax.map(select, jax.tree.map(deal, own)) if chunks > 1 else select(own)[None]
    return jnp.moveaxis(found, 0, 2).reshape(-1, 1, S, T)

  def loss(
    self,
    x: jax.Array,
    latent: jax.Array,
    context: Context,
    keys: jax.Array,
    attention: AttentionInputs,
    scoring: ScoreSpec,
    chunks: int = 8,
  ) -> jax.Array:
    """The loss that trains the indexer, a number: how far its scores are from what attention looks at.

    It is `loss_weight` times the mean over tokens of KL(p || softmax(scores)), where p is the mean of the heads'
    attention weights. Both are over the keys that attention sees. No gradient flows to anything but the indexer, if
    `keys` depend on nothing else. One chunk of queries is processed at a time, and again in the backward pass.
    """
    q, k, _, tokens, _, selected = jax.lax.stop_gradient(attention)
    own = self.queries(*jax.lax.stop_gradient((x, latent)), context)
    S = x.shape[1]
    size = max(128, -(-S // chunks))

    def divergence(
      own: tuple[jax.Array, jax.Array],
      keys: jax.Array,
      q: jax.Array,
      k: jax.Array,
      here: Tokens,
      there: Tokens,
      selected: jax.Array | None,
    ) -> jax.Array:
      weights, visible = mean_weights(q, k, here, there, scoring, self.execution.numerics.precision, selected)
      scores = jax.nn.log_softmax(jnp.where(visible, self.scores(*own, keys), MASKED), axis=-1)
      return jnp.where(visible, xlogy(weights, weights) - weights * scores, 0.0).sum(-1)

    one: Callable[..., jax.Array] = jax.checkpoint(divergence) if size < S else divergence
    found = []
    for start in range(0, S, size):
      end = min(start + size, S)  # keys after a chunk are not visible
      mine = own[0][:, start:end], own[1][:, start:end]
      chosen = None if selected is None else selected[:, :, start:end, :end]
      here, there = tokens.part(start, end), tokens.part(0, end)
      found.append(one(mine, keys[:, :end], q[:, start:end], k[:, :end], here, there, chosen))
    divergences = jnp.concatenate(found, axis=1)
    real = jnp.ones_like(divergences) if context.real is None else context.real
    return self.spec.loss_weight * jnp.where(real, divergences, 0.0).sum() / jnp.maximum(real.sum(), 1)


def among_best(scores: jax.Array, count: int) -> jax.Array:
  """Whether each element is among the `count` largest of its last dimension; of equal ones, the first win."""
  best = jax.lax.top_k(scores, count)[1]
  flat = jnp.zeros((scores.size // scores.shape[-1], scores.shape[-1]), bool)
  rows = jnp.arange(flat.shape[0])[:, None]
  return flat.at[rows, best.reshape(flat.shape[0], count)].set(True).reshape(scores.shape)
