"""The gated delta rule: a state matrix per head, which decays and is corrected by the error of its value for a key.

  S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

`recurrent` is the plain implementation, which tests compare `chunked` with; that one computes a chunk of tokens in
parallel. The state is zero at the first token of a document. Everything is float32.

Shapes: B batch, S sequence, H heads, K key dim, V value dim, C tokens of a chunk, N chunks.
"""

import jax
import jax.numpy as jnp


def recurrent(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, begins: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """One token after another.

  Args:
    q, k: [B,S,H,K].
    v: [B,S,H,V].
    g, beta: logarithm of the decay, and strength of the update, [B,S,H].
    begins: whether a token is the first of its document, [B,S].
    state: [B,H,K,V] before the first token.

  Returns:
    Outputs [B,S,H,V], and the state after the last token.
  """

  def token(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, v, g, beta, begins = xs
    state = jnp.where(begins[:, None, None, None], 0.0, state * jnp.exp(g)[..., None, None])
    error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * error[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q)

  xs = tuple(jnp.moveaxis(a, 1, 0) for a in (*_float32(q, k, v, g, beta), begins))
  state, out = jax.lax.scan(token, state, xs)
  return jnp.moveaxis(out, 0, 1), state


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  begins: jax.Array,
  state: jax.Array,
  size: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """The same, one chunk at a time.

  Within a chunk, token i's error is beta_i (v_i - S^T k_i) minus the updates of earlier tokens of the chunk for its
  key. This is a triangular system, solved for all tokens at once: for the values, and for the factor of the state.
  """
  S = q.shape[1]
  size = min(size, S)
  q, k, v, g, beta = (_in_chunks(a, size) for a in _float32(q, k, v, g, beta))  # [N,B,H,C,...]
  document = jnp.cumsum(_in_chunks(begins[..., None].astype(jnp.int32), size)[..., 0, :], axis=-1)  # [N,B,C]
  total = jnp.cumsum(g, axis=-1)
  i, j = jnp.arange(size)[:, None], jnp.arange(size)[None]
  seen = ((document[..., :, None] == document[..., None, :]) & (i >= j))[:, :, None]
  # Mask the decay of later tokens before the exponential: it could be infinite there, and the gradient NaN.
  decay = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
  from_state = jnp.where(document == 0, 1.0, 0.0)[:, :, None] * jnp.exp(total)
  last = jnp.exp(total[..., -1:] - total)
  into_state = jnp.where(document == document[..., -1:], 1.0, 0.0)[:, :, None] * last

  strong = k * beta[..., None]
  system = jnp.where(i > j, jnp.einsum("nbhik,nbhjk->nbhij", strong, k) * decay, 0.0) + jnp.eye(size)
  sides = jnp.concatenate([v * beta[..., None], strong * from_state[..., None]], axis=-1)
  solved = jax.scipy.linalg.solve_triangular(system, sides, lower=True, unit_diagonal=True)
  values, on_state = jnp.split(solved, [v.shape[-1]], axis=-1)
  near = jnp.einsum("nbhik,nbhjk->nbhij", q, k) * decay

  def chunk(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, values, on_state, near, decay = xs
    error = values - on_state @ state
    out = q @ state + near @ error
    return state * decay[..., None, None] + jnp.einsum("bhck,bhcv->bhkv", k, error), out

  xs = (q * from_state[..., None], k * into_state[..., None], values, on_state, near, from_state[..., -1])
  state, out = jax.lax.scan(chunk, state, xs)
  N, B, H, C, V = out.shape
  return jnp.moveaxis(out, (0, 3), (1, 2)).reshape(B, N * C, H, V)[:, :S], state


def _float32(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  return tuple(a.astype(jnp.float32) for a in arrays)


def _in_chunks(x: jax.Array, size: int) -> jax.Array:
  """[B,S,H,...] to [N,B,H,C,...]; padding of the last chunk leaves the state unchanged."""
  x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
  B, S, H = x.shape[:3]
  return jnp.moveaxis(x.reshape(B, S // size, size, H, *x.shape[3:]), (1, 3), (0, 2))
