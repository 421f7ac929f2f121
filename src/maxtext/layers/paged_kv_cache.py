"""Pages: what grows with a text lies in pieces of one length that all rows share, wherever there was room.

A pool is one array [H,R,N,P,W] for a whole stack, heads first and layers beside pages, so that the kernel takes it as
it stands: page n of layer r is page rN+n. The table [B,M] says which pages a row has, in the order of its text; N
stands for none. Position p of a row is in place p mod P of its page p div P. Who has which page is not decided here.

Shapes: R repeats of the stacked layers, B rows, S new tokens, N pages, P places of a page, M most pages of a row, T
places of a ring, H heads (1 where there are none), D width, W width in the pool.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PagedKVCache:
  """The pages of a cache.

  Attributes:
    count: of every layer; `size`: tokens that one holds.
    most: of one row; None is as many as the longest text needs.
    alignment: widths are filled up to a multiple of it.
    kernel: attention reads pages where they lie; otherwise each row's are gathered first.
    block: pages that the kernel reads at once.
  """

  count: int
  size: int
  most: int | None = None
  alignment: int = 1
  kernel: bool = False
  block: int = 1

  def width(self, width: int) -> int:
    """Of an array in the pool."""
    return -(-width // self.alignment) * self.alignment

  def per_row(self, length: int) -> int:
    """Most pages that a row of at most so many tokens may have."""
    needed = -(-length // self.size)
    return needed if self.most is None else min(needed, self.most)


def write_pages(
  pool: jax.Array, repeat: jax.Array, table: jax.Array, positions: jax.Array, new: jax.Array
) -> jax.Array:
  """The pool with `new` [B,S,D] or [B,S,H,D] of one layer at positions [B,S]; those without a page are left out."""
  N, size = pool.shape[2:4]
  pages = jnp.take_along_axis(table, positions // size, axis=1, mode="fill", fill_value=N)
  heads_first = jnp.moveaxis(new.reshape(*new.shape[:2], -1, new.shape[-1]), 2, 0)
  return pool.at[:, repeat, pages, positions % size].set(_widened(heads_first, pool), mode="drop")


def read_pages(pool: jax.Array, repeat: jax.Array, table: jax.Array, like: jax.Array) -> jax.Array:
  """All places of one layer's rows, [B,MP,D] or [B,MP,H,D] as `like` has it; where a row has no page, anything."""
  found = pool.at[:, repeat, table].get(mode="clip")[..., : like.shape[-1]]
  H, B, M, size, D = found.shape
  return jnp.moveaxis(found.reshape(H, B, M * size, D), 0, 2).reshape(B, M * size, *like.shape[2:])


def insert_row(pool: jax.Array, row: jax.Array, pages: jax.Array) -> jax.Array:
  """The pool with the ring of one row [R,1,T,D] or [R,1,H,T,D], which has not come round, in pages [M]."""
  size, most = pool.shape[3], pages.shape[0]
  heads_first = row.reshape(row.shape[0], -1, *row.shape[-2:]).swapaxes(0, 1)[:, :, : most * size]
  filled = jnp.pad(heads_first, ((0, 0), (0, 0), (0, most * size - heads_first.shape[2]), (0, 0)))
  cut = filled.reshape(*filled.shape[:2], most, size, filled.shape[-1])
  return pool.at[:, :, pages].set(_widened(cut, pool), mode="drop")


def _widened(x: jax.Array, pool: jax.Array) -> jax.Array:
  fill = [(0, 0)] * (x.ndim - 1) + [(0, pool.shape[-1] - x.shape[-1])]
  return jnp.pad(x.astype(pool.dtype), fill)
