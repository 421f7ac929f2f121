"""Loss weights per token, from a column of the data through packing and context-parallel order to the loss."""

import itertools

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.data.documents import WEIGHTED
from maxtext.data.packing import Packing
from maxtext.data.streams import PackedStreams, Rows
from maxtext.training.loop import run_loop
from tests.support import History, program, tiny

VOCAB, LENGTH = 128, 32
KEYS = {
  "dataset_type": "grain", "grain_file_type": "parquet", "tokenize_train_data": False, "tokenize_eval_data": False,
  "train_data_columns": ["ids", "ids_mask"], "eval_data_columns": ["ids", "ids_mask"], "vocab_size": VOCAB,
  "base_num_decoder_layers": 1, "max_target_length": LENGTH, "per_device_batch_size": 4, "grain_worker_count": 0,
}  # fmt: skip


def documents(count=40):
  """Every token occurs with one weight only, so that a row can be checked by its targets."""
  rng = np.random.default_rng(0)
  ids = [rng.integers(1, VOCAB, rng.integers(2, 90)) for _ in range(count)]
  return ids, [WEIGHTS[tokens] for tokens in ids]


WEIGHTS = np.random.default_rng(1).choice([0.0, 0.25, 1.0], VOCAB).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  import pyarrow
  import pyarrow.parquet

  folder = tmp_path_factory.mktemp("masked")
  ids, weights = documents()
  table = pyarrow.table({"ids": ids, "ids_mask": weights, "short_mask": [w[1:] for w in weights]})
  pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)
  return folder


def config(folder, **changes):
  files = {"grain_train_files": str(folder / "all.parquet"), "grain_eval_files": str(folder / "all.parquet")}
  return tiny(**(KEYS | files | changes))


def arrays(fed):
  return [np.asarray(array) for array in jax.tree.leaves(fed.batch)]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "concat_then_split"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_follow_their_tokens_and_a_resumed_run_has_the_same(folder, packing, workers):
  p = program(config(folder, grain_packing_type=packing, grain_worker_count=workers))
  feed = p.feed()
  whole = [(arrays(fed), fed.iterator_state()) for fed in itertools.islice(feed, 5)]
  feed.close()
  for (_, targets, _, segments, weights), _ in whole:
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, np.where(segments > 0, WEIGHTS[targets], 0))
  plain = program(config(folder, grain_packing_type=packing, train_data_columns=["ids"])).feed()
  for (found, _), fed in zip(whole, plain, strict=False):
    *expected, weights = arrays(fed)
    assert all(map(np.array_equal, found[:4], expected)), "a mask moves no token"
    np.testing.assert_array_equal(weights, expected[3] > 0)
  plain.close()
  rest = p.feed(whole[1][1])
  for (found, _), fed in zip(whole[2:], rest, strict=False):
    assert all(map(np.array_equal, found, arrays(fed)))
  rest.close()


@pytest.mark.mesh
@pytest.mark.slow
def test_loss_and_evaluation_count_by_weight_and_a_mesh_with_reordered_tokens_agrees(folder):
  found = []
  for devices, mesh in ((1, {}), (8, {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2})):
    c = config(folder, steps=2, per_device_batch_size=4 / devices, eval_per_device_batch_size=4 / devices,
               eval_interval=1, eval_steps=1, generate_padding_batch_eval=True, **mesh)  # fmt: skip
    p, history = program(c, devices), History()
    assert (p.model.execution.kernels.attention.order is not None) == (devices > 1)
    state = run_loop(p.step, p.init(), p.feed(), range(2), [history])
    found.append([*history.losses, p.evaluate(state)["loss"]])
    first = arrays(next(p.feed()))
    assert history.figures[0]["tokens"] == (first[3] > 0).sum()  # those without a weight are read, too
  np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_a_loss_is_the_weighted_mean_of_its_targets(folder):
  """By hand, from the logits."""
  p = program(config(folder))
  state, fed = p.init(), next(p.feed())
  batch = fed.batch
  decoder = p.model.bind(state.params | state.buffers)
  logits = decoder.logits(decoder.hidden(batch.inputs, batch.positions, batch.segments)[0])
  losses = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch.targets)[..., None], -1)[..., 0]
  weights = np.asarray(batch.weights)
  _, metrics = p.step(state, batch)
  assert float(metrics["loss"]) == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-5)


class Mixed:
  """Every other document brings weights."""

  def read(self, wanted):
    return [self.document(stream, k) for stream, k in wanted]

  def document(self, stream, k):
    tokens = np.arange(5) + 10 * (stream + 4 * k)
    if (stream + k) % 2:
      return tokens
    weighted = np.zeros(5, WEIGHTED)
    weighted["token"], weighted["weight"] = tokens, tokens % 3
    return weighted


def test_documents_with_and_without_weights_share_rows():
  streams = PackedStreams(Mixed(), Packing(10, "concat_then_split", look_ahead=1), [0, 1])
  rows = streams.rows([0, 1])
  weighted = rows.targets // 10 % 4 + rows.targets // 40
  expected = np.where(weighted % 2, 1, rows.targets % 3) * (rows.segments > 0)
  np.testing.assert_array_equal(rows.loss_weights, expected)
  assert 0 < rows.loss_weights.max() > 1
  plain = rows._replace(weights=None)
  joined = Rows.join([plain, rows])
  np.testing.assert_array_equal(joined.loss_weights, np.concatenate([rows.segments > 0, rows.weights]))
  assert Rows.join([plain, plain]).weights is None


def test_a_mask_that_does_not_fit_is_an_error(folder):
  for columns, words in (
    (["ids", "short_mask"], "hold as many numbers"),
    (["ids_mask"], "must follow a column"),
  ):
    with pytest.raises(ConfigError, match=words):
      next(program(config(folder, train_data_columns=columns)).feed())
