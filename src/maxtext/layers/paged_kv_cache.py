"""The paged KV cache: keys and values are stored in pages of one size, which all rows share.

A pool is one array [H,R,N,P,W] for a whole stack, heads first and layers next to pages, as the kernel takes it without
a copy: page n of layer r is page rN+n. The block table [B,M] lists the pages of a row in the order of its positions; N
means no page. Position p of a row is in slot p mod P of its page p div P. Pages are allocated elsewhere.

Shapes: R repeats of the stacked layers, B rows, S new tokens, N pages, P slots of a page, M most pages of a row, T
slots of a ring, H heads (1 where there are none), D width, W width in the pool.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PagedKVCache:
  """The sizes of a paged KV cache.

  Attributes:
    count: pages per layer; `size`: tokens per page.
    most: pages per row; None is as many as the longest row needs.
    alignment: widths are padded to a multiple of it.
    kernel: the paged-attention kernel reads pages in place; otherwise each row's pages are gathered first.
    block: pages that the kernel reads at once.
  """

  count: int
  size: int
  most: int | None = None
  alignment: int = 1
  kernel: bool = False
  block: int = 1

  def width(self, width: int) -> int:
    """The padded width of an array in the pool."""
    return -(-width // self.alignment) * self.alignment

  def per_row(self, length: int) -> int:
    """The largest number of pages of a row of `length` tokens."""
    needed = -(-length // self.size)
    return needed if self.most is None else min(needed, self.most)


def write_pages(
  pool: jax.Array, repeat: jax.Array, table: jax.Array, positions: jax.Array, new: jax.Array
) -> jax.Array:
  """The pool with `new` [B,S,D] or [B,S,H,D] of one layer at positions [B,S]; positions without a page are skipped."""
  N, size = pool.shape[2:4]
  pages = jnp.take_along_axis(table, positions // size, axis=1, mode="fill", fill_value=N)
  heads_first = jnp.moveaxis(new.reshape(*new.shape[:2], -1, new.shape[-1]), 2, 0)
  return pool.at[:, repeat, pages, positions % size].set(_pad_width(heads_first, pool), mode="drop")


def read_pages(pool: jax.Array, repeat: jax.Array, table: jax.Array, like: jax.Array) -> jax.Array:
  """All slots of one layer's rows, [B,MP,D] or [B,MP,H,D] like `like`; undefined where a row has no page."""
  found = pool.at[:, repeat, table].get(mode="clip")[..., : like.shape[-1]]
  H, B, M, size, D = found.shape
  return jnp.moveaxis(found.reshape(H, B, M * size, D), 0, 2).reshape(B, M * size, *like.shape[2:])


def insert_row(pool: jax.Array, row: jax.Array, pages: jax.Array) -> jax.Array:
  """The pool with the ring of one row [R,1,T,D] or [R,1,H,T,D], which has not wrapped around, in pages [M]."""
  size, most = pool.shape[3], pages.shape[0]
  heads_first = row.reshape(row.shape[0], -1, *row.shape[-2:]).swapaxes(0, 1)[:, :, : most * size]
  filled = jnp.pad(heads_first, ((0, 0), (0, 0), (0, most * size - heads_first.shape[2]), (0, 0)))
  cut = filled.reshape(*filled.shape[:2], most, size, filled.shape[-1])
  return pool.at[:, :, pages].set(_pad_width(cut, pool), mode="drop")


def _pad_width(x: jax.Array, pool: jax.Array) -> jax.Array:
  fill = [(0, 0)] * (x.ndim - 1) + [(0, pool.shape[-1] - x.shape[-1])]
  return jnp.pad(x.astype(pool.dtype), fill)
