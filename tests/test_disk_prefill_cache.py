"""Prompts that need not be computed again: several answers to one, and caches of prompts that are kept in files."""

import io
import os
import zipfile
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.inference.disk_prefill_cache import DiskPrefillCache
from tests.inference_support import finish, random_model

LONG, SHORT = list(range(40, 56)), [7]


@pytest.fixture
def chunks(monkeypatch):
  """Counts the chunks that an engine prefills from now on."""

  def count(loaded):
    found, prefill = Counter(), loaded.engine.prefill_chunk

    def counting(*chunk):
      found["chunks"] += 1
      return prefill(*chunk)

    monkeypatch.setattr(loaded.engine, "prefill_chunk", counting)
    return found

  return count


def write(loaded, *prompts):
  """The tokens of answers, each drawn with a seed of its own."""
  params = replace(loaded.sampling_params, temperature=1.0, max_tokens=6)
  asked = [loaded.make_request(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]
  return [answer.token_ids for answer in finish(loaded, asked)]


def test_answers_to_one_prompt_share_its_cache(tmp_path, chunks):
  prompts = (LONG, LONG, LONG, SHORT, LONG)
  alone, shared = (random_model(tmp_path, multi_sampling=sampling) for sampling in (False, True))
  computed, fewer = chunks(alone), chunks(shared)
  expected = write(alone, *prompts)
  assert write(shared, *prompts) == expected
  assert len(set(map(tuple, expected))) == len(prompts), "seeds of their own"
  assert (computed["chunks"], fewer["chunks"]) == (5, 3)


# Pages for one text and a half, in chunks of a prompt.
PAGED = {
  "attention": "paged", "pagedattn_tokens_per_page": 4, "pagedattn_num_pages": 8, "pagedattn_max_pages_per_group": 6,
  "use_chunked_prefill": True, "prefill_chunk_size": 16, "max_prefill_predict_length": 23,
}  # fmt: skip


@pytest.mark.parametrize(
  "changes",
  [pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow), {}, PAGED],
  ids=["bfloat16", "float32", "paged"],
)
def test_a_prompt_is_read_from_its_file(tmp_path, chunks, changes):
  folder = tmp_path / "kept"
  keys = {"prefill_cache_dir": str(folder), **changes}
  reading = keys | {"load_from_prefill_dir": True}
  prompts = [LONG + [60] * 3, LONG, SHORT] if changes is PAGED else [LONG, SHORT]
  writes, reads = random_model(tmp_path, **keys), random_model(tmp_path, **reading)
  expected, computed = write(writes, *prompts), chunks(reads)
  assert len(list(folder.iterdir())) == len(prompts) - 1, "a prompt of one token has nothing to keep"
  assert write(reads, *prompts) == expected
  assert changes is PAGED or computed["chunks"] == 1
  with pytest.raises(ConfigError, match="has no cache of this prompt by these parameters"):
    write(reads, LONG[::-1])
  for other in (random_model(tmp_path, seed=1, **reading), random_model(tmp_path, rope_max_timescale=7, **reading)):
    with pytest.raises(ConfigError, match="decode it once without load_from_prefill_dir"):
      write(other, LONG)


def test_a_damaged_file_is_a_miss(tmp_path, chunks, capsys):
  """Cut short, empty, of zeros, or another model's: its prompt is computed, and the file is whole again."""
  folder = tmp_path / "kept"
  reads = random_model(tmp_path, prefill_cache_dir=str(folder), load_from_prefill_dir=True)
  writes = random_model(tmp_path, prefill_cache_dir=str(folder))
  expected, computed = write(writes, LONG), chunks(reads)
  (file,) = folder.iterdir()
  whole = file.read_bytes()
  with zipfile.ZipFile(io.BytesIO(whole)) as archive:
    first = archive.getinfo("0.npy").header_offset + 200
  flipped = whole[:first] + bytes([whole[first] ^ 1]) + whole[first + 1 :]
  other = io.BytesIO()
  np.savez(other, **{"0": np.zeros(3, np.uint8)})
  for damaged in (whole[: len(whole) // 2], b"", bytes(len(whole)), flipped, other.getvalue()):
    file.write_bytes(damaged)
    assert write(reads, LONG) == expected
    assert "is damaged" in capsys.readouterr().err
    assert file.read_bytes() == whole
  assert computed["chunks"] == 5
  assert write(reads, LONG) == expected
  assert computed["chunks"] == 5, "read again"


def test_the_folder_of_prompts_is_bounded(tmp_path):
  """By bytes: what was not used for longest goes, also what a killed process has left."""
  row = [[{"keys": np.arange(1000, dtype=np.float32)}]]
  like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), row)
  folder = tmp_path / "kept"
  files = DiskPrefillCache(folder, lambda: "model", like, reads=True, max_bytes=14_000)  # three of them
  prompts = [[number, 1, 2] for number in range(5)]
  for number, prompt in enumerate(prompts[:3]):
    files.store(prompt, 2, row)
    os.utime(files._file(prompt[:2]), (number, number))
  stale, fresh = folder / "x.npz.1.unfinished", folder / "y.npz.2.unfinished"
  for file in (stale, fresh):
    file.write_bytes(b"half")
  os.utime(stale, (1, 1))
  assert files.lookup(prompts[0])[0] == 2, "which makes it the last that was used"
  files.store(prompts[3], 2, row)
  files.store([*prompts[4], 3], 2, row)  # not all of its prompt
  assert [files.lookup(prompt)[0] for prompt in prompts] == [2, 0, 2, 2, 0]
  assert not stale.exists()
  assert fresh.exists()
  np.testing.assert_array_equal(files.lookup(prompts[3])[1][0][0]["keys"], row[0][0]["keys"])
  DiskPrefillCache(folder, lambda: "model", like, reads=True, max_bytes=1000).store(prompts[4], 2, row)
  assert len(list(folder.glob("*.npz"))) == 3, "a row that never fits displaces nothing"


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, capsys):
  (tmp_path / "file").write_text("in the way")
  model = random_model(tmp_path, prefill_cache_dir=str(tmp_path / "file" / "kept"))
  assert write(model, LONG) == write(random_model(tmp_path), LONG)
  assert "cannot be written (Not a directory)" in capsys.readouterr().err
