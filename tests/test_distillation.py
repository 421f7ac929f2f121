"""Knowledge distillation: formulas, schedules, copied weights, teachers of every kind, meshes and resumption."""

import json
import math
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.data.teacher_outputs import SavedOutputs, TeacherOutputs
from maxtext.kernels.divergence import kl_divergence, top_k_kl_divergence, top_k_log_probs
from maxtext.training import save_teacher
from maxtext.training.loop import run_loop
from maxtext.training.objectives.configured import training_objective
from maxtext.training.objectives.distillation import KnowledgeDistillation, Ramp
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.save_teacher import save_teacher_outputs
from maxtext.training.teacher import TEACHER, start_from_teacher, teacher_config
from tests.chat_templates import VOCAB_SIZE, make_tokenizer
from tests.support import TINY, History, program, tiny
from tests.test_objective_seam import same

TEACHER_SIZE = {"base_num_decoder_layers": 4, "base_mlp_dim": 96}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
  """The folder of a teacher of four layers that was trained for a while, of the student's width."""
  folder = tmp_path_factory.mktemp("teacher")
  keys = TINY | TEACHER_SIZE | {
    "steps": 4, "enable_checkpointing": True, "base_output_directory": str(folder), "run_name": "teacher",
    "learning_rate": 1e-2, "init_weights_seed": 7, "enable_tensorboard": False,
  }  # fmt: skip
  maxtext.train(load_config(**keys))
  return folder / "teacher"


def student(taught, **changes):
  overrides = {"load_parameters_path": str(taught), **changes.pop("teacher", {})}
  return tiny(**({"teacher_overrides": overrides, "learning_rate": 1e-2} | changes))


def losses(config, devices=1, steps=3):
  """What some steps report, from the first parameters."""
  p, history = program(config, devices), History()
  frozen = p.init_frozen()
  state = start_from_teacher(p, p.init(), frozen[TEACHER]) if frozen else p.init()
  step = (lambda state, batch: p.step(state, batch, frozen)) if frozen else p.step
  state = run_loop(step, state, p.feed(), range(steps), [history])
  return history, state


def log_softmax(x):
  return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_divergence_is_its_formula(temperature):
  """In float64; the padding of a longer vocabulary is left out."""
  rng = np.random.default_rng(0)
  ours, theirs = rng.normal(0, 4, (2, 2, 5, 40))
  q, p = log_softmax(ours / temperature), log_softmax(theirs / temperature)
  expected = (np.exp(p) * (p - q)).sum(-1)
  np.testing.assert_allclose(kl_divergence(ours, theirs, temperature), expected, rtol=1e-4, atol=1e-6)
  padded = np.concatenate([theirs, np.full((2, 5, 8), 9.0)], -1)
  np.testing.assert_allclose(kl_divergence(ours, padded, temperature), expected, rtol=1e-4, atol=1e-6)


def test_a_top_k_bounds_the_divergence_and_is_it_with_all_tokens():
  rng = np.random.default_rng(1)
  ours, theirs = (jnp.float32(x) for x in rng.normal(0, 3, (2, 3, 7, 50)))
  whole, before = kl_divergence(ours, theirs, 2.0), -np.inf
  for k in (1, 4, 20, 49, 50):
    found = top_k_kl_divergence(ours, *top_k_log_probs(theirs, 2.0, k, 50), 2.0, 50)
    assert (found <= whole + 1e-5).all()
    assert (found >= before - 1e-5).all()
    before = found
  np.testing.assert_allclose(before, whole, rtol=1e-5, atol=1e-5)
  certain = jnp.zeros((1, 1, 50)).at[..., 3].set(80.0)
  for a, b in ((certain, theirs[:1, :1]), (theirs[:1, :1], certain), (certain, certain)):
    tokens = top_k_log_probs(b, 1.0, 4, 50)
    gradient = jax.grad(lambda x, tokens=tokens: top_k_kl_divergence(x, *tokens, 1.0, 50).sum())(a)
    assert np.isfinite(gradient).all()
    assert np.isfinite(top_k_kl_divergence(a, *tokens, 1.0, 50)).all()


