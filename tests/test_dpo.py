"""Preference optimization: from files of pairs to a loss, with a reference on disk or in memory, on any mesh."""

import json
import math

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.configs.types.post_training import DpoLossType
from maxtext.configs.unsupported import keys_with_no_effect
from maxtext.data.options import tokenizer_options
from maxtext.data.reference_log_probs import PAIR_RECORD, REFERENCE
from maxtext.data.sources.preference_encoding import _common_prompt
from maxtext.data.tokenizers import load_tokenizer
from maxtext.mesh.devices import make_mesh
from maxtext.training.loop import run_loop
from maxtext.training.objectives.preference import PreferenceOptimization, pair_sums
from maxtext.training.objectives.preference_losses import (
  KTO,
  PAIR_LOSSES,
  REFERENCE_FREE,
  LossParameters,
  PairLogProbs,
  kto,
)
from maxtext.training.program import Program
from maxtext.training.reference import attach_reference, parameter_digest
from tests.chat_templates import TEMPLATES, VOCAB_SIZE, make_tokenizer
from tests.support import TINY, History

WORDS = ("the other", "the\n\nlast", "is", "and the one, and the other", "the one, the one")


def pair(number):
  """Answers of several lengths; some prompts have an earlier turn."""
  earlier = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "the"}] if number % 3 == 0 else []
  return {
    "prompt": [*earlier, {"role": "user", "content": f"the one {number}?" * (1 + number % 4)}],
    "chosen": [{"role": "assistant", "content": WORDS[number % 5]}],
    "rejected": [{"role": "assistant", "content": WORDS[(number + 1 + number % 3) % 5] + " no" * (number % 2)}],
  }


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer, a template, and files of 48 pairs and 16 others."""
  path = make_tokenizer(tmp_path_factory.mktemp("dpo"))
  (path / "chatml.jinja").write_text(TEMPLATES["chatml"])
  write(path / "train.jsonl", map(pair, range(48)))
  write(path / "eval.jsonl", map(pair, range(100, 116)))
  return path


def dpo_keys(folder, **changes):
  keys = TINY | {
    "use_dpo": True, "vocab_size": VOCAB_SIZE, "max_target_length": 256, "per_device_batch_size": 2, "dpo_beta": 0.5,
    "tokenizer_type": "huggingface", "tokenizer_path": str(folder), "chat_template_path": str(folder / "chatml.jinja"),
    "grain_train_files": str(folder / "train.jsonl"), "grain_eval_files": str(folder / "eval.jsonl"),
    "grain_worker_count": 0, "enable_checkpointing": False, "dataset_type": "grain", "learning_rate": 1e-2,
    "enable_data_shuffling": False, "enable_tensorboard": False,
  }  # fmt: skip
  return keys | changes


def files(folder):
  return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def numbers(folder, split="train"):
  (path,) = folder.glob(f"{split}-*.bin")
  return np.frombuffer(path.read_bytes(), PAIR_RECORD)["log_probs"]


def losses(keys, reference, devices=1, steps=3):
  """Losses and figures of some steps, from the initial parameters."""
  config = load_config(**keys, steps=steps)
  p = Program.of(config, make_mesh(config, jax.devices()[:devices]))
  state, history = p.init(), History()
  attach_reference(p, str(reference), lambda: state.params | state.buffers)
  frozen = p.init_frozen()
  step = (lambda state, batch: p.step(state, batch, frozen)) if frozen else p.step
  run_loop(step, state, p.feed(), range(steps), [history])
  return history


def test_the_names_of_the_losses_are_the_values_of_the_key():
  assert set(DpoLossType.__args__) == {*PAIR_LOSSES, KTO}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_key_of_the_reference_has_no_effect_on_losses_without_one(folder, name):
  config = load_config(**dpo_keys(folder, dpo_loss_type=[name], precompute_ref_log_probs=False))
  found = keys_with_no_effect(config, ["precompute_ref_log_probs"])
  assert bool(found) == (name in REFERENCE_FREE)
  assert PreferenceOptimization.of(config).needs_reference == (not found)


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_their_formulas(seed):
  """In float64, written as the papers do."""
  rng = np.random.default_rng(seed)
  w, l, rw, rl = -rng.uniform(1, 60, (4, 500))
  nw, nl = rng.integers(1, 40, (2, 500)).astype(float)
  beta, e, gamma = 0.3, 0.2, 0.7

  def log_sigmoid(x):
    return -np.logaddexp(0, -x)

  d = (w - rw) - (l - rl)
  mean = (w - rw) / nw - (l - rl) / nl
  odds = [np.log(np.exp(x) / (1 - np.exp(x))) for x in (w / nw, l / nl)]
  expected = {
    "sigmoid": -(1 - e) * log_sigmoid(beta * d) - e * log_sigmoid(-beta * d),
    "sigmoid_norm": -(1 - e) * log_sigmoid(beta * mean) - e * log_sigmoid(-beta * mean),
    "robust": (-(1 - e) * log_sigmoid(beta * d) + e * log_sigmoid(-beta * d)) / (1 - 2 * e),
    "hinge": np.maximum(0, 1 - beta * d),
    "ipo": (mean - 1 / (2 * beta)) ** 2,
    "simpo": -(1 - e) * log_sigmoid(beta * (w / nw - l / nl) - gamma)
    - e * log_sigmoid(-beta * (w / nw - l / nl) + gamma),
    "orpo": -w / nw - beta * log_sigmoid(odds[0] - odds[1]),
    "sft": -w / nw,
  }
  assert expected.keys() == PAIR_LOSSES.keys()
  pairs = PairLogProbs(*(np.float32(x) for x in (w, l, rw, rl, nw, nl)))
  for name, values in expected.items():
    found = PAIR_LOSSES[name](pairs, LossParameters(beta, e, gamma))
    np.testing.assert_allclose(found, values, rtol=2e-5, atol=2e-5, err_msg=name)


def test_the_losses_of_a_certain_answer_are_finite():
  """A probability of 1, and one of almost 0."""
  pairs = PairLogProbs(*(np.float32([x]) for x in (0.0, -1e4, 0.0, -1e4, 3, 3)))
  for name, loss in PAIR_LOSSES.items():
    assert np.isfinite(loss(pairs, LossParameters())).all(), name
    gradient = jax.grad(lambda x, loss=loss: loss(pairs._replace(chosen=x), LossParameters()).sum())(pairs.chosen)
    assert np.isfinite(gradient).all(), name


def test_sums_over_pairs_do_not_depend_on_the_order_of_tokens():
  segments = np.array([[1, 1, 2, 3, 4, 4, 0, 0], [1, 2, 2, 2, 2, 0, 0, 0]])
  values = np.arange(16, dtype=np.float32).reshape(2, 8) + 1
  expected = np.zeros((2, 4, 2), np.float32)
  expected[0, :2], expected[1, 0] = [[3, 3], [4, 11]], [9, 10 + 11 + 12 + 13]
  np.testing.assert_array_equal(pair_sums(jax.numpy.asarray(values), jax.numpy.asarray(segments)), expected)
  order = np.random.default_rng(0).permutation(8)
  found = pair_sums(jax.numpy.asarray(values[:, order]), jax.numpy.asarray(segments[:, order]))
  np.testing.assert_array_equal(found, expected)


MESHES = {
  "one device": (1, {}),
  "unpacked": (1, {"packing": False}),
  "tiles": (1, {"num_vocab_tiling": 4}),
  "fsdp and tensor": (8, {"per_device_batch_size": 1, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}),
  "context": (4, {"per_device_batch_size": 0.5, "ici_context_parallelism": 2, "ici_fsdp_parallelism": 2}),
}


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("tiles", "context"))) for name in MESHES]
)
def test_the_first_loss_is_ln_2(folder, tmp_path, name):
  """Also with a reference from another mesh: it is computed on one device, whose rows are filled in another way."""
  losses(dpo_keys(folder), tmp_path, steps=1)
  devices, changes = MESHES[name]
  before = files(tmp_path)
  history = losses(dpo_keys(folder, **changes), tmp_path, devices, steps=1)
  assert history.losses[0] == pytest.approx(math.log(2), abs=5e-7)
  assert abs(history.figures[0]["reward_margin"]) < 1e-5
  assert files(tmp_path) == before, "it was computed again"


def first_pairs(keys, devices, tmp_path, count=8):
  """Losses of three steps on the first pairs, all in one batch: the mean does not depend on how rows are filled."""
  path = tmp_path / "few.jsonl"
  write(path, map(pair, range(count)))
  return losses(
    keys | {"grain_train_files": str(path), "generate_padding_batch_train": True, "num_epoch": 50}, tmp_path, devices
  )


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("orpo", marks=pytest.mark.nightly)])
def test_meshes_packing_tiles_and_a_frozen_copy_agree(folder, tmp_path, loss):
  keys = dpo_keys(folder, dpo_loss_type=[loss], per_device_batch_size=8, packing=False, opt_type="sgd")
  expected = first_pairs(keys, 1, tmp_path)
  cases = {
    "frozen": (1, {"precompute_ref_log_probs": False}),
    "tiles": (1, {"num_vocab_tiling": 4}),
    "accumulation": (1, {"per_device_batch_size": 2, "gradient_accumulation_steps": 4}),
    "fsdp and tensor": (8, {"per_device_batch_size": 1, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}),
    "context": (4, {"per_device_batch_size": 2, "ici_context_parallelism": 2, "ici_fsdp_parallelism": 2}),
    "explicit": (8, {"per_device_batch_size": 1, "ici_fsdp_parallelism": 8, "shard_mode": "explicit"}),
  }
  for name, (devices, changes) in cases.items():
    found = first_pairs(keys | changes, devices, tmp_path)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5, err_msg=name)
    for figure in ("reward_margin", "chosen_log_prob"):
      np.testing.assert_allclose(
        [one[figure] for one in found.figures], [one[figure] for one in expected.figures], rtol=1e-4, atol=1e-5,
        err_msg=f"{name} {figure}",
      )  # fmt: skip
  assert expected.losses[-1] < expected.losses[0]


def test_packed_rows_hold_whole_pairs(folder, tmp_path):
  config = load_config(**dpo_keys(folder, max_target_length=128, per_device_batch_size=1))
  p = Program.of(config, make_mesh(config, jax.devices()[:1]))
  state = p.init()
  attach_reference(p, str(tmp_path), lambda: state.params | state.buffers)
  reference = numbers(tmp_path)
  seen = 0
  for fed in p.feed():
    segments, extra = np.asarray(fed.batch.segments), np.asarray(fed.batch.extra[REFERENCE])
    for row in range(len(segments)):
      assert segments[row].max() % 2 == 0
      for segment in range(1, segments[row].max() + 1):
        assert extra[row][segments[row] == segment].sum() in reference[:, 1 - segment % 2]
        seen += 1
  assert seen > 60


@pytest.mark.slow
def test_it_learns_and_a_resumed_run_has_the_same_bits_and_the_first_reference(folder, tmp_path):
  keys = dpo_keys(
    folder, base_output_directory=str(tmp_path), enable_checkpointing=True, checkpoint_period=3, eval_interval=3,
    num_epoch=50, generate_padding_batch_eval=True, grain_worker_count=1, learning_rate_schedule_steps=8,
  )  # fmt: skip
  whole = maxtext.train(load_config(**keys, run_name="whole", steps=6))
  maxtext.train(load_config(**keys, run_name="parts", steps=3))
  reference = tmp_path / "parts" / "reference_log_probs"
  before = files(reference)
  assert {name.partition("-")[0] for name in before} == {"train", "train.json", "eval", "eval.json"}
  parts = maxtext.train(load_config(**keys, run_name="parts", steps=6))
  assert files(reference) == before
  for name, value in whole.params.items():
    np.testing.assert_array_equal(value, parts.params[name], err_msg=name)
  lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
  margins = [line["reward_margin"] for line in lines if "reward_margin" in line]
  assert margins[-1] > margins[0] + 0.1
  measured = [line for line in lines if "eval_reward_accuracy" in line][-1]
  evaluated = maxtext.evaluate(str(tmp_path / "parts"))
  assert evaluated["loss"] == pytest.approx(measured["eval_loss"], rel=1e-5)
  assert evaluated["reward_margin"] == pytest.approx(measured["eval_reward_margin"], rel=1e-4)
  for path in reference.iterdir():  # the reference is the model that the run began with, also when it is lost
    path.unlink()
  maxtext.train(load_config(**keys, run_name="parts", steps=7))
  np.testing.assert_array_equal(numbers(reference), numbers(tmp_path / "whole" / "reference_log_probs"))


def test_a_folder_of_another_model_or_of_other_data_is_refused(folder, tmp_path):
  losses(dpo_keys(folder), tmp_path, steps=1)
  with pytest.raises(ConfigError, match="of another model than the one that this run starts from"):
    losses(dpo_keys(folder, init_weights_seed=1), tmp_path, steps=1)
  with pytest.raises(ConfigError, match="of other data, another tokenizer, chat template"):
    losses(dpo_keys(folder, max_target_length=128), tmp_path, steps=1)
  (path,) = tmp_path.glob("train-*.bin")
  path.write_bytes(path.read_bytes()[:-1] + b"\x00")
  with pytest.raises(ConfigError, match="is damaged"):
    losses(dpo_keys(folder), tmp_path, steps=1)
  (tmp_path / "train.json").write_text("{")
  with pytest.raises(ConfigError, match="cannot be read"):
    losses(dpo_keys(folder), tmp_path, steps=1)


def test_a_folder_that_cannot_be_written_ends_the_run(folder, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(RunError, match=r"reference log-probabilities cannot be written to .*: Not a directory"):
    losses(dpo_keys(folder), tmp_path / "file" / "below", steps=1)


@pytest.mark.parametrize("is_shared", [True, False])
def test_pairs_that_changed_are_found_by_their_tokens(folder, tmp_path, is_shared):
  """Labels are exchanged, which changes neither the file's size nor its number of lines."""
  path = tmp_path / "pairs.jsonl"
  write(path, map(pair, range(20)))
  keys = dpo_keys(folder, grain_train_files=str(path), generate_padding_batch_train=True)
  losses(keys, tmp_path / "reference", steps=1)
  before = numbers(tmp_path / "reference")
  write(path, [one | {"chosen": one["rejected"], "rejected": one["chosen"]} for one in map(pair, range(20))])
  config = load_config(**keys, init_weights_seed=0 if is_shared else 1)
  p = Program.of(config, make_mesh(config, jax.devices()[:1]))
  state = p.init()
  attach_reference(p, str(tmp_path / "reference"), lambda: state.params | state.buffers, is_shared=is_shared)
  if is_shared:
    with pytest.raises(ConfigError, match="the pair has changed since"):
      next(p.feed())
  else:  # the run's own folder; another model, so it is computed again
    assert next(p.feed()).batch.extra[REFERENCE].any()
    assert len(before) == 20


