"""The divergence of a student's next-token distribution from a teacher's, from whole logits or a teacher's top-k.

Shapes: B batch, S sequence, V vocabulary, K tokens that are kept of it.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.mesh.explicit import auto_axes

_LEAST_TAIL = 1e-6  # a smaller mass is a rounding error of the sum that it is what is left of


def kl_divergence(student: jax.Array, teacher: jax.Array, temperature: jax.typing.ArrayLike) -> jax.Array:
  """KL(teacher || student) [B,S] of logits [B,S,V] divided by a temperature, in float32.

  Where one vocabulary is longer, its last entries are padding and left out.
  """
  size = min(student.shape[-1], teacher.shape[-1])

  def divergence(student: jax.Array, teacher: jax.Array, temperature: jax.Array) -> jax.Array:
    log_q, log_p = (_log_probs(logits[..., :size], temperature) for logits in (student, teacher))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

  return auto_axes(divergence, _of_tokens(student), student, teacher, jnp.asarray(temperature))


def top_k_kl_divergence(
  student: jax.Array, tokens: jax.Array, log_probs: jax.Array, temperature: jax.typing.ArrayLike, vocab_size: int
) -> jax.Array:
  """KL(teacher || student) [B,S] where all tokens but `tokens` [B,S,K] are one: never more than that of all tokens, and
  equal to it if K is all of them.

  Args:
    student: logits [B,S,V], of which the first `vocab_size` count.
    tokens: the teacher's likeliest.
    log_probs: [B,S,K] of them, at the same temperature.
    temperature: divides the student's logits.
    vocab_size: tokens that the teacher's distribution is of.
  """

  def divergence(student: jax.Array, tokens: jax.Array, log_probs: jax.Array, temperature: jax.Array) -> jax.Array:
    log_q = jnp.take_along_axis(_log_probs(student[..., :vocab_size], temperature), tokens, axis=-1)
    kept = (jnp.exp(log_probs) * (log_probs - log_q)).sum(-1)
    tail_p, tail_q = (jnp.maximum(1.0 - jnp.exp(x).sum(-1), _LEAST_TAIL) for x in (log_probs, log_q))
    return kept + jnp.where(tail_p > _LEAST_TAIL, tail_p * (jnp.log(tail_p) - jnp.log(tail_q)), 0.0)

  return auto_axes(divergence, _of_tokens(student), student, tokens, log_probs, jnp.asarray(temperature))


def top_k_log_probs(
  logits: jax.Array, temperature: jax.typing.ArrayLike, k: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
  """The likeliest tokens [B,S,K] of logits [B,S,V], of which the first `vocab_size` count, and their log-probabilities
  at a temperature."""

  def top(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_probs, tokens = jax.lax.top_k(_log_probs(logits[..., :vocab_size], temperature), k)
    return tokens.astype(jnp.int32), log_probs

  return auto_axes(top, (_of_tokens(logits), _of_tokens(logits)), logits, jnp.asarray(temperature))


def _log_probs(logits: jax.Array, temperature: jax.typing.ArrayLike) -> jax.Array:
  return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def _of_tokens(logits: jax.Array) -> NamedSharding:
  """The sharding of a value for each token."""
  own = jax.typeof(logits).sharding
  return NamedSharding(own.mesh, PartitionSpec(*own.spec[:2]))