def test_ramps_by_hand():
  linear, cosine = Ramp(1.0, 3.0, 10, "linear"), Ramp(1.0, 3.0, 10, "cosine")
  assert [float(linear(step)) for step in (0, 5, 10, 99)] == pytest.approx([1, 2, 3, 3])
  expected = [3 - 2 * (1 + math.cos(math.pi * step / 10)) / 2 for step in (0, 3, 10, 10)]
  assert [float(cosine(step)) for step in (0, 3, 10, 99)] == pytest.approx(expected)
  assert float(Ramp(0.5, 9.0, 10)(7)) == 0.5


def test_the_loss_is_its_parts(taught):
  """Against both models' logits and layers, in float64."""
  keys = {"distill_alpha": 0.3, "distill_temperature": 2.0, "distill_beta": 0.7, "distill_layer_indices": [0, 1]}
  config = student(taught, **keys, distill_feature_loss_type="l2", enable_dropout=False)
  objective = training_objective(config)
  p = program(config)
  state, frozen = p.init(), p.init_frozen()
  batch = next(p.feed()).batch
  figures = losses(config, steps=1)[0].figures[0]
  models = {
    "student": (p.model, state.params | state.buffers),
    "teacher": (p._frozen_models[TEACHER][1], frozen[TEACHER]),
  }
  logits, features = {}, {}
  for name, (model, params) in models.items():
    decoder = model.bind(params)
    hidden, auxiliary, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    logits[name] = np.float64(decoder.logits(hidden))
    features[name] = np.float64(auxiliary[0][0]["mixer_output"])[:2]
  q, t = log_softmax(logits["student"]), log_softmax(logits["teacher"])
  q2, t2 = log_softmax(logits["student"] / 2), log_softmax(logits["teacher"] / 2)
  targets = np.asarray(batch.targets)[..., None]
  hard, teacher = (-np.take_along_axis(x, targets, -1).mean() for x in (q, t))
  kl = (np.exp(t2) * (t2 - q2)).sum(-1).mean()
  distance = ((features["student"] - features["teacher"]) ** 2).mean()
  expected = {"hard_loss": hard, "teacher_loss": teacher, "kl": kl, "soft_loss": 4 * kl, "feature_loss": distance}
  assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=2e-5)
  assert figures["loss"] == pytest.approx(0.3 * 4 * kl + 0.7 * hard + 0.7 * distance, rel=2e-5)
  assert isinstance(objective, KnowledgeDistillation)


def test_a_student_that_is_its_teacher_has_no_soft_loss(taught):
  config = student(taught, **TEACHER_SIZE, distill_beta=1.0, distill_weights_copy_map={
    name: name for name in ("embedding", "groups", "final_norm", "head")
  })  # fmt: skip
  figures = losses(config, steps=1)[0].figures[0]
  assert abs(figures["kl"]) < 1e-6
  assert abs(figures["feature_loss"]) < 1e-6
  assert figures["hard_loss"] == pytest.approx(figures["teacher_loss"], abs=1e-6)


def test_without_weight_it_is_pre_training_bit_for_bit(taught):
  config = student(taught, distill_alpha=0.0)
  assert isinstance(training_objective(config), LanguageModeling)
  plain, ours = losses(tiny(learning_rate=1e-2)), losses(config)
  assert same(plain[1].params, ours[1].params)
  assert not isinstance(
    training_objective(student(taught, distill_alpha=0.0, distill_beta=0.1, distill_layer_indices=[1])),
    LanguageModeling,
  )


