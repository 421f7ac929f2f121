"""Checkpoints that older releases wrote are still read. `python -m tests.test_golden` writes one for a new schema."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

from maxtext import ConfigError
from maxtext.checkpoint.metadata import SCHEMA, CheckpointMetadata
from maxtext.checkpoint.options import checkpoint_options, restore_options
from maxtext.checkpoint.restore import load_parameters, resume
from maxtext.checkpoint.tree import named
from maxtext.checkpoint.writer import Writer
from tests.support import program, tiny

FOLDER = Path(__file__).parent / "data" / "checkpoints"
KEYS = {"vocab_size": 8, "base_emb_dim": 4, "base_mlp_dim": 4, "base_num_decoder_layers": 2, "base_num_query_heads": 1,
        "base_num_kv_heads": 1, "head_dim": 2, "enable_checkpointing": True}  # fmt: skip


def golden_state():
  """A state whose every value follows from its name and place, so that no release has to compute it alike."""
  p = program(tiny(**KEYS))

  def value(name, struct):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    numbers = (np.arange(np.prod(struct.shape, dtype=int)) * 7 + seed) % 97
    return jax.device_put(numbers.reshape(struct.shape).astype(struct.dtype), struct.sharding)

  flat = {name: value(name, struct) for name, struct in named(p.state).items()}
  return jax.tree.unflatten(jax.tree.structure(p.state), list(flat.values()))


@pytest.mark.parametrize("schema", sorted(path.name for path in FOLDER.glob("schema-*")))
def test_an_old_layout_is_restored(schema, tmp_path):
  shutil.copytree(FOLDER / schema, tmp_path / schema)
  expected = golden_state()
  found = resume(restore_options(tiny(**KEYS)), epath.Path(tmp_path / schema), expected)
  for name, leaf in named(expected).items():
    np.testing.assert_array_equal(np.asarray(named(found.state)[name]), np.asarray(leaf), err_msg=name)
  assert {name: array.tolist() for name, array in found.position.items()} == {"batches": 3}
  params = load_parameters(
    restore_options(tiny(**KEYS)), "load_parameters_path", str(tmp_path / schema), expected.params
  )
  assert all(np.array_equal(params[name], expected.params[name]) for name in params)


def test_a_path_that_was_renamed_is_named(tmp_path):
  """The layers of multi-token prediction were at `ahead/` in the first schema."""
  shutil.copytree(FOLDER / "schema-1", tmp_path / "old")
  folder = epath.Path(tmp_path / "old" / "3")
  metadata = CheckpointMetadata.read(folder)
  arrays = {n.replace("params/embedding/", "params/ahead/0/"): array for n, array in metadata.arrays.items()}
  assert arrays.keys() != metadata.arrays.keys()
  written = json.dumps(dataclasses.replace(metadata, arrays=arrays).to_json())
  (folder / "record" / "record.json").write_text(written)
  with pytest.raises(ConfigError, match=r"in which ahead/0/.* had another name than in this release: start a new run"):
    resume(restore_options(tiny(**KEYS)), epath.Path(tmp_path / "old"), golden_state())


def test_every_schema_has_one():
  assert {path.name for path in FOLDER.glob("schema-*")} == {f"schema-{n}" for n in range(1, SCHEMA + 1)}
  assert CheckpointMetadata.read(epath.Path(FOLDER / f"schema-{SCHEMA}" / "3")).schema == SCHEMA


if __name__ == "__main__":
  target = FOLDER / f"schema-{SCHEMA}"
  assert not target.exists(), f"{target} is there, and must stay as it is"
  writer = Writer(checkpoint_options(tiny(**KEYS, async_checkpointing=False)), epath.Path(target), {})
  writer.save(3, golden_state(), {"batches": np.array(3, np.int32)})
  writer.close()
