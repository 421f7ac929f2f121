"""How fast a decode step on a CPU reads the KV cache, by how it is stored and read.

  python -m benchmarks.cache_reads [--filled 560] [--json]

One token a row attends to eight layers of a cache of 1,024 positions, filled so far, with 16 rows, 8 heads and a width
of 64 in float32. `blocks`: a loop cuts blocks out of one array, as the engine does; `apart`: each block is an array of
its own, behind a condition; `whole`: one array as long as what is filled, read at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks.figures import show

LAYERS, ROWS, HEADS, LENGTH, WIDTH, TURNS = 8, 16, 8, 1024, 64, 15

State = tuple[jax.Array, jax.Array, jax.Array]  # largest logit, sum of exponentials, weighted values
Pair = tuple[jax.Array, jax.Array]  # keys and values [B,K,T,D]


def join(state: State, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array | int, last: jax.Array) -> State:
  """Attention over one more block, whose first position is `first`."""
  largest, total, values = state
  logits = jnp.einsum("bkd,bktd->bkt", q, k)
  logits = jnp.where(first + jnp.arange(k.shape[2]) <= last, logits, -1e30)
  new = jnp.maximum(largest, logits.max(-1))
  weights, correction = jnp.exp(logits - new[..., None]), jnp.exp(largest - new)
  values = values * correction[..., None] + jnp.einsum("bkt,bktd->bkd", weights, v)
  return new, total * correction + weights.sum(-1), values


def empty() -> State:
  return jnp.full((ROWS, HEADS), -1e30), jnp.zeros((ROWS, HEADS)), jnp.zeros((ROWS, HEADS, WIDTH))


def blocks(q: jax.Array, cache: Pair, last: jax.Array, size: int) -> jax.Array:
  """A loop over blocks that are cut out of one array."""

  def body(block: jax.Array, state: State) -> State:
    k, v = (jax.lax.dynamic_slice_in_dim(x, block * size, size, axis=2) for x in cache)
    return join(state, q, k, v, block * size, last)

  _, total, values = jax.lax.fori_loop(0, last // size + 1, body, empty())
  return values / total[..., None]


def apart(q: jax.Array, cache: Sequence[Pair], last: jax.Array) -> jax.Array:
  """Blocks in arrays of their own; those that are not reached are skipped."""
  state, first = empty(), 0
  for k, v in cache:
    state = jax.lax.cond(
      first <= last, lambda s, k, v, first=first: join(s, q, k, v, first, last), lambda s, *_: s, state, k, v
    )
    first += k.shape[2]
  return state[2] / state[1][..., None]


def whole(q: jax.Array, cache: Pair, last: jax.Array) -> jax.Array:
  """One array at once."""
  _, total, values = join(empty(), q, *cache, 0, last)
  return values / total[..., None]


def milliseconds(attend: Callable[..., jax.Array], caches: Sequence[object], last: jax.Array) -> float:
  """The median time of all layers, one after the other."""

  @jax.jit
  def step(q: jax.Array, caches: Sequence[object], last: jax.Array) -> jax.Array:
    for cache in caches:
      q = q + attend(q, cache, last)
    return q

  q = jnp.ones((ROWS, HEADS, WIDTH))
  step(q, caches, last).block_until_ready()
  times = []
  for _ in range(TURNS):
    begin = time.perf_counter()
    step(q, caches, last).block_until_ready()
    times.append(time.perf_counter() - begin)
  return 1e3 * statistics.median(times)


def filled_cache(length: int) -> Pair:
  k, v = (jax.random.normal(jax.random.key(n), (ROWS, HEADS, length, WIDTH)) for n in range(2))
  return k, v


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--filled", type=int, default=560, help="positions of every row (560)")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  arguments = parser.parse_args()
  filled, last = arguments.filled, jnp.asarray(arguments.filled - 1)
  size = 8 * ROWS * HEADS * WIDTH * filled * LAYERS  # bytes of keys and values in float32
  long = [filled_cache(LENGTH) for _ in range(LAYERS)]
  parts = [[filled_cache(128) for _ in range(LENGTH // 128)] for _ in range(LAYERS)]
  times = {
    f"blocks_{n}": milliseconds(lambda q, c, last, n=n: blocks(q, c, last, n), long, last) for n in (16, 32, 128)
  }
  times["apart_128"] = milliseconds(apart, parts, last)
  times["whole"] = milliseconds(whole, [filled_cache(filled) for _ in range(LAYERS)], last)
  show(
    {f"{name}_{unit}": x for name, t in times.items() for unit, x in (("ms", t), ("gb_per_s", size / t / 1e6))},
    arguments.json,
  )


if __name__ == "__main__":
  main()
