"""The real TPU compiler on the engine's step: it moves little more than the weights and the cache."""

import pytest

from benchmarks.decode_compiled import compiled
from maxtext import load_config
from maxtext.plan.traffic import traffic

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

# Layers of Llama 3.1 8B, few of them and with a small vocabulary, so that it compiles quickly.
KEYS = {
  "model_name": "llama3.1-8b", "override_model_config": True, "base_num_decoder_layers": 3, "vocab_size": 4096,
  "max_target_length": 2048, "dtype": "bfloat16", "weight_dtype": "bfloat16", "ici_fsdp_parallelism": 1,
  "ici_tensor_parallelism": 4,
}  # fmt: skip


@pytest.mark.parametrize("topology", ["v5p-8", "v6e-4"])
def test_a_step_reads_weights_and_cache_once(topology):
  step = compiled(load_config(**KEYS, compile_topology=topology), slots=16)
  most = sorted(traffic(step.program), key=lambda found: -found[1])[:8]
  assert 1.0 <= step.ratio < 1.25, [(i.name, i.op_name, moved) for i, moved in most]
  assert step.temporary < 0.1 * step.cache, "no copy of the cache"
