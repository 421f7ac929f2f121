"""Prompts that need not be computed again: several answers to one, and caches of prompts that are kept in files."""

from collections import Counter
from dataclasses import replace

import pytest

from maxtext import ConfigError
from tests.answering import finish, random_model

LONG, SHORT = list(range(40, 56)), [7]


@pytest.fixture
def pieces(monkeypatch):
  """Counts the pieces that an engine prefills from now on."""

  def count(loaded):
    found, prefill = Counter(), loaded.engine.prefill

    def counting(*piece):
      found["pieces"] += 1
      return prefill(*piece)

    monkeypatch.setattr(loaded.engine, "prefill", counting)
    return found

  return count


def write(loaded, *prompts):
  """The tokens of answers, each drawn with a seed of its own."""
  settings = replace(loaded.settings, temperature=1.0, max_tokens=6)
  asked = [loaded.request(prompt, replace(settings, seed=seed)) for seed, prompt in enumerate(prompts)]
  return [answer.tokens for answer in finish(loaded, asked)]


def test_answers_to_one_prompt_share_its_cache(tmp_path, pieces):
  prompts = (LONG, LONG, LONG, SHORT, LONG)
  alone, shared = (random_model(tmp_path, multi_sampling=sampling) for sampling in (False, True))
  computed, fewer = pieces(alone), pieces(shared)
  expected = write(alone, *prompts)
  assert write(shared, *prompts) == expected
  assert len(set(map(tuple, expected))) == len(prompts), "seeds of their own"
  assert (computed["pieces"], fewer["pieces"]) == (5, 3)


# Pages for one text and a half, in pieces of a prompt.
PAGED = {
  "attention": "paged", "pagedattn_tokens_per_page": 4, "pagedattn_num_pages": 8, "pagedattn_max_pages_per_group": 6,
  "use_chunked_prefill": True, "prefill_chunk_size": 16, "max_prefill_predict_length": 23,
}  # fmt: skip


@pytest.mark.parametrize(
  "changes",
  [pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow), {}, PAGED],
  ids=["bfloat16", "float32", "paged"],
)
def test_a_prompt_is_read_from_its_file(tmp_path, pieces, changes):
  folder = tmp_path / "kept"
  keys = {"prefill_cache_dir": str(folder), **changes}
  reading = keys | {"load_from_prefill_dir": True}
  prompts = [LONG + [60] * 3, LONG, SHORT] if changes is PAGED else [LONG, SHORT]
  writes, reads = random_model(tmp_path, **keys), random_model(tmp_path, **reading)
  expected, computed = write(writes, *prompts), pieces(reads)
  assert len(list(folder.iterdir())) == len(prompts) - 1, "a prompt of one token has nothing to keep"
  assert write(reads, *prompts) == expected
  assert changes is PAGED or computed["pieces"] == 1
  with pytest.raises(ConfigError, match="has no cache of this prompt by these parameters"):
    write(reads, LONG[::-1])
  for other in (random_model(tmp_path, seed=1, **reading), random_model(tmp_path, rope_max_timescale=7, **reading)):
    with pytest.raises(ConfigError, match="decode it once without load_from_prefill_dir"):
      write(other, LONG)
