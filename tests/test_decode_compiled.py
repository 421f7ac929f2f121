"""The real TPU compiler on the engine's step: it moves little more than the weights and the cache."""

import pytest

from benchmarks.decode_compiled import compiled
from maxtext import load_config
from maxtext.planner.memory_traffic import memory_traffic

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

# A small vocabulary, so that it compiles quickly; fewer layers would fit on-chip memory, and be moved there whole.
KEYS = {
  "override_model_config": True, "base_num_decoder_layers": 12, "vocab_size": 4096, "max_target_length": 2048,
  "dtype": "bfloat16", "weight_dtype": "bfloat16", "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 4,
}  # fmt: skip
WINDOWS = {"sliding_window_size": 1024}  # in every other layer


@pytest.mark.parametrize(
  ("model", "topology", "changes"),
  [
    ("llama3.1-8b", "v5p-8", {}),
    pytest.param("llama3.1-8b", "v6e-4", {}, marks=pytest.mark.nightly),
    pytest.param("gemma2-9b", "v6e-4", WINDOWS, marks=pytest.mark.nightly),
  ],
)
def test_a_step_reads_weights_and_cache_once(model, topology, changes):
  config = load_config(**KEYS, model_name=model, compile_topology=topology, **changes)
  found = compiled(config, slots=16)
  step = found.step
  most = sorted(memory_traffic(step.program), key=lambda one: -one[1])[:8]
  assert 1.0 <= found.ratio < 1.25, [(i.name, i.op_name, moved) for i, moved in most]
  assert step.temporary < 0.1 * step.cache, "no copy of the cache"
