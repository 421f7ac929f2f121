"""Eight CPU devices for every test (a test that wants one takes the first), and nightly tests only where asked for."""

import os
import signal

import pytest

from maxtext.logs import setup_logging
from tests.flags import flags

os.environ |= {"JAX_PLATFORMS": "cpu"} | flags(devices=8)
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
setup_logging()  # tests read what a run writes to the console


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty current folder."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def uncached():
  """Compiles everything. CPU programs out of JAX's cache run collectives that do not depend on each other, such as
  those of a pipeline that sends ahead, in any order and all at once, until every thread waits for another device."""
  import jax
  from jax.experimental.compilation_cache.compilation_cache import reset_cache

  before = jax.config.values["jax_enable_compilation_cache"]
  jax.config.update("jax_enable_compilation_cache", False)
  reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", before)
  reset_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves out what is marked `nightly`, unless the marker expression names it."""
  if "nightly" in config.option.markexpr:
    return
  nightly = [item for item in items if item.get_closest_marker("nightly")]
  if nightly:
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if item.get_closest_marker("nightly") is None]
