"""Learn-to-init: weights as maps of a teacher's, what trains, meshes, resumption, and the student that comes out."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import maxtext
from maxtext import ConfigError
from maxtext.cli.main import main
from maxtext.training.loop import run_loop
from maxtext.training.teacher import TEACHER, start_from_teacher
from tests.support import TINY, History, program, tiny
from tests.test_objective_seam import same

STUDENT = TINY | {
  "base_emb_dim": 16, "base_mlp_dim": 24, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 4,
  "learning_rate": 1e-2, "enable_tensorboard": False,
}  # fmt: skip
TEACHER_SIZE = {"base_emb_dim": 24, "base_mlp_dim": 40, "head_dim": 8, "base_num_decoder_layers": 4}
EXPERTS = {
  "decoder_block": "deepseek", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "q_lora_rank": 8,
  "attention_type": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
  "first_num_dense_layers": 1, "shared_experts": 1, "routed_bias": True, "routed_bias_update_rate": 0.1,
  "routed_score_func": "sigmoid", "base_num_kv_heads": 4, "head_dim": 128, "rope_type": "default", "rope_factor": 40,
  "original_max_position_embeddings": 4096,
}  # fmt: skip
LAYER = "groups/0/layers/0"


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
  """The folder of a teacher that is larger than its student in every dimension."""
  folder = tmp_path_factory.mktemp("teacher")
  run = {"steps": 3, "enable_checkpointing": True, "base_output_directory": str(folder), "run_name": "teacher"}
  maxtext.train(tiny(**(STUDENT | TEACHER_SIZE | run | {"init_weights_seed": 7})))
  return folder / "teacher"


def phase(taught, **changes):
  """A configuration of the phase."""
  overrides = {"load_parameters_path": str(taught), **changes.pop("teacher", {})}
  return tiny(**(STUDENT | {"teacher_overrides": overrides, "learn_to_init_mode": True} | changes))


def started(config, devices=1):
  """The program, the teacher's parameters and the first state."""
  p = program(config, devices)
  frozen = p.init_frozen()
  return p, frozen, start_from_teacher(p, p.init(), frozen[TEACHER])


def trained(config, devices=1, steps=3):
  """What some steps report, and the last state."""
  (p, frozen, state), history = started(config, devices), History()
  state = run_loop(lambda state, batch: p.step(state, batch, frozen), state, p.feed(), range(steps), [history])
  return history, state


def random_maps(p, seed=0):
  rng = np.random.default_rng(seed)
  return {name: jnp.float32(rng.normal(size=struct.shape)) for name, struct in p.mapped.params.items()}


def test_a_weight_is_the_product_of_its_maps_and_the_teachers(taught):
  """In float64: A W B' of the flattened weight, one vector's map, and tokens by their number."""
  p, frozen, _ = started(phase(taught, vocab_size=136, base_num_decoder_layers=3))
  teacher, maps = frozen[TEACHER], random_maps(p)
  found = p.mapped.weights(maps, teacher)
  assert found.keys() == p.model.params.keys()

  def of(path, name, inner):
    array = np.float64(maps[f"maps/{path}/{name}"])
    return array.reshape(*array.shape[:1], inner, -1) if path.startswith("groups") else array.reshape(inner, -1)

  layers = [0, 2, 3]  # of four, evenly spaced: 0, 1.5, 3, and halves to the even number
  sizes = {"query": (16, 16), "key": (16, 8), "out": (16, 16)}
  for module, (inputs, outputs) in sizes.items():
    path = f"{LAYER}/mixer/{module}/weight"
    a, b = of(path, "input", inputs), of(path, "output", outputs)
    flat = np.float64(teacher[path])[layers].reshape(3, a.shape[-1], b.shape[-1])
    expected = np.einsum("lsi,lio,lto->lst", a, flat, b).reshape(found[path].shape)
    np.testing.assert_allclose(found[path], expected, rtol=1e-4, atol=1e-4, err_msg=path)
  norm = next(path for path in found if path.startswith(LAYER) and path.endswith("scale"))
  expected = np.einsum("lst,lt->ls", of(norm, "output", 16), np.float64(teacher[norm])[layers])
  np.testing.assert_allclose(found[norm], expected, rtol=1e-4, atol=1e-4)
  table = np.float64(teacher["embedding/table"]) @ of("embedding/table", "output", 16).T
  np.testing.assert_allclose(found["embedding/table"][:128], table, rtol=1e-4, atol=1e-4)
  assert not np.any(found["embedding/table"][128:]), "the teacher has no such tokens"
  head = of("head/weight", "input", 16) @ np.float64(teacher["head/weight"])
  np.testing.assert_allclose(found["head/weight"][:, :128], head, rtol=1e-4, atol=1e-4)


