"""Weights that are cast once for many steps: the same results, in the memory of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from maxtext.inference import as_read
from maxtext.inference.as_read import cast, read_dtypes
from maxtext.inference.decode_state import forward_step
from maxtext.inference.sampling import SamplingParams
from maxtext.training.live_engine import LiveEngine
from maxtext.training.program import Program
from tests import vocabularies
from tests.support import program, tiny

BF16 = {"dtype": "bfloat16", "base_num_decoder_layers": 2}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}


def narrowed(p: Program) -> tuple[set[str], set[str]]:
  """Paths that are read in bfloat16, and all others."""
  found = read_dtypes(p.model)
  assert found.keys() == (p.model.params | p.model.buffers).keys()
  few = {path for path, dtype in found.items() if dtype == jnp.bfloat16}
  return few, found.keys() - few


def test_what_is_cast_in_every_use_is_read_so():
  cast_first, others = narrowed(program(tiny(**BF16)))
  assert "embedding/table" in cast_first
  assert not others
  assert not narrowed(program(tiny(**BF16 | {"dtype": "float32"})))[0]


def test_a_table_that_also_gives_logits_in_float32_is_read_in_float32():
  p = program(tiny(**BF16, logits_via_embedding=True, logits_dot_in_fp32=True))
  assert narrowed(p)[1] == {"embedding/table"}


@pytest.mark.parametrize("changes", [{}, {"float32_gate_logits": True}])
def test_of_experts_all_but_a_router_in_float32(changes):
  few, others = narrowed(program(tiny(**BF16, **EXPERTS, **changes)))
  assert any("experts" in path for path in few)
  assert all("router" in path for path in others)
  assert bool(others) == bool(changes)


def test_weights_that_are_quantized_in_every_step_are_read_as_they_are():
  few, others = narrowed(program(tiny(**BF16, quantization="int8")))
  assert any(path.endswith("gate/weight") for path in others)
  assert not any(path.endswith("gate/weight") for path in few)


def test_on_cpus_nothing_is_cast():
  model = program(tiny(**BF16)).model
  assert as_read.as_read(model) == model.params | model.buffers


def test_logits_are_the_same_to_the_last_bit():
  """Where the compiler keeps every cast, as those for other chips do."""
  p = program(tiny(**BF16))
  params = p.model.init(0)[0]
  read = {path: jax.ShapeDtypeStruct(params[path].shape, dtype) for path, dtype in read_dtypes(p.model).items()}
  tokens, positions = jnp.array([[5], [7]]), jnp.array([0, 3])

  def logits(params: dict[str, jax.Array]) -> jax.Array:
    cache = p.model.bind(params).init_cache(2, 8)
    return forward_step(p.model, params, cache, tokens, positions)[0]

  def run(params: dict[str, jax.Array]) -> np.ndarray:
    return np.asarray(jax.jit(logits).lower(params).compile({"xla_allow_excess_precision": False})(params))

  assert np.array_equal(run(params), run(cast(params, read)))


def test_a_call_frees_what_it_has_cast(monkeypatch, tmp_path):
  def on_other_chips(model):
    return {
      path: jax.ShapeDtypeStruct(struct.shape, read_dtypes(model)[path], sharding=struct.sharding)
      for path, struct in (model.params | model.buffers).items()
    }

  monkeypatch.setattr(as_read, "as_read", on_other_chips)
  vocabulary = vocabularies.hugging_face(tmp_path, texts=["the quick brown fox"] * 20)
  config = tiny(**BF16 | {"vocab_size": 512}, tokenizer_type="huggingface", tokenizer_path=str(vocabulary))
  p = program(config)
  state = p.init()
  params, sampling = state.params | state.buffers, SamplingParams(temperature=0.0, max_tokens=4)
  tokenizer = load_tokenizer(tokenizer_options(config))
  engine = LiveEngine(config, p.model, tokenizer, sampling, 2, 16, 8)
  before = {id(array) for array in jax.live_arrays()}
  first = engine.generate(params, 0, [[5, 6, 7]], sampling)
  again = engine.generate(params, 1, [[5, 6, 7]], sampling)
  assert [o.token_ids for o in first] == [o.token_ids for o in again]
  kept = [array for array in jax.live_arrays() if id(array) not in before]
  assert not [a.shape for a in kept if a.shape in {v.shape for v in params.values()} and a.dtype == jnp.bfloat16]
  assert all(not array.is_deleted() for array in params.values())
