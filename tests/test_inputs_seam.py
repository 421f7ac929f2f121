"""What enters a decoder beside tokens: embeddings, positions of several components, spans, features of towers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.layers.embedding import feature_indices, merge_features
from tests.support import program, random_batch, tiny


def test_embeddings_take_the_place_of_tokens():
  config = tiny()
  model, batch = program(config).model, random_batch(config)
  params, _ = jax.jit(model.init)(0)

  @jax.jit
  def run(params):
    decoder = model.bind(params)
    embeddings = decoder.embed(batch.inputs, batch.positions)
    by_tokens = decoder.hidden(batch.inputs, batch.positions)[0]
    by_embeddings = decoder.hidden(None, batch.positions, embeddings=embeddings)[0]
    return by_tokens, by_embeddings, decoder.hidden(batch.inputs, batch.positions, embeddings=2 * embeddings)[0]

  by_tokens, by_embeddings, doubled = run(params)
  np.testing.assert_array_equal(by_tokens, by_embeddings)
  assert np.abs(doubled - by_tokens).max() > 1e-3
  with pytest.raises(ValueError, match="both are None"):
    model.bind(params).hidden(None, batch.positions)


@pytest.mark.parametrize("add", [False, True])
def test_features_stand_where_their_placeholders_do(add):
  rng = np.random.default_rng(0)
  marked = np.array([[0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0], [0] * 6], bool)
  embeddings, features = rng.standard_normal((3, 6, 4), np.float32), rng.standard_normal((3, 3, 4), np.float32)
  wanted = embeddings.copy()
  for row in range(3):
    for number, place in enumerate(np.flatnonzero(marked[row])):
      wanted[row, place] = features[row, number] + (embeddings[row, place] if add else 0)
  indices = feature_indices(marked, marked.sum(1))
  merged = jax.jit(lambda e, f, i: merge_features(e, f, i, add))(embeddings, features, indices)
  np.testing.assert_array_equal(merged, wanted)
  order = rng.permutation(6)  # indices travel with their tokens
  reordered = merge_features(jnp.asarray(embeddings[:, order]), jnp.asarray(features), indices[:, order], add)
  np.testing.assert_array_equal(reordered, wanted[:, order])


def test_placeholders_and_features_are_counted():
  marked = np.array([[0, 1, 1], [1, 1, 1]], bool)
  with pytest.raises(ValueError, match="row 1 has 3 placeholder tokens for 2 features"):
    feature_indices(marked, 2)
