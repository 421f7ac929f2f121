"""Every axis and the combinations of them train like one device: dense layers and experts, on packed rows."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.configs.values import MESH_AXES
from maxtext.data.batch import Batch
from tests.flags import flags
from tests.support import program, tiny

pytestmark = pytest.mark.mesh

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
STEPS, ROWS = 10, 16
MODELS = {
  "dense": {"base_num_decoder_layers": 4},
  # A wide router: a token near a tie would jump between experts, whatever the mesh.
  "experts": {
    "base_num_decoder_layers": 4, "decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2,
    "rope_type": "default", "original_max_position_embeddings": 4096, "rope_factor": 40,
  },
}  # fmt: skip
AXES = {
  "sequence 2 x fsdp 4": {"sequence": 2, "fsdp": 4},
  "context 2 x fsdp 2 x tensor 2": {"context": 2, "fsdp": 2, "tensor": 2},
  "context 8": {"context": 8, "fsdp": 1},
  "context 4 x data 2, ring": {"context": 4, "data": 2, "fsdp": 1, "context_parallel_strategy": "ring"},
  "context 4 x tensor_sequence 2, chunks swapped, ring": {
    "context": 4, "tensor_sequence": 2, "fsdp": 1, "context_parallel_strategy": "ring",
    "context_parallel_reorder_strategy": "dual_chunk_swap",
  },
  "context 2 x sequence 2 x fsdp 2, striped": {
    "context": 2, "sequence": 2, "fsdp": 2, "context_parallel_reorder_strategy": "striped",
  },
  "context 4 x expert 2, in order": {"context": 4, "expert": 2, "fsdp": 1, "context_parallel_load_balance": False},
  "expert 4 x fsdp 2": {"expert": 4, "fsdp": 2},
  "expert 4 x tensor 2, gathered": {"expert": 4, "tensor": 2, "fsdp": 1, "use_ring_of_experts": True},
  "data 2 x fsdp 2 x tensor 2, explicit": {"data": 2, "fsdp": 2, "tensor": 2, "shard_mode": "explicit"},
  "expert 2 x context 2 x fsdp_transpose 2, explicit": {
    "expert": 2, "context": 2, "fsdp_transpose": 2, "fsdp": 1, "shard_mode": "explicit",
  },
  "fsdp 8, reduce-scatter": {"fsdp": 8, "reduce_scatter_gradients": True},
  "fsdp 2 x fsdp_transpose 2 x expert 2, reduce-scatter": {
    "fsdp": 2, "fsdp_transpose": 2, "expert": 2, "reduce_scatter_gradients": True,
  },
  "pipeline 2 x fsdp 4": {"pipeline": 2, "fsdp": 4, "num_layers_per_pipeline_stage": 2},
  "pipeline 2 x tensor 2 x fsdp 2, twice round, 4 parts": {
    "pipeline": 2, "tensor": 2, "fsdp": 2, "num_pipeline_microbatches": 4,
  },
  "pipeline 2 x fsdp 2 x fsdp_transpose 2, twice round, gathered once": {
    "pipeline": 2, "fsdp": 2, "fsdp_transpose": 2, "pipeline_fsdp_ag_once": True,
  },
  "pipeline 4 x data 2, delayed": {
    "pipeline": 4, "data": 2, "fsdp": 1, "pipeline_delay_activation_forwarding": True,
  },
  "pipeline 2 x context 2 x expert 2, two layers after it": {
    "pipeline": 2, "context": 2, "expert": 2, "fsdp": 1, "pipeline_parallel_layers": 2,
  },
}  # fmt: skip
# Four axes of two devices at a time, so that every pair of axes stands in some row.
FOURS = (
  ("tensor", "tensor_transpose", "expert", "pipeline"),
  ("fsdp", "tensor", "tensor_sequence", "context"),
  ("data", "fsdp_transpose", "tensor", "sequence"),
  ("fsdp_transpose", "tensor_transpose", "context", "pipeline"),
  ("fsdp", "sequence", "context", "expert"),
  ("tensor_transpose", "tensor_sequence", "sequence", "pipeline"),
  ("data", "fsdp", "tensor_transpose", "pipeline"),
  ("data", "fsdp_transpose", "tensor_sequence", "expert"),
  ("data", "fsdp", "fsdp_transpose", "context"),
)
BOTH = ("context 4 x expert 2, in order", "pipeline 2 x context 2 x expert 2, two layers after it")
ROUTED = (
  "fsdp 2 x fsdp_transpose 2 x expert 2, reduce-scatter", "expert 4 x fsdp 2",
  "expert 4 x tensor 2, gathered", "expert 2 x context 2 x fsdp_transpose 2, explicit",
)  # fmt: skip
WEIGHTS_PER_LAYER = 7  # query, key, value, out, gate, up, down
QUICK, SLOW = ("context 8",), pytest.mark.slow


def models_on(name):
  return tuple(MODELS) if name in BOTH else ("experts",) if name in ROUTED else ("dense",)


@pytest.mark.parametrize(
  ("model", "axes"),
  [
    pytest.param(model, axes, id=f"{model}, {name}", marks=[] if name in QUICK and model == "dense" else SLOW)
    for name, axes in AXES.items()
    for model in models_on(name)
  ],
)
def test_like_one_device(one_device, uncached, axes, model):
  np.testing.assert_allclose(curve(model, 8, **named(axes)), one_device(model), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fours", "steps"), [(FOURS[:2], 3), pytest.param(FOURS, STEPS, marks=pytest.mark.nightly)], ids=["two", "all"]
)
def test_four_axes_are_like_one_device(one_device, fours, steps):
  """In a process of its own, which has sixteen devices: they take turns on the cores, so that a step takes seconds."""
  environment = os.environ | flags(devices=16)
  command = [sys.executable, "-m", "tests.test_parallelism", "curves", str(len(fours)), str(steps)]
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
  curves = [json.loads(line) for line in done.stdout.splitlines()]
  assert len(curves) == len(fours)
  for axes, found in zip(fours, curves, strict=True):
    np.testing.assert_allclose(found, one_device("experts")[:steps], atol=1e-5, rtol=0, err_msg=" x ".join(axes))


@pytest.mark.slow
def test_a_pipeline_gathers_weights_at_each_tick_or_once():
  def gathers(once):
    axes = {"pipeline": 2, "fsdp": 4, "num_layers_per_pipeline_stage": 2, "pipeline_fsdp_ag_once": once}
    p = program(tiny(**MODELS["dense"], per_device_batch_size=1, **named(axes)), 8)
    lines = re.findall(r" all-gather\(.*", p.lower().compile().as_text())
    in_loop = sum("while/body" in line for line in lines)
    return in_loop, len(lines) - in_loop

  (each, before), (none, once) = gathers(False), gathers(True)
  assert each >= 2 * WEIGHTS_PER_LAYER, "forward and backward"
  assert (none, once) == (0, before + WEIGHTS_PER_LAYER)


def test_every_pair_of_axes_is_tried():
  tried = {frozenset(pair) for axes in FOURS for pair in itertools.combinations(axes, 2)}
  assert tried == {frozenset(pair) for pair in itertools.combinations(set(MESH_AXES) - {"diloco"}, 2)}


def test_the_document_lists_them():
  assert listed() in PAGE.read_text()


def listed():
  models = {("dense",): "", ("experts",): " (experts)", tuple(MODELS): " (also experts)"}
  lines = [f"- {name}{models[models_on(name)]}" for name in AXES] + [f"- {' x '.join(axes)}" for axes in FOURS]
  return "<!-- tried -->\n" + "\n".join(lines) + "\n<!-- /tried -->"


@pytest.fixture(scope="module")
def one_device():
  @functools.cache
  def found(model):
    losses = curve(model, 1)
    assert losses[-1] < losses[0] - 0.1, "a run must learn, or equal curves say little"
    return losses

  return found


def named(axes):
  """Short names of axes as keys; other keys stay."""
  return {
    key
    if "_parallel_" in key or "pipeline_" in key or key.startswith(("use_", "shard_", "reduce_"))
    else f"ici_{key}_parallelism": value
    for key, value in axes.items()
  }


def curve(model, devices, steps=STEPS, **changes):
  """Losses of the first `steps` of a run of ten."""
  rows = {"per_device_batch_size": ROWS / devices}
  run = {"steps": STEPS, "learning_rate": 3e-3, "warmup_steps_fraction": 0.1}
  p = program(tiny(**MODELS[model], **run, **rows, **changes), devices)
  state, found = p.init(), []
  for step in range(steps):
    state, metrics = p.step(state, jax.device_put(packed(step % 3, p.config), p.batch.inputs.sharding))
    found.append(float(metrics["loss"]))
  return np.array(found)


def packed(seed, config):
  """Rows of three documents of random lengths, the last of them padding."""
  rng, length = np.random.default_rng(seed), config.max_target_length
  tokens = rng.integers(0, config.vocab_size, (ROWS, length + 1), dtype=np.int32)
  cuts = np.sort(rng.integers(1, length, (ROWS, 2)), axis=1)[:, :, None]
  places = np.arange(length)
  segments = 1 + (places >= cuts).sum(1)
  positions = places - np.where(segments == 1, 0, np.where(segments == 2, cuts[:, 0], cuts[:, 1]))
  segments = np.where(segments == 3, 0, segments).astype(np.int32)
  weights = (segments > 0).astype(np.float32)
  return Batch(tokens[:, :-1], tokens[:, 1:], positions.astype(np.int32), segments, weights)


def test_shardings_are_types_where_they_are_explicit():
  """What is gathered and moved stands in the program before the compiler sees it."""
  axes = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
  auto, explicit = (program(tiny(**axes, shard_mode=mode), 8) for mode in ("auto", "explicit"))
  found = str(explicit.step.trace(explicit.state, explicit.batch).jaxpr)
  assert "reshard" in found
  assert "f32[48,80@tensor]" in found, "a weight that was gathered over FSDP, and is still split over tensor"
  assert "@tensor" not in str(auto.step.trace(auto.state, auto.batch).jaxpr)


REFUSED = {
  "an operation without a type": (
    {"fsdp": 8, "shard_mode": "explicit", "opt_type": "muon"},
    "shard_mode=explicit: decoder_block=llama2 with opt_type=muon has an operation that does not say",
  ),
  "stages that the compiler places": (
    {"pipeline": 2, "fsdp": 4, "shard_mode": "explicit"},
    "shard_mode=explicit is not supported: stages leave the placement",
  ),
  "rows that do not divide": (
    {"context": 8, "fsdp": 1, "max_target_length": 24},
    "max_target_length=24 is not a multiple of 16",
  ),
  "layers that need the order": (
    {"context": 8, "fsdp": 1, "mtp_num_layers": 1},
    "write context_parallel_load_balance=false",
  ),
}


@pytest.mark.parametrize(("axes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(axes, message):
  keys = {k if k.startswith(("max_", "mtp_", "shard_", "opt_")) else f"ici_{k}_parallelism": v for k, v in axes.items()}
  with pytest.raises(ConfigError) as error:
    program(tiny(**keys), 8)
  assert message in str(error.value)


if __name__ == "__main__" and sys.argv[1:2] == ["curves"]:
  for four in FOURS[: int(sys.argv[2])]:
    sizes = {"fsdp": 1} | dict.fromkeys(four, 2)
    print(json.dumps(curve("experts", 16, int(sys.argv[3]), **named(sizes)).tolist()), flush=True)
elif __name__ == "__main__":
  PAGE.write_text(re.sub("<!-- tried -->.*<!-- /tried -->", listed(), PAGE.read_text(), flags=re.DOTALL))
