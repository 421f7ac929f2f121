"""The folder of compiled programs of a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxtext.configs import MaxTextConfig


@contextmanager
def compilation_cache(config: MaxTextConfig) -> Iterator[None]:
  """Takes compiled programs from `jax_cache_dir`, and afterwards from wherever the process took them before.

  With `dump_hlo` the setting is left as it is, because a program from the cache passes no compiler. JAX opens a cache
  once and then ignores its setting, so it is told of both changes.
  """
  before, folder = jax.config.values["jax_compilation_cache_dir"], os.path.expanduser(config.jax_cache_dir or "")
  if not folder or config.dump_hlo or folder == before:
    yield
    return
  _set_cache(folder)
  try:
    yield
  finally:
    _set_cache(before)


def _set_cache(folder: str | None) -> None:
  jax.config.update("jax_compilation_cache_dir", folder)
  reset_cache()