def test_a_general_map_is_over_all_dimensions(taught):
  p, frozen, state = started(phase(taught, lti_use_general_linear_map=True))
  maps, path = random_maps(p), f"{LAYER}/mixer/query/weight"
  found = p.mapped.weights(maps, frozen[TEACHER])[path]
  whole = np.float64(maps[f"maps/{path}/whole"]).reshape(2, 16 * 4 * 4, 24 * 4 * 8)
  flat = np.float64(frozen[TEACHER][path])[[0, 3]].reshape(2, -1)
  np.testing.assert_allclose(found.reshape(2, -1), np.einsum("lst,lt->ls", whole, flat), rtol=1e-4, atol=1e-3)
  _, _, factored = started(phase(taught))
  assert same(factored.buffers, state.buffers), "both begin with the same weights"
  history, _ = trained(phase(taught, lti_use_general_linear_map=True, distill_alpha=1.0, steps=6), steps=6)
  assert history.figures[-1]["kl"] < history.figures[0]["kl"]


@pytest.mark.parametrize("general", [False, True], ids=["factored", "general"])
def test_a_student_of_the_same_size_starts_as_its_teacher(taught, general):
  config = phase(taught, **TEACHER_SIZE | {"base_mlp_dim": 40, "base_emb_dim": 24}, lti_use_general_linear_map=general)
  p, frozen, state = started(config)
  assert same({name: state.buffers[name] for name in p.model.params}, frozen[TEACHER])
  if not general:
    figures = trained(config, steps=1)[0].figures[0]
    assert abs(figures["kl"]) < 1e-6
    assert figures["hard_loss"] == pytest.approx(figures["teacher_loss"], abs=1e-6)


def test_a_wider_student_starts_as_the_same_function(taught):
  """Copies of a neuron share its outgoing weight."""
  wider = TEACHER_SIZE | {"base_mlp_dim": 80, "base_emb_dim": 48}
  assert abs(trained(phase(taught, **wider), steps=1)[0].figures[0]["kl"]) < 1e-6


def test_experts_and_their_biases_start_as_the_teachers():
  """Experts are picked like layers, and a buffer that no gradient touches begins with the teacher's values."""

  def started_with_bias(**changes):
    p = program(phase("", **EXPERTS | changes, teacher={"num_experts": 4, "init_weights_seed": 5}))
    teacher = p.init_frozen()[TEACHER]
    (bias,) = (name for name in p.model.buffers if name.endswith("selection_bias"))
    teacher[bias] = jnp.float32([[0.1, 0.2, 0.3, 0.4]])
    return p, teacher, start_from_teacher(p, p.init(), teacher).buffers

  p, teacher, equal = started_with_bias()
  assert same({name: equal[name] for name in p.model.weight_names}, teacher)
  _, _, fewer = started_with_bias(num_experts=2)
  for name in (name for name in fewer if "/experts/" in name or "/router/" in name):
    axis = p.model.logical_axes[name].index("expert" if "/experts/" in name else "router")
    np.testing.assert_array_equal(fewer[name], np.take(teacher[name], [0, 3], axis), err_msg=name)


