"""Paths of parameters are taken apart and put together in one way."""

import jax.numpy as jnp
import pytest

from maxtext.layers import parameter_paths as paths
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.parameter_paths import LayerPath

QUERY = "groups/0/layers/12/mixer/query/weight"


@pytest.mark.parametrize(
  ("path", "parsed"),
  [
    (QUERY, LayerPath(0, 12, "mixer/query/weight")),
    ("groups/3/layers/0/mixer_norm/scale", LayerPath(3, 0, "mixer_norm/scale")),
    ("groups/0/layers/1.3/mixer/query/weight", None),  # one repeat, as a checkpoint keeps it
    ("groups/0/layers/1", None),
    ("mtp/0/stack/layers/0/mixer/query/weight", None),
    ("embedding/table", None),
  ],
)
def test_paths_of_layers(path, parsed):
  assert LayerPath.parse(path) == parsed
  assert parsed is None or str(parsed) == path


def test_one_repeat_of_a_layer():
  layer = LayerPath.parse(QUERY)
  assert layer.unstacked(3) == "groups/0/layers/12.3/mixer/query/weight"
  assert paths.one_layer(QUERY, 3) == "groups/0/layers/12/mixer/query/weight[3]"


def test_layers_that_predict_further_tokens():
  path = paths.mtp_path(1, "mixer")
  assert path == "mtp/1/stack/layers/0/mixer"
  assert paths.mtp_index(path) == 1
  assert paths.mtp_index(QUERY) is None


def test_names_of_a_path():
  assert paths.split("a/0/b") == ["a", "0", "b"]
  assert paths.join("a", 0, "b") == "a/0/b"
  assert paths.join("a/0", "b") == "a/0/b"
  assert paths.below(f"params/{QUERY}") == QUERY
  assert paths.module_of(QUERY) == "query"
  assert paths.sibling(QUERY, "key") == "groups/0/layers/12/mixer/key/weight"


@pytest.mark.parametrize(
  ("pattern", "path", "fit"),
  [
    (f"{paths.ANY_LAYER}/mixer/query/weight", QUERY, True),
    (f"{paths.ANY_LAYER}/mixer/query", QUERY, False),
    (f"{paths.ANY_PREDICTION}/join/weight", "mtp/0/join/weight", True),
    (f"{paths.ANY_PREDICTION}/join/weight", "mtp/a/join/weight", False),
    ("a.b/*", "a.b/7", True),
    ("a.b/*", "a-b/7", False),
  ],
)
def test_patterns(pattern, path, fit):
  assert paths.fits(pattern, path) == fit


def test_values_depend_on_these_paths():
  """The factory's path begins with a slash: initial values are a hash of it."""
  assert ParamFactory(0, jnp.float32).scope("groups").scope(0).scope("norm").path == "/groups/0/norm"