@pytest.mark.parametrize(
  ("devices", "changes"),
  [
    (1, {"num_vocab_tiling": 4}),
    (1, {"gradient_accumulation_steps": 4}),
    pytest.param(4, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, marks=pytest.mark.nightly),
    pytest.param(
      4, {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2, "num_vocab_tiling": 2}, marks=pytest.mark.nightly
    ),
    pytest.param(4, {"ici_fsdp_parallelism": 4, "shard_mode": "explicit"}, marks=pytest.mark.nightly),
    pytest.param(1, {"scan_layers": False}, marks=pytest.mark.nightly),
  ],
  ids=["tiles", "accumulation", "tensor", "context", "explicit", "unrolled"],
)
def test_it_does_not_depend_on_the_mesh(taught, devices, changes):
  keys = {"distill_beta": 0.5, "distill_layer_indices": [1], "distill_temperature": 2.0, "distill_alpha_end": 0.9,
          "distill_alpha_schedule": "cosine", "distill_alpha": 0.1, "steps": 3}  # fmt: skip
  expected, _ = losses(student(taught, **keys))
  rows = 8 // devices // changes.get("gradient_accumulation_steps", 1)
  found, _ = losses(student(taught, **keys, **changes, per_device_batch_size=rows), devices)
  for name in ("loss", "kl", "hard_loss", "feature_loss", "grad_norm", "distill_alpha"):
    ours, theirs = ([f[name] for f in history.figures] for history in (found, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_student_learns_what_its_teacher_knows(taught):
  """With the teacher's distribution alone, which the labels do not give."""
  history, _ = losses(student(taught, distill_alpha=1.0, steps=12, warmup_steps_fraction=0.0), steps=12)
  assert history.figures[-1]["kl"] < 0.5 * history.figures[0]["kl"]


def test_weights_are_copied_by_path_and_layer(taught):
  layers = "groups/0/layers/0"
  config = student(
    taught, distill_weights_copy_map={"embedding": "embedding", f"{layers}/mixer": [f"{layers}/mixer", [0, 3]]}
  )
  p = program(config)
  teacher = p.init_frozen()[TEACHER]
  before = p.init()
  state = start_from_teacher(p, before, teacher)
  mixers = [name for name in state.params if name.startswith(f"{layers}/mixer/")]
  assert mixers
  for name in mixers:
    assert np.array_equal(state.params[name], teacher[name][jnp.array([0, 3])])
  changed = {name for name in state.params if not np.array_equal(state.params[name], before.params[name])}
  assert changed <= {*mixers, *(name for name in state.params if name.startswith("embedding"))}
  assert any(name.startswith("embedding") for name in changed)


@pytest.mark.parametrize(
  ("copied", "message"),
  [
    ({"nothing": "embedding"}, "the student has no weight 'nothing'. It has"),
    ({"embedding": "nothing"}, "the teacher has no weight 'nothing/"),
    ({"groups": "groups"}, r"of the student is \[2, .*, and '.*' of the teacher is \[4, "),
    ({"groups": ["groups", [0, 9]]}, "has 4 layers, from 0 on"),
    ({"groups": ["groups", []]}, "must name a path of the teacher, or"),
    ({"groups": 3}, "must name a path of the teacher, or"),
  ],
)
def test_weights_that_cannot_be_copied(taught, copied, message):
  with pytest.raises(ConfigError, match=f"distill_weights_copy_map: .*{message}"):
    maxtext.train(student(taught, distill_weights_copy_map=copied, steps=1))


def test_only_the_named_weights_of_the_student_train(taught):
  config = student(taught, student_params_to_update=["mixer"])
  _, state = losses(config, steps=2)
  assert state.params.keys() == {name for name in state.params if "mixer" in name}
  assert same(state.buffers, program(config).init().buffers)


def test_where_the_teacher_comes_from(taught, monkeypatch):
  shared = {"dtype": "bfloat16", "ici_fsdp_parallelism": 4, "load_parameters_path": "mine"}
  found = teacher_config(student(taught, **shared))
  assert (found.base_num_decoder_layers, found.base_mlp_dim, found.vocab_size) == (4, 96, 128)
  assert (found.dtype.value, found.ici_fsdp_parallelism, found.load_parameters_path) == ("bfloat16", 4, str(taught))
  assert not found.teacher_overrides
  named = teacher_config(tiny(teacher_overrides={"model_name": "llama3.1-8b", "attention": "dot_product"}))
  assert (named.model_name, named.base_emb_dim, named.vocab_size, named.dtype.value) == (
    "llama3.1-8b", 4096, 128256, "float32"
  )  # fmt: skip
  assert teacher_config(student(taught, attention="dot_product")).attention == "dot_product"
  monkeypatch.setenv("M_STUDENT_OVERRIDES", "{base_mlp_dim: 16}")
  monkeypatch.setenv("M_MODEL_NAME", "gemma2-2b")
  assert teacher_config(student(taught)).base_mlp_dim == 96, "the environment is the student's"
  quantized = teacher_config(student(taught, quantization="int8", weight_sparsity_n=2, weight_sparsity_m=4))
  assert (quantized.quantization.value, quantized.weight_sparsity_n) == ("", None), "these are the student's own"
  changed = teacher_config(tiny(teacher_overrides={"base_num_decoder_layers": 8}))
  assert (changed.base_num_decoder_layers, changed.base_emb_dim) == (8, 48)


def test_keys_of_the_student_alone_win(tmp_path):
  (tmp_path / "run.yml").write_text(
    "student_overrides: {model_name: llama2-7b}\nteacher_overrides: {model_name: llama2-70b}\n"
  )
  config = load_config(tmp_path / "run.yml", model_name="gemma2-2b")
  assert (config.model_name, config.base_emb_dim) == ("llama2-7b", 4096)
  assert teacher_config(config).base_emb_dim == 8192


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"teacher_overrides": {"base_emb": 3}}, "teacher_overrides: 'base_emb' is not a key. Did you mean"),
    ({"student_overrides": {"nothing": 3}}, "'nothing' is not a key"),
    ({"distill_alpha": 1.5}, "distill_alpha=1.5 must be from 0 to 1"),
    ({"distill_alpha_end": -1.0, "distill_alpha_schedule": "linear"}, "distill_alpha_end=-1.0 must be from 0 to 1"),
    ({"distill_temperature": 0.0}, "distill_temperature=0.0 must be from 0.001"),
    ({"distill_beta": -1.0}, "distill_beta=-1.0 must be from 0"),
    ({"distill_beta_schedule": "cosine"}, "distill_beta_schedule=cosine needs distill_beta_end"),
    ({"student_params_to_update": ["a"], "trainable_parameters_mask": ["b"]}, "leave one of them out"),
    ({"student_params_to_update": ["("]}, "is not a regular expression"),
    ({"student_params_to_update": [3]}, "student_params_to_update: 3 is not a regular expression"),
    ({"student_overrides": {3: 4}}, "'3' is not a key"),
    ({"teacher_overrides": {"load_parameters_path": 3}}, "load_parameters_path=3 must be a path"),
  ],
)  # fmt: skip
def test_keys_that_are_wrong(changes, message):
  with pytest.raises(ConfigError, match=message):
    tiny(**changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"distill_beta": 1.0}, "the student has 2 layers, the teacher 4"),
    ({"distill_beta": 1.0, "distill_layer_indices": [2]}, "2 must be a layer of both models, 0 to 1"),
    ({"distill_beta": 1.0, "base_emb_dim": 64}, "the student's is 64, the teacher's 48"),
    ({"teacher": {"load_parameters_path": ""}}, "teacher_overrides names no parameters"),
    ({"teacher": {"load_parameters_path": "/nothing"}}, "teacher_overrides: .*/nothing"),
    ({"teacher": {"dtype": "nothing"}}, "teacher_overrides: dtype=nothing"),
    ({"teacher": {"ici_tensor_parallelism": 7}}, "ici_tensor_parallelism is a key of both models"),
    ({"teacher": {"vocab_size": 64}}, "vocab_size=64, and the data may have tokens up to 128"),
    ({"distill_beta": 1.0, "distill_layer_indices": []}, "names no layer"),
  ],
)
def test_teachers_that_are_wrong(taught, changes, message):
  with pytest.raises(ConfigError, match=message):
    maxtext.train(student(taught, steps=1, **changes))