def test_the_maps_train_and_the_loss_falls(taught):
  config = phase(taught, distill_alpha=1.0, steps=12, warmup_steps_fraction=0.0)
  p, frozen, first = started(config)
  begun = {name: np.asarray(value) for name, value in first.params.items()}
  history, state = trained(config, steps=12)
  assert history.figures[-1]["kl"] < 0.7 * history.figures[0]["kl"]
  assert all(name.startswith("maps/") for name in state.params)
  assert not [name for name in state.params if np.array_equal(state.params[name], begun[name])], "every map trains"
  weights = p.mapped.weights(state.params, frozen[TEACHER])
  for name, weight in weights.items():
    np.testing.assert_allclose(state.buffers[name], weight, rtol=1e-6, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_the_loss_by_the_maps(taught):
  """Against finite differences, along a random direction, with SGD's update as the gradient."""
  config = phase(taught, opt_type="sgd", learning_rate=1.0, warmup_steps_fraction=0.0, gradient_clipping_threshold=0.0,
                 distill_student_weights_share_map={f"{LAYER}/mixer": [f"{LAYER}/mixer", [1, 1]]})  # fmt: skip
  p, frozen, state = started(config)
  batch, maps = next(p.feed()).batch, {name: np.asarray(value) for name, value in state.params.items()}
  step = jax.jit(p.step.__wrapped__)

  def loss(maps):
    return float(step(p.start_from(state, maps, state.buffers), batch, frozen)[1]["loss"])

  updated = step(state, batch, frozen)[0].params
  gradient = {name: value - np.asarray(updated[name]) for name, value in maps.items()}
  norm = sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()) ** 0.5
  h = 0.05 / norm
  up, down = (loss({name: maps[name] + sign * h * g / norm for name, g in gradient.items()}) for sign in (1, -1))
  assert (up - down) / (2 * h) == pytest.approx(norm, rel=2e-2)


def test_copied_shared_and_untrained_weights(taught):
  mixer = f"{LAYER}/mixer"
  norms = [name for name in program(phase(taught)).model.params if name.startswith(LAYER) and name.endswith("scale")]
  config = phase(
    taught,
    base_emb_dim=24,
    distill_weights_copy_map={"embedding": "embedding", norms[0]: [norms[0], [1, 2]]},
    distill_student_weights_share_map={
      f"{mixer}/query": [f"{mixer}/query", [1, 1]], f"{mixer}/value": f"{mixer}/key", norms[1]: norms[0]
    },
    student_params_to_update=["layers", "head"],
  )  # fmt: skip
  p, frozen, first = started(config)
  begun = {name: np.asarray(value) for name, value in first.buffers.items()}
  _, state = trained(config)
  teacher, found = frozen[TEACHER], {name: np.asarray(value) for name, value in state.buffers.items()}
  for weights in (begun, found):
    np.testing.assert_array_equal(weights["embedding/table"], teacher["embedding/table"])
    np.testing.assert_array_equal(weights[norms[0]], teacher[norms[0]][jnp.array([1, 2])])
    np.testing.assert_array_equal(weights[norms[1]], weights[norms[0]])
    np.testing.assert_array_equal(weights[f"{mixer}/value/weight"], weights[f"{mixer}/key/weight"])
    np.testing.assert_array_equal(weights[f"{mixer}/query/weight"][0], weights[f"{mixer}/query/weight"][1])
  still = {name for name in p.model.weight_names if np.array_equal(begun[name], found[name])}
  assert still == {"embedding/table", "final_norm/scale", *norms[:2]}
  mapped = {name.removeprefix("maps/").rpartition("/")[0] for name in state.params}
  assert mapped == {*p.model.weight_names} - still - {f"{mixer}/value/weight"}


SHARED = {"steps": 3, "distill_student_weights_share_map": {f"{LAYER}/mixer/key": f"{LAYER}/mixer/value"}}


@pytest.fixture(scope="module")
def alone(taught):
  """What one device reports, and its last state."""
  return trained(phase(taught, **SHARED))


