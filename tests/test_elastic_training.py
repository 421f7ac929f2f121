"""A run on fewer devices than it began with: the same batches, the same losses."""

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.distributed.hosts import ALL_HOSTS
from maxtext.training.elastic import for_live_hosts
from tests.corpora import write_corpus
from tests.support import History, losses, program, run_loop, tiny

KEYS = {"steps": 4, "elastic_enabled": True, "enable_checkpointing": True, "ici_fsdp_parallelism": -1,
        "base_num_decoder_layers": 1, "learning_rate": 1e-2, "jax_cache_dir": ""}  # fmt: skip


def test_the_global_batch_is_kept(monkeypatch):
  config = tiny(**KEYS, per_device_batch_size=2, num_slices=4, eval_per_device_batch_size=1)
  assert for_live_hosts(config) is config
  monkeypatch.setenv(ALL_HOSTS, "4")
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  live = for_live_hosts(config)
  assert (live.per_device_batch_size * 3, live.eval_per_device_batch_size * 3, live.num_slices) == (8, 4, 3)
  other = tiny(**KEYS | {"elastic_enabled": False}, per_device_batch_size=2)
  assert for_live_hosts(other) is other


@pytest.mark.mesh
def test_losses_are_those_of_the_whole_mesh_where_rows_do_not_divide():
  """Eight rows on four devices; on three with a row of weight 0, or with two in each of two micro-batches."""
  whole = losses(tiny(**KEYS, per_device_batch_size=2), 4)
  np.testing.assert_allclose(losses(tiny(**KEYS, per_device_batch_size=8 / 3), 3), whole, atol=1e-5)
  parts = {"per_device_batch_size": 4 / 3, "gradient_accumulation_steps": 2}
  np.testing.assert_allclose(losses(tiny(**KEYS, **parts), 3), whole, atol=1e-5)


@pytest.mark.mesh
def test_packed_documents_and_token_counts_are_the_same(tmp_path):
  corpus = write_corpus(tmp_path / "corpus", (37, 1, 50, 12))
  data = {"vocab_size": 1024, "dataset_type": "grain", "grain_train_files": str(corpus), "tokenize_train_data": False,
          "tokenizer_path": "", "num_epoch": 50}  # fmt: skip
  histories = []
  for devices in (4, 3):
    config = tiny(**KEYS | data | {"steps": 2}, per_device_batch_size=8 / devices)
    p, history = program(config, devices), History()
    run_loop(p.step, p.init(), p.feed(), range(config.steps), [history])
    histories.append(history)
  assert [f["tokens"] for f in histories[0].figures] == [f["tokens"] for f in histories[1].figures]
  np.testing.assert_allclose(histories[0].losses, histories[1].losses, atol=1e-5)


@pytest.mark.parametrize("keys", [{"enable_diloco": True}, {"enable_checkpointing": False}])
def test_what_cannot_be_elastic_is_named(keys):
  with pytest.raises(ConfigError, match="elastic_enabled=True is not supported"):
    tiny(**KEYS | keys)
