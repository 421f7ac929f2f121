"""The indexer of sparse attention: a small scorer that selects the keys each query attends to.

Shapes: B batch, S queries, T keys, E width, H its heads, D its head dim, L width of the queries' latent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

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
  """

  heads: int
  head_dim: int
  count: int
  rope: RotaryEmbedding

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

  def scores(self, x: jax.Array, latent: jax.Array, context: Context, keys: jax.Array) -> jax.Array:
    """Scores [B,S,T] of all keys, masked or not, in float32."""
    spec = self.spec
    q = rotate(self.query(latent), context.table(spec.rope), spec.rope.interleaved)
    call = MatmulCall(self.site, "bshd,btd->bsht", jnp.float32, self.execution.numerics.precision)
    products = matmul(self.execution.matmul, {}, call, q, keys)
    weights = self.weights(x).astype(jnp.float32) * spec.heads**-0.5
    return jnp.einsum("bsh,bsht->bst", weights, jax.nn.relu(products * spec.head_dim**-0.5))

  def __call__(
    self, x: jax.Array, latent: jax.Array, context: Context, keys: jax.Array, positions: jax.Array
  ) -> jax.Array:
    """Whether each key [B,T,D], at its position [B,T], is selected, [B,1,S,T]."""
    scores = jax.lax.stop_gradient(self.scores(x, latent, context, keys))
    visible = context.positions[:, :, None] >= positions[:, None, :]
    if context.segments is not None:
      visible &= context.segments[:, :, None] == context.segments[:, None, :]
    best = among_best(jnp.where(visible, scores, -jnp.inf), min(self.spec.count, keys.shape[1]))
    return (visible & best)[:, None]


def among_best(scores: jax.Array, count: int) -> jax.Array:
  """Whether each element is among the `count` largest of its last dimension; of equal ones, the first win."""
  best = jax.lax.top_k(scores, count)[1]
  flat = jnp.zeros((scores.size // scores.shape[-1], scores.shape[-1]), bool)
  rows = jnp.arange(flat.shape[0])[:, None]
  return flat.at[rows, best.reshape(flat.shape[0], count)].set(True).reshape(scores.shape)
