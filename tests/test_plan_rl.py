"""Plans of policy optimization with the real TPU compiler: trainer, engine, weight sync and waiting."""

import json

import pytest

from maxtext import load_config, plan
from maxtext.cli.main import main
from maxtext.inference.as_read import as_read
from maxtext.inference.engine import dropless
from maxtext.planner.calibration import CALIBRATION
from maxtext.planner.compile import program_for
from maxtext.planner.decode_step import compiled_decode_step
from maxtext.planner.estimate import estimate
from maxtext.planner.schedule import schedule
from maxtext.planner.text import as_text
from maxtext.rl.engines import engine_slots

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.nightly]

KEYS = {
  "use_grpo": True, "override_model_config": True, "base_emb_dim": 512, "base_mlp_dim": 1024, "vocab_size": 1024,
  "base_num_decoder_layers": 2, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 128,
  "compile_topology": "v5p-16", "max_target_length": 512, "max_prefill_predict_length": 128, "batch_size": 16,
  "num_generations": 8, "dtype": "bfloat16",
}  # fmt: skip


def test_devices_that_are_shared_take_turns():
  found = plan(load_config(**KEYS))
  rollouts = found.rollouts
  assert (found.chips, rollouts.devices, rollouts.separate_devices) == (8, 8, False)
  assert (rollouts.answers, rollouts.slots, rollouts.answer_tokens) == (128, 128, 384)
  assert rollouts.cache == 128 // 8 * 512 * 2 * 2 * 4 * 128 * 2, "16 slots of two layers, keys and values, in bfloat16"
  assert rollouts.needed_bytes > found.memory.peak + rollouts.cache
  assert rollouts.batch_seconds == pytest.approx(rollouts.seconds + found.estimate.seconds)
  assert rollouts.trainer_idle + rollouts.sampler_idle == pytest.approx(1.0)
  assert rollouts.seconds > 384 * rollouts.cache / 2.77e12, "every token reads the cache"


def test_devices_of_their_own_work_at_the_same_time():
  own = {"trainer_devices_fraction": 0.5, "sampler_devices_fraction": 0.5, "rollout_tensor_parallelism": 4}
  found = plan(load_config(**KEYS, **own, off_policy_steps=1, use_agentic_rollout=True))
  rollouts = found.rollouts
  assert (found.chips, rollouts.devices, rollouts.separate_devices, rollouts.overlaps) == (4, 4, True, True)
  assert rollouts.sync_bytes == rollouts.weights > 0
  assert rollouts.needed_bytes > 3 * rollouts.weights + rollouts.cache, "two that are read, and one that arrives"
  slower = max(rollouts.seconds, found.estimate.seconds)
  assert rollouts.batch_seconds == pytest.approx(slower + rollouts.sync_seconds)
  text = as_text(found)
  assert "128 answers of 384 tokens, 128 at once, on 4 devices of their own" in text
  assert "at the same time: trainer idle" in text


def test_the_fastest_division_is_found(capsys, tmp_path):
  words = [f"{key}={json.dumps(value)}" for key, value in KEYS.items()]
  assert main(["plan", *words, "--search", "--json", "--cache", str(tmp_path)]) == 0
  said = capsys.readouterr()
  lines = said.err.splitlines()
  assert sum("s a batch" in line for line in lines) == 3, lines
  assert sum("not possible  trainer_devices_fraction=0.75" in line for line in lines) == 1, "128 answers on 6 devices"
  best = json.loads(said.out)
  assert best["rollouts"]["batch_seconds"] == pytest.approx(
    min(float(line.split(" s a batch")[0]) for line in lines if "s a batch" in line), abs=0.01
  )


def test_a_step_of_rollouts_takes_little_longer_than_its_bytes():
  """On a mesh that divides the slots, with weights that are trained in float32: four layers of the recipe."""
  few = {"override_model_config": True, "base_num_decoder_layers": 4, "vocab_size": 16384}
  config = load_config("qwen2.5-1.5b-grpo-v5p-8", compile_topology="v5p-8", **few)
  program, topology = program_for(config)
  model = dropless(program.model)
  step = compiled_decode_step(model, engine_slots(config), config.max_target_length, as_read(model))
  found = estimate(schedule(step.program, topology, model.execution.sharding.mesh), CALIBRATION[topology.name])
  read = step.weights + step.cache
  assert step.moved < 1.3 * read
  assert found.seconds < 2.2 * read / topology.chip.hbm_bandwidth
  assert found.seconds_by_kind()["collective"] < 0.01 * found.seconds, "nothing of all slots is gathered"