def test_another_tokenizer_is_named(taught, tmp_path):
  make_tokenizer(tmp_path / "own")
  teacher = make_tokenizer(tmp_path / "other")
  text = json.loads((teacher / "tokenizer.json").read_text())
  vocabulary = text["model"]["vocab"]
  first, second = (next(name for name, token in vocabulary.items() if token == number) for number in (40, 41))
  vocabulary[first], vocabulary[second] = 41, 40
  taught = Path(shutil.copytree(taught, tmp_path / "teacher"))
  shutil.copytree(teacher, taught / "tokenizer")
  (taught / "tokenizer" / "tokenizer.json").write_text(json.dumps(text))
  (tmp_path / "data.jsonl").write_text('{"text": "the one"}\n' * 40)
  data = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": str(tmp_path / "data.jsonl")}
  own = {"tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path / "own"), "vocab_size": 512}
  config = student(taught, teacher={"vocab_size": 512}, steps=1, **data, **own, train_data_columns=["text"])
  with pytest.raises(
    ConfigError, match=rf"has another tokenizer than the data: token 40 is '{first}' there, and '{second}'"
  ):
    maxtext.train(config)


def test_the_command_says_what_is_missing(capsys):
  assert main(["distill", "steps=1"]) == 2
  assert "maxtext distill needs a teacher: write teacher_overrides=" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_bit_for_bit(taught, here):
  """The copied weights are those of the first start alone."""
  keys = dict(distill_weights_copy_map={"embedding": "embedding"}, enable_checkpointing=True, checkpoint_period=2,
              base_output_directory=str(here), enable_tensorboard=False, async_checkpointing=False,
              distill_alpha_end=0.9, distill_alpha_schedule="linear", learning_rate_schedule_steps=5)  # fmt: skip
  whole = maxtext.train(student(taught, **keys, run_name="whole", steps=5))

  class StopError(Exception): ...

  class AtThree(maxtext.Callback):
    def on_step(self, step, figures):
      if step == 3:
        raise StopError

  with pytest.raises(StopError):
    maxtext.train(student(taught, **keys, run_name="parts", steps=5), callbacks=[AtThree()])
  parts = maxtext.train(student(taught, **keys, run_name="parts", steps=5))
  assert same(whole.params, parts.params)


TEXT = ("the one and the other " * 7, "and the last\n\nis the one ", "one, the ")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """A tokenizer, data of it, and a teacher of its vocabulary."""
  folder = make_tokenizer(tmp_path_factory.mktemp("corpus"))
  lines = [json.dumps({"text": TEXT[n % 3] * (1 + n % 5)}) for n in range(300)]
  (folder / "train.jsonl").write_text("\n".join(lines))
  data = {
    "vocab_size": VOCAB_SIZE, "dataset_type": "grain", "grain_file_type": "jsonl", "tokenizer_type": "huggingface",
    "tokenizer_path": str(folder), "grain_train_files": str(folder / "train.jsonl"), "train_data_columns": ["text"],
    "grain_worker_count": 0, "num_epoch": 20, "packing": True,
  }  # fmt: skip
  run = {"steps": 3, "enable_checkpointing": True, "base_output_directory": str(folder), "run_name": "teacher"}
  maxtext.train(tiny(**data, **TEACHER_SIZE, **run, learning_rate=1e-2, enable_tensorboard=False))
  return folder, data


def offline(corpus, folder, **changes):
  keys = corpus[1] | {"offline_data_dir": folder and str(folder), "learning_rate": 1e-2, "per_device_batch_size": 1}
  keys |= {"teacher_overrides": {"load_parameters_path": str(corpus[0] / "teacher")}, "steps": 3}
  return tiny(**(keys | changes))


@pytest.fixture(scope="module")
def whole_vocabulary(corpus):
  """Everything that the teacher says of three batches, and of what the next would be."""
  folder = corpus[0] / "whole"
  save_teacher_outputs(offline(corpus, folder, steps=4), VOCAB_SIZE)
  return folder


def test_saved_outputs_of_all_tokens_are_the_teacher(corpus, whole_vocabulary, tmp_path):
  online, _ = losses(offline(corpus, None), devices=8)
  saved, _ = losses(offline(corpus, whole_vocabulary), devices=8)
  tiled, _ = losses(offline(corpus, whole_vocabulary, num_vocab_tiling=2), devices=8)
  for name in ("loss", "kl", "hard_loss", "grad_norm"):
    expected = [f[name] for f in online.figures]
    for found in (saved, tiled):
      np.testing.assert_allclose([f[name] for f in found.figures], expected, rtol=1e-5, atol=1e-6, err_msg=name)
  few = tmp_path / "few"
  save_teacher_outputs(offline(corpus, few), 4)
  bounded, _ = losses(offline(corpus, few), devices=8, steps=1)
  assert 0 < bounded.figures[0]["kl"] < online.figures[0]["kl"]
  assert bounded.figures[0]["hard_loss"] == pytest.approx(online.figures[0]["hard_loss"], rel=1e-6)


def test_saving_goes_on_where_it_stopped(corpus, whole_vocabulary, tmp_path, monkeypatch):
  monkeypatch.setattr(save_teacher, "_SHARD_BYTES", 1)
  folder = tmp_path / "parts"
  for steps in (1, 3, 3, 4):
    save_teacher_outputs(offline(corpus, folder, steps=steps), VOCAB_SIZE)
  whole = TeacherOutputs(str(whole_vocabulary), SavedOutputs.read(str(whole_vocabulary)), 1, 0)
  parts = TeacherOutputs(str(folder), SavedOutputs.read(str(folder)), 1, 0)
  assert whole.saved.rows == parts.saved.rows == 32
  assert (len(whole.saved.shards), len(parts.saved.shards)) == (1, 4)
  np.testing.assert_array_equal(whole._rows(list(range(32))), parts._rows(list(range(32))))


def test_rows_do_not_depend_on_the_batch_and_later_epochs_have_another_order(corpus, whole_vocabulary):
  def read(devices, state=None, **changes):
    p = program(offline(corpus, whole_vocabulary, num_epoch=2, **changes), devices)
    return list(p.feed(state))

  small, large = read(1, per_device_batch_size=4), read(8)
  assert (len(small), len(large)) == (16, 8)
  rows = [np.concatenate([np.asarray(fed.batch.inputs) for fed in fed_batches]) for fed_batches in (small, large)]
  np.testing.assert_array_equal(*rows)
  first, second = rows[0][:32], rows[0][32:]
  assert not np.array_equal(first, second)
  assert sorted(map(bytes, first)) == sorted(map(bytes, second))
  rest = read(8, small[7].iterator_state())
  np.testing.assert_array_equal(np.concatenate([np.asarray(fed.batch.inputs) for fed in rest]), second)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"max_target_length": 64}, "max_target_length=64, and offline_data_dir=.* was saved with max_target_length=32"),
    ({"distill_temperature": 2.0}, "distill_temperature=2.0, and .* was saved with distill_temperature=1.0"),
    ({"vocab_size": 128}, "has tokens of .* kinds, and vocab_size=128"),
    ({"distill_beta": 1.0}, "neither its layers nor its weights"),
    ({"distill_temperature_end": 2.0, "distill_temperature_schedule": "linear"}, "outputs at one temperature"),
    ({"offline_data_dir": "/nothing"}, "offline_data_dir=/nothing has no saved outputs"),
    ({"offline_data_dir": "/nothing", "distill_alpha": 0.0}, "offline_data_dir=/nothing has no saved outputs"),
    ({"offline_data_dir": __file__}, "manifest.json cannot be read .*Not a directory"),
    ({"offline_data_dir": "gs://bucket/outputs"}, "must be a folder on a disk"),
    ({"reuse_example_batch": 1}, "its batches are not repeated"),
    ({"per_device_batch_size": 5, "num_epoch": 1}, "has 32 rows, and a batch takes 40"),
  ],
)
def test_saved_outputs_that_do_not_fit(corpus, whole_vocabulary, changes, message):
  with pytest.raises(ConfigError, match=message):
    maxtext.train(offline(corpus, whole_vocabulary, **changes))