@pytest.mark.parametrize(
  ("devices", "changes"),
  [
    (4, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}),
    pytest.param(4, {"ici_fsdp_parallelism": 4, "shard_mode": "explicit"}, marks=pytest.mark.nightly),
    pytest.param(2, {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2}, marks=pytest.mark.nightly),
    pytest.param(1, {"gradient_accumulation_steps": 4}, marks=pytest.mark.nightly),
    pytest.param(1, {"scan_layers": False, "num_vocab_tiling": 2}, marks=pytest.mark.nightly),
  ],
  ids=["tensor", "explicit", "pipeline", "accumulation", "unrolled"],
)
def test_it_does_not_depend_on_the_mesh(taught, alone, request, devices, changes):
  if devices > 1:
    request.getfixturevalue("uncached")
  expected, one = alone
  rows = 8 // devices // changes.get("gradient_accumulation_steps", 1)
  found, many = trained(phase(taught, **SHARED, **changes, per_device_batch_size=rows), devices)
  for name in ("loss", "kl", "hard_loss", "grad_norm"):
    ours, theirs = ([f[name] for f in history.figures] for history in (found, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)
  for name in one.buffers:
    np.testing.assert_allclose(many.buffers[name], one.buffers[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_maps_are_split_over_the_mesh(taught):
  """A map of a dimension over `tensor` is split over it, and over `fsdp` along the teacher's."""
  p = program(phase(taught, ici_fsdp_parallelism=2, ici_tensor_parallelism=2), 4)
  found = {name: struct.sharding.spec for name, struct in p.mapped.params.items()}
  assert found[f"maps/{LAYER}/mixer/query/weight/output"] == PartitionSpec(None, "tensor", None, "fsdp", None)
  assert found[f"maps/{LAYER}/mixer/query/weight/input"] == PartitionSpec(None, "fsdp", None)


@pytest.mark.slow
def test_the_phase_resumes_bit_for_bit_and_its_weights_start_a_student(taught, uncached, here, capsys):
  keys = {"enable_checkpointing": True, "checkpoint_period": 4, "async_checkpointing": False, "eval_interval": 5,
          "eval_steps": 2, "base_output_directory": "runs", "per_device_batch_size": 1, "steps": 5,
          "distill_student_weights_share_map": {f"{LAYER}/mixer/key": f"{LAYER}/mixer/value"}}  # fmt: skip
  whole = maxtext.train(phase(taught, **keys, run_name="whole"))
  shutil.copytree("runs/whole", "runs/parts")
  shutil.rmtree("runs/parts/checkpoints/5")
  config = phase(taught, **keys, run_name="parts")
  parts = maxtext.train(config)
  assert "resuming from" in (text := capsys.readouterr().out)
  maps = sum(struct.size for struct in program(config).mapped.params.values())
  assert f"by maps with {maps:,}, which train, on 8 cpu" in text
  for name in ("params", "buffers"):
    assert same(getattr(whole, name), getattr(parts, name))
  begin = ["distill", "runs/parts", f"teacher_overrides={{load_parameters_path: {taught}}}", "run_name=next", "steps=1"]
  again = [f"{key}={TINY[key]}" for key in ("max_target_length", "dataset_type", "dtype", "jax_cache_dir")]
  evaluation = ["per_device_batch_size=1", "learning_rate=0", "eval_interval=1", "eval_steps=2"]
  assert main([*begin, *again, *evaluation]) == 0
  losses = [
    json.loads((here / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    for name in ("whole", "next")
  ]
  losses.append(maxtext.evaluate("runs/parts", eval_steps=2)["loss"])
  assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"teacher_overrides": {}}, "learn_to_init_mode=True is not supported: it maps the weights of a teacher"),
    ({"offline_data_dir": "saved"}, "learn_to_init_mode=True .* and no offline_data_dir"),
    ({"load_parameters_path": "other"}, "learn_to_init_mode=True .* write load_parameters_path=''"),
    ({"lora_rank": 4}, "learn_to_init_mode=True .* leave lora_rank and use_qk_clip out"),
    ({"learn_to_init_mode": False, "lti_use_general_linear_map": True},
     "lti_use_general_linear_map=True .* write learn_to_init_mode=true"),
    ({"learn_to_init_mode": False, "distill_student_weights_share_map": {"a": "b"}},
     "distill_student_weights_share_map=.* write learn_to_init_mode=true"),
  ],
)  # fmt: skip
def test_keys_that_contradict_each_other(changes, message):
  with pytest.raises(ConfigError, match=message):
    phase("teacher", **changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"distill_student_weights_share_map": {"nothing": "head"}},
     "distill_student_weights_share_map: the student has no weight 'nothing'. It has"),
    ({"distill_student_weights_share_map": {"head": "nothing"}}, "the student has no weight 'nothing/weight'. It has"),
    ({"distill_student_weights_share_map": {"head": "embedding"}}, "the student has no weight 'embedding/weight'"),
    ({"distill_student_weights_share_map": {"embedding/table": "head/weight"}},
     r"'embedding/table' of the student is \[128, 16\], and 'head/weight' of the student is \[16, 128\]"),
    ({"distill_student_weights_share_map": {"head": "head"}}, "'head/weight' shares with itself"),
    ({"distill_student_weights_share_map": {"head": ["head"]}}, "must name a path of the student, or"),
    ({"distill_student_weights_share_map": {
      f"{LAYER}/mixer/key": f"{LAYER}/mixer/value", f"{LAYER}/mixer/value": f"{LAYER}/mixer/key"}},
     "which itself shares"),
    ({"distill_student_weights_share_map": {f"{LAYER}/mixer/key": f"{LAYER}/mixer/value"}, "head_dim": 8,
      "base_emb_dim": 24, "distill_weights_copy_map": {f"{LAYER}/mixer/key": [f"{LAYER}/mixer/key", [0, 1]]}},
     "distill_student_weights_share_map: '.*key/weight' is also copied, by distill_weights_copy_map"),
    ({"distill_weights_copy_map": {"embedding": "embedding"}}, "distill_weights_copy_map: 'embedding/table' of the"),
    ({"decoder_block": "qwen3", "use_qk_norm": True, "teacher": {"decoder_block": "llama2", **TEACHER_SIZE}},
     "learn_to_init_mode=true: the teacher has no weight '.*norm/scale'. Name what it has in its place"),
    ({"student_params_to_update": ["nothing"]}, "student_params_to_update=.* leaves nothing to train"),
    ({"base_emb_dim": 24, "base_mlp_dim": 40, "head_dim": 8, "base_num_decoder_layers": 4, "distill_weights_copy_map":
      {name: name for name in ("embedding", "groups", "final_norm", "head")}},
     "learn_to_init_mode=true leaves nothing to train: distill_weights_copy_map names all weights"),
  ],
)  # fmt: skip
def test_weights_that_do_not_fit(taught, changes, message):
  with pytest.raises(ConfigError, match=message):
    program(phase(taught, **changes))


def test_weights_of_other_dimensions_are_named():
  message = r"'.*mixer/query/weight' has dimensions \['layers', 'embed', .* and \['layers', 'latent', .*same family"
  with pytest.raises(ConfigError, match=message):
    program(phase("", **EXPERTS | {"q_lora_rank": 0}, teacher={"q_lora_rank": 8}))


def test_general_maps_that_do_not_fit_are_refused_up_front(taught, monkeypatch):
  monkeypatch.setattr("maxtext.training.preflight.host_memory", lambda: 10_000_000)
  with pytest.raises(ConfigError, match=r"GB\. Write lti_use_general_linear_map=false\. Take a smaller model"):
    maxtext.train(phase(taught, steps=1, lti_use_general_linear_map=True))


def test_an_objective_without_the_teacher_is_refused(taught):
  from maxtext.training.objectives.language_modeling import LanguageModeling

  with pytest.raises(ConfigError, match="learn_to_init_mode=true needs the teacher of the configured objective"):
    maxtext.train(phase(taught, steps=1), objective=LanguageModeling())