def test_the_digest_of_parameters_is_of_values_and_places():
  a = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones((5,), jax.numpy.bfloat16)}
  digest = parameter_digest({name: jax.numpy.asarray(value) for name, value in a.items()})
  mesh = jax.make_mesh((4,), ("x",))
  split = jax.device_put(a["a"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")))
  assert parameter_digest({"a": split, "b": jax.numpy.asarray(a["b"])}) == digest
  swapped = a["a"].copy()
  swapped[0, 0], swapped[0, 1] = a["a"][0, 1], a["a"][0, 0]
  assert parameter_digest({"a": jax.numpy.asarray(swapped), "b": jax.numpy.asarray(a["b"])}) != digest


CONVERSATION = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "the"}]


@pytest.mark.parametrize(
  ("row", "columns", "message"),
  [
    ({"prompt": "one", "chosen": "the", "rejected": "is"}, ["prompt", "chosen"], "needs the columns chosen and reject"),
    ({"chosen": CONVERSATION, "rejected": CONVERSATION}, ["chosen", "rejected"], "must begin alike, with the prompt"),
    ({"chosen": CONVERSATION, "rejected": "the"}, ["chosen", "rejected"], "must both be texts, or both lists"),
    ({"prompt": "one", "chosen": ["x"], "rejected": "is"}, None, "'prompt' and 'chosen' must both be texts"),
    (
      {"prompt": CONVERSATION[:1], "chosen": [], "rejected": CONVERSATION[1:]},
      None,
      "'chosen' is 0 training sequences",
    ),
  ],
)
def test_rows_that_are_no_pairs_are_refused(folder, tmp_path, row, columns, message):
  write(tmp_path / "bad.jsonl", [row])
  columns = columns or ["prompt", "chosen", "rejected"]
  config = load_config(**dpo_keys(folder, grain_train_files=str(tmp_path / "bad.jsonl"), train_data_columns=columns))
  with pytest.raises(ConfigError, match=message):
    Program.of(config, make_mesh(config, jax.devices()[:1])).data.check()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"use_sft": True}, "two methods"),
    ({"dpo_beta": 0}, "dpo_beta=0.0 must be above 0"),
    ({"dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.5}, "below 0.5"),
    ({"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1]}, "a weight for each"),
    ({"dpo_loss_type": ["dpo"]}, "dpo_loss_type"),
    ({"dataset_type": "synthetic"}, "needs conversations"),
  ],
)
def test_keys_that_do_not_fit_are_named(folder, changes, message):
  with pytest.raises(ConfigError, match=message):
    load_config(**dpo_keys(folder, **changes))


def test_conversations_with_a_common_beginning_are_pairs(folder, tmp_path):
  """The tokens are those of a prompt and two answers."""
  row = pair(3)
  whole = {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
  found = []
  for name, one, columns in (("a", row, ["prompt", "chosen", "rejected"]), ("b", whole, ["chosen", "rejected"])):
    write(tmp_path / f"{name}.jsonl", [one])
    keys = {"grain_train_files": str(tmp_path / f"{name}.jsonl"), "train_data_columns": columns}
    config = load_config(**dpo_keys(folder, generate_padding_batch_train=True, **keys))
    documents = Program.of(config, make_mesh(config, jax.devices()[:1])).data.opened("train").sources[0].documents
    found.append(documents.tokens(documents.read([0])[0]))
  np.testing.assert_array_equal(*found)
  assert set(found[0]["side"].tolist()) == {0, 1}


@pytest.mark.parametrize(
  ("chat", "prompt", "answers"), [(False, "Q: a", [" the one", " is"]), (True, "Q: a ", ["the one", "is"])]
)
def test_texts_with_a_common_beginning(folder, chat, prompt, answers):
  assert _common_prompt("Q: a the one", "Q: a is", chat) == (prompt, *answers)


def test_an_objective_that_lacks_its_reference_is_refused(folder):
  config = load_config(**dpo_keys(folder))
  p = Program.of(config, make_mesh(config, jax.devices()[:1]))
  with pytest.raises(ConfigError, match="give it precomputed=False"):
    p.feed()
  config = config.model_copy(update={"use_dpo": False})
  with pytest.raises(ConfigError, match="PreferenceOptimization needs pairs"):
    Program.of(config, make_mesh(config, jax.devices()[:1]), PreferenceOptimization())


def test_pairs_that_do_not_fit_are_counted_and_left_out(folder, tmp_path, capsys):
  long = pair(2)
  long["chosen"][0]["content"] = "the one " * 200
  write(tmp_path / "some.jsonl", [pair(0), long, pair(1), pair(4)])
  changes = {"grain_train_files": str(tmp_path / "some.jsonl"), "generate_padding_batch_train": True}
  history = losses(dpo_keys(folder, **changes), tmp_path, steps=1)
  assert "4 pairs; 8 answers, 2 longer than max_target_length=256" in "".join(capsys.readouterr())
  assert np.isnan(numbers(tmp_path)).all(axis=1).tolist() == [False, True, False, False]
  assert history.losses[0] == pytest.approx(math.log(2), abs=5e-7)


def test_the_command(folder, tmp_path, capsys):
  keys = dpo_keys(folder, steps=2, base_output_directory=str(tmp_path), run_name="a", jax_cache_dir="", num_epoch=9)
  del keys["use_dpo"]
  assert main(["dpo", *(f"{key}={value}" for key, value in keys.items())]) == 0
  out = capsys.readouterr().out
  assert "48 pairs" in out
  assert "step 2/2  loss " in out
  assert "reference log-probabilities of 48 train pairs" in out


def labelled(number):
  """An answer of a pair with its label: every third is not desirable."""
  found = pair(number)
  return {"prompt": found["prompt"], "completion": found["chosen"], "label": number % 3 > 0}


def kto_keys(folder, **changes):
  path = folder / "labelled.jsonl"
  write(path, map(labelled, range(24)))
  columns = {f"{split}_data_columns": ["prompt", "completion", "label"] for split in ("train", "eval")}
  files = {"grain_train_files": str(path), "grain_eval_files": str(path)}
  return dpo_keys(folder, **({"dpo_loss_type": ["kto"], "learning_rate_schedule_steps": 8} | columns | files | changes))


def test_the_loss_of_labelled_answers_is_its_formula():
  """In float64, as the paper has it."""
  rng = np.random.default_rng(4)
  own, other, own_reference, other_reference = -rng.uniform(1, 60, (4, 40))
  labels = np.where(rng.random(40) < 0.6, 1.0, -1.0)
  labels[7] = 0
  there = labels != 0
  for shift in (0.0, 30.0):  # a mean below 0 counts as 0
    kl = max(0.0, (other + shift - other_reference)[there].mean())
    ratio = own - own_reference
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = np.where(labels > 0, 0.7 * (1 - sigmoid(0.3 * (ratio - kl))), 1.3 * (1 - sigmoid(0.3 * (kl - ratio))))
    arrays = (own, other + shift, own_reference, other_reference, np.ones(40), np.ones(40))
    pairs = PairLogProbs(*map(np.float32, arrays))
    losses_, found = kto(pairs, np.float32(labels), LossParameters(beta=0.3, desirable=0.7, undesirable=1.3))
    np.testing.assert_allclose(found, kl, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(losses_)[there], expected[there], rtol=1e-4, atol=1e-6)


def test_labelled_answers_are_packed_with_the_answer_of_the_next_row(folder):
  config = load_config(**kto_keys(folder, packing=False, precompute_ref_log_probs=False))
  p = Program.of(config, make_mesh(config, jax.devices()[:1]))
  batch = next(p.feed()).batch
  labels = pair_sums(batch.extra["label"], batch.segments)[..., 0]
  np.testing.assert_array_equal(labels[:, 0], [-1, 1])
  tokenizer = load_tokenizer(tokenizer_options(config))
  inputs, segments, weights = (np.asarray(a) for a in (batch.targets, batch.segments, batch.weights))
  for row in range(2):
    texts = [tokenizer.decode(inputs[row][(segments[row] == side) & (weights[row] > 0)].tolist()) for side in (1, 2)]
    assert [text.strip() for text in texts] == [WORDS[row % 5].strip(), WORDS[(row + 1) % 5].strip()]


def test_the_loss_of_labelled_answers_begins_at_one_half_and_falls(folder, tmp_path):
  history = losses(kto_keys(folder), tmp_path, steps=8)
  assert history.losses[0] == pytest.approx(0.5, abs=1e-6)
  assert history.figures[0]["kl"] == pytest.approx(0.0, abs=1e-5)
  assert history.losses[-1] < 0.49
  assert history.figures[-1]["reward_margin"] > 0.01
  frozen = losses(kto_keys(folder, precompute_ref_log_probs=False), tmp_path, steps=3)
  mesh = losses(kto_keys(folder, ici_fsdp_parallelism=2, per_device_batch_size=1, num_vocab_tiling=2), tmp_path, 2, 3)
  for other in (frozen, mesh):
    np.testing.assert_allclose(other.losses, history.losses[:3], rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"dpo_loss_type": ["kto", "sft"]}, "kto is of single answers with labels"),
    ({"train_data_columns": ["prompt", "completion"]}, "needs the columns prompt, completion and label"),
  ],
)
def test_labels_that_are_wrong(folder, tmp_path, changes, message):
  with pytest.raises(ConfigError, match=message):
    losses(kto_keys(folder, **changes), tmp_path, steps=1)


def test_a_label_that_is_none(folder, tmp_path):
  keys = kto_keys(folder)
  write(folder / "labelled.jsonl", [labelled(0), labelled(1) | {"label": "good"}])
  with pytest.raises(ConfigError, match=r"labelled.jsonl.*'label' is 'good': it must be true for a desirable answer"):
    losses(keys, tmp_path, steps=1)
