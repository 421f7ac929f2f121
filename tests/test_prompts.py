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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_is_read_from_its_file(tmp_path, pieces, dtype):
  keys = {"prefill_cache_dir": str(tmp_path / "kept"), "dtype": dtype, "load_parameters_path": "one"}
  writes, reads = random_model(tmp_path, **keys), random_model(tmp_path, **keys, load_from_prefill_dir=True)
  expected, computed = write(writes, LONG, SHORT), pieces(reads)
  assert write(reads, LONG, SHORT) == expected
  assert computed["pieces"] == 1, "a prompt of one token has nothing to keep"
  with pytest.raises(ConfigError, match="has no cache of this prompt by these parameters"):
    write(reads, LONG[::-1])
  other = random_model(tmp_path, **keys | {"load_parameters_path": "another"}, load_from_prefill_dir=True)
  with pytest.raises(ConfigError, match="decode it once without load_from_prefill_dir"):
    write(other, LONG)