@pytest.mark.parametrize(
  ("changes", "top_k", "message"),
  [
    ({"distill_temperature": 2.0}, VOCAB_SIZE, "was begun with temperature=1.0, and this is 2.0"),
    ({}, 3, "was begun with top_k"),
    ({}, 0, "--top-k 0: from 1 to"),
    ({"num_epoch": 20, "add_eos": False}, VOCAB_SIZE, "has outputs of other data"),
    ({"data_shuffle_seed": 5}, VOCAB_SIZE, "has outputs of other data, or of another order"),
    ({"teacher_overrides": {}}, 3, "needs offline_data_dir=FOLDER, to write to, and teacher_overrides"),
    ({"teacher_overrides": {"base_emb_dim": 48}}, 3, "names no parameters"),
  ],
)  # fmt: skip
def test_outputs_that_cannot_be_saved(corpus, whole_vocabulary, changes, top_k, message):
  with pytest.raises(ConfigError, match=message):
    save_teacher_outputs(offline(corpus, whole_vocabulary, **changes), top_k)


def test_damaged_outputs_are_named(corpus, whole_vocabulary, tmp_path):
  folder = Path(shutil.copytree(whole_vocabulary, tmp_path / "damaged"))
  (file,) = folder.glob("*.array_record")
  file.write_bytes(file.read_bytes()[: -len(file.read_bytes()) // 2])
  with pytest.raises(RunError, match=r"teacher-00000.array_record"):
    maxtext.train(offline(corpus, folder))
  content = bytearray((whole_vocabulary / file.name).read_bytes())
  content[len(content) // 2] ^= 4
  file.write_bytes(content)
  with pytest.raises(RunError, match=r"teacher-00000.array_record is damaged"):
    maxtext.train(offline(corpus, folder))
  manifest = json.loads((folder / "manifest.json").read_text())
  outside = manifest | {"shards": [["../../x.array_record", 32]]}
  wrong = [manifest | change for change in ({"top_k": "4"}, {"top_k": -1}, {"length": "32"}, {"schema": 7})]
  for text in ("{", "null", '"x"', "[]", *map(json.dumps, wrong)):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest.json cannot be read"):
      maxtext.train(offline(corpus, folder))
  (folder / "manifest.json").write_text(json.dumps(outside))
  with pytest.raises(ConfigError, match=r"leads out of the folder"):
    maxtext.train(offline(corpus, folder))


def test_a_full_disk_ends_the_saving(corpus, tmp_path):
  """A limit of the size of files, as a disk would be full in the middle of a shard."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
  try:
    with pytest.raises(RunError, match=r"offline_data_dir=.* cannot be written: .*File too large"):
      save_teacher_outputs(offline(corpus, tmp_path / "full", steps=1), VOCAB_SIZE)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  save_teacher_outputs(offline(corpus, tmp_path / "full", steps=1), VOCAB_SIZE)
  assert SavedOutputs.read(str(tmp_path / "full")).rows == 8


def test_other_outputs_are_not_resumed_with(corpus, whole_vocabulary, tmp_path):
  folder = Path(shutil.copytree(whole_vocabulary, tmp_path / "grown"))
  p = program(offline(corpus, folder), 8)
  fed = next(p.feed())
  save_teacher_outputs(offline(corpus, folder, steps=5), VOCAB_SIZE)
  with pytest.raises(
    ConfigError, match="The data of the checkpoint is not the data of this run: rows was 32 and is 40"
  ):
    next(program(offline(corpus, folder), 8).feed(fed.iterator_state()))
  online = next(program(offline(corpus, None), 8).feed())
  with pytest.raises(ConfigError, match="The data of the checkpoint is not the data of this run"):
    next(program(offline(corpus, folder), 8).feed(online.iterator_state()))


def test_padded_vocabularies_are_compared_on_what_both_have(corpus, tmp_path):
  """Online and offline alike, for a student with more rows than its teacher."""
  folder, keys = tmp_path / "padded", {"vocab_size": VOCAB_SIZE + 64}
  save_teacher_outputs(offline(corpus, folder, **keys), VOCAB_SIZE)
  online, _ = losses(offline(corpus, None, **keys), devices=8, steps=1)
  saved, _ = losses(offline(corpus, folder, **keys), devices=8, steps=1)
  assert saved.figures[0]["kl"] == pytest.approx(online.figures[0]["kl"], rel=1e-5)


@pytest.mark.nightly
def test_saving_on_an_explicit_mesh(corpus, whole_vocabulary, tmp_path):
  keys = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "shard_mode": "explicit"}
  save_teacher_outputs(offline(corpus, tmp_path / "explicit", **keys, steps=1), 8)
  found = SavedOutputs.read(str(tmp_path / "explicit"))
  rows = TeacherOutputs(str(tmp_path / "explicit"), found, 1, 0)._rows(list(range(8)))
  whole = TeacherOutputs(str(whole_vocabulary), SavedOutputs.read(str(whole_vocabulary)), 1, 0)._rows(list(range(8)))
  np.testing.assert_array_equal(rows["inputs"], whole["inputs"])
  np.testing.assert_allclose(rows["teacher_log_probs"], whole["teacher_log_probs"][..., :8], atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_several_processes_save_one_folder(corpus, whole_vocabulary, here):
  words = [f"{key}={value}" for key, value in (TINY | corpus[1] | {"steps": 2, "per_device_batch_size": 4}).items()]
  words += ["offline_data_dir=outputs", f"teacher_overrides={{load_parameters_path: {corpus[0] / 'teacher'}}}"]
  command = [
    sys.executable,
    "-m",
    "maxtext.cli",
    "launch",
    "--processes",
    "2",
    "--devices",
    "1",
    "--",
    "data",
    "teacher",
  ]
  done = subprocess.run([*command, *words, "--top-k", "512"], capture_output=True, text=True, cwd=here, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  found = TeacherOutputs("outputs", SavedOutputs.read("outputs"), 1, 0)
  assert (found.saved.rows, found.saved.rows_per_batch) == (16, 8)
  whole = TeacherOutputs(str(whole_vocabulary), SavedOutputs.read(str(whole_vocabulary)), 1, 0)
  rows, expected = found._rows(list(range(16))), whole._rows(list(range(16)))
  np.testing.assert_array_equal(rows["inputs"], expected["inputs"])
  np.testing.assert_allclose(rows["teacher_log_probs"], expected["teacher_log_probs"], atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_commands_from_a_teacher_to_a_student(corpus, here, capsys):
  """By the commands; the student needs no teacher, evaluates on other data, and resumes bit for bit."""
  folder, data = corpus
  words = [f"{key}={value}" for key, value in (TINY | data | {"steps": 6, "per_device_batch_size": 1}).items()]
  words += ["offline_data_dir=outputs", "base_output_directory=runs"]
  teacher = f"teacher_overrides={{load_parameters_path: {folder / 'teacher'}}}"
  assert main(["data", "teacher", *words, teacher, "--top-k", "16"]) == 0
  assert "48 rows of teacher outputs in" in capsys.readouterr().out
  evaluation = [
    f"grain_eval_files={folder / 'train.jsonl'}",
    "eval_data_columns=[text]",
    "eval_interval=2",
    "eval_steps=1",
  ]
  student = [
    "distill",
    *words,
    *evaluation,
    "enable_checkpointing=true",
    "checkpoint_period=2",
    "enable_tensorboard=false",
  ]
  assert main([*student, "run_name=whole"]) == 0
  assert main([*student, "run_name=parts", "steps=4", "learning_rate_schedule_steps=6"]) == 0
  assert main([*student, "run_name=parts", "learning_rate_schedule_steps=6"]) == 0
  lines = {
    name: [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    for name in ("whole", "parts")
  }
  whole, parts = ({line["step"]: line for line in lines[name] if "kl" in line} for name in ("whole", "parts"))
  assert whole.keys() == parts.keys()
  assert [line["loss"] for line in whole.values()] == [line["loss"] for line in parts.values()]
  assert any("eval_loss" in line for line in lines["whole"])
  assert (here / "runs" / "whole" / "tokenizer" / "tokenizer.json").exists()
