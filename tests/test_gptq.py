"""GPTQ: values of weights at rest that are chosen on a calibration text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.kernels.gptq import gptq
from maxtext.kernels.weight_quantize import STORED_FORMATS, decode, encode
from maxtext.layers.input_moments import InputMoments, sums_path
from maxtext.layers.quantized_weight import WeightRounding
from maxtext.models.build import build_model
from maxtext.models.model import Model
from maxtext.weights.quantized import Codes
from tests.support import TINY, tiny
from tests.test_weights_at_rest import EXPERTS, RUN_KEYS, loaded
from tests.vocabularies import SENTENCES, hugging_face

ROWS, OUTPUTS = 128, 48


@pytest.fixture(scope="module")
def data():
  """Inputs that go together, and differ in size, the largest first; a weight; and the sums of the inputs."""
  rng = np.random.default_rng(0)
  mixed = rng.normal(size=(2048, ROWS)) @ (0.3 * rng.normal(size=(ROWS, ROWS)) + np.eye(ROWS))
  inputs = (mixed * np.sort(np.exp(rng.normal(size=ROWS)))).astype(np.float32)
  sums = inputs.T @ inputs
  order = np.argsort(-np.diag(sums))
  inputs, weight = inputs[:, order], (rng.normal(size=(ROWS, OUTPUTS)) / 16).astype(np.float32)
  return inputs, weight, inputs.T @ inputs


def rounded(name, block, weight, sums):
  """The arrays of a weight, packed."""
  found = {leaf: np.asarray(a) for leaf, a in gptq(weight, sums, STORED_FORMATS[name], block).items()}
  rounding = WeightRounding(name, block)
  return Codes(rounding, found["weight"], found["weight_scale"], found.get("weight_global_scale")).arrays()


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_outputs_change_less_and_scales_do_not(name, data):
  inputs, weight, sums = data
  format_ = STORED_FORMATS[name]
  block = format_.block if format_.fixed_block else format_.block and 32
  plain = encode(jnp.asarray(weight), format_, block)
  found = rounded(name, block, weight, sums)
  for leaf in plain.keys() - {"weight"}:
    np.testing.assert_array_equal(found[leaf], plain[leaf])
  error, other = (np.linalg.norm(inputs @ (decode(w, format_, block, jnp.float32) - weight)) for w in (found, plain))
  assert error < 0.7 * other


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_inputs_that_are_alike_or_never_seen_are_rounded_to_nearest(name, data):
  format_ = STORED_FORMATS[name]
  plain = encode(jnp.asarray(data[1]), format_, format_.block)
  for sums in (np.eye(ROWS, dtype=np.float32), np.zeros((ROWS, ROWS), np.float32)):
    found = rounded(name, format_.block, data[1], sums)
    assert found.keys() == plain.keys()
    for leaf, array in found.items():
      np.testing.assert_array_equal(array, plain[leaf])


@pytest.mark.nightly
def test_values_are_those_of_qwix(data):
  """It takes rows as they come, which here are in our order, and one scale for each channel before it begins."""
  core = pytest.importorskip("qwix.contrib.gptq_core")
  from qwix._src.core import qarray

  _, weight, sums = data
  sums = sums + 0.02 * np.diag(sums).max() * np.eye(ROWS, dtype=np.float32)  # or one last bit turns all after it
  how = qarray.HowToQuantize(qtype=jnp.int8, channelwise_axes=(0,), calibration_method="absmax")
  theirs, _ = core.quantize_weight(jnp.asarray(weight.T), jnp.asarray(sums), how)
  found = gptq(weight, sums, STORED_FORMATS["int8"], 0)
  codes = found["weight"]
  np.testing.assert_allclose(found["weight_scale"][0], theirs.scale[:, 0], rtol=1e-6)
  expected = np.asarray(theirs.qvalue, int).T
  ours = (expected > -128).all(0)  # which we do not use: all after it in its channel may differ
  assert ours.mean() > 0.3
  assert (np.asarray(codes, int) != expected)[:, ours].mean() < 0.002, "but where a last bit turns a half"
  nearest = encode(jnp.asarray(weight), STORED_FORMATS["int8"], 0)["weight"]
  assert (np.asarray(codes) != np.asarray(nearest)).mean() > 0.1


def test_sums_are_those_of_all_tokens():
  """The router of a layer reads what its experts read, each token as often as it has experts."""
  config = tiny(**EXPERTS, dtype="float32")
  plain = build_model(config, jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)),
                                                config.mesh_axes))  # fmt: skip
  mixer, experts = "groups/0/layers/0/mixer", "groups/0/layers/0/feed_forward"
  modules = frozenset({f"{mixer}/query", f"{mixer}/key", f"{experts}/router/logits", f"{experts}/experts/gate"})
  model = Model.of(plain.spec, plain.execution.replace(matmul=(InputMoments(modules=modules),)))
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16), dtype=np.int32)
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))

  @jax.jit
  def run(seed):
    params, buffers = model.init(seed)
    decoder = model.bind(params | buffers)
    hidden = decoder.hidden(tokens, positions)[0]
    return hidden, model.buffers_of(decoder), params

  hidden, found, params = run(3)
  expected = jax.jit(lambda p: plain.bind(p).hidden(tokens, positions)[0])(params)
  np.testing.assert_array_equal(hidden, expected)
  query, key, router, gate = (np.asarray(found[sums_path(module)]) for module in (
    f"{mixer}/query", f"{mixer}/key", f"{experts}/router/logits", f"{experts}/experts/gate"))  # fmt: skip
  np.testing.assert_array_equal(query, key)
  np.testing.assert_allclose(np.trace(query, axis1=-2, axis2=-1), 32 * config.base_emb_dim, rtol=1e-3)  # normed
  np.testing.assert_allclose(gate.sum(1), config.num_experts_per_tok * router, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
  """A run that has learnt a text, and that text."""
  folder = tmp_path_factory.mktemp("learnt")
  hugging_face(folder / "tokenizer")
  (folder / "text.txt").write_text("\n".join(SENTENCES * 3))
  (folder / "train").mkdir()
  (folder / "train" / "text.txt").write_text("\n\n".join(SENTENCES))
  words = ["tokenizer_type=huggingface", f"tokenizer_path={folder / 'tokenizer'}", "vocab_size=300"]
  assert main(["data", "prepare", *words, "--from", str(folder / "train"), "--to", str(folder / "data"),
               "--workers", "1"]) == 0  # fmt: skip
  keys = RUN_KEYS | EXPERTS | {
    "vocab_size": 300, "dataset_type": "grain", "grain_train_files": str(folder / "data"), "steps": 30,
    "tokenizer_type": "huggingface", "tokenizer_path": str(folder / "tokenizer"), "base_output_directory": str(folder),
    "run_name": "run", "checkpoint_period": 1000, "num_epoch": 10,
  }  # fmt: skip
  maxtext.train(load_config(**keys))
  return folder


def loss(folder):
  llm = maxtext.LLM(str(folder), max_prefill_predict_length=16)
  tokens = llm.tokenizer.encode("\n".join(SENTENCES[:3]))[: TINY["max_target_length"]]
  return -float(np.mean(llm.score(tokens)))


@pytest.mark.slow
def test_a_run_is_quantized_with_a_text(learnt, tmp_path):
  """The embedding has no inputs: it is rounded to nearest."""
  text, keys = learnt / "text.txt", {"weight_format": "int4", "weight_block_size": 16}
  maxtext.quantize(learnt / "run", tmp_path / "nearest", weight_format_targets=["layers/", "embedding", "head"], **keys)
  assert main(["quantize", str(learnt / "run"), str(tmp_path / "gptq"), "--format", "int4", "--block", "16",
               "--embedding", "--gptq", str(text)]) == 0  # fmt: skip
  ours, plain = loaded(tmp_path / "gptq")[0], loaded(tmp_path / "nearest")[0]
  assert ours.keys() == plain.keys()
  differing = {name for name in ours if not np.array_equal(ours[name], plain[name])}
  assert differing == {name.removesuffix("_scale") for name in ours if name.endswith("weight_scale")}, "values alone"
  whole = loss(learnt / "run")
  assert abs(loss(tmp_path / "gptq") - whole) < abs(loss(tmp_path / "nearest") - whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_module_at_a_time_gives_the_same(learnt, tmp_path, monkeypatch):
  keys = {"weight_format": "int8", "calibration": learnt / "text.txt"}
  maxtext.quantize(learnt / "run", tmp_path / "at once", **keys)
  largest = 4 * TINY["base_mlp_dim"] ** 2 * TINY["base_num_decoder_layers"] * EXPERTS["num_experts"]
  monkeypatch.setattr("maxtext.weights.gptq.host_memory", lambda: 6 * largest)
  maxtext.quantize(learnt / "run", tmp_path / "apart", **keys)
  monkeypatch.setattr("maxtext.weights.gptq.host_memory", lambda: 1000)
  with pytest.raises(ConfigError, match=r"inputs of groups/\S+ in \S+ GB, .* leave it out by weight_format_targets"):
    maxtext.quantize(learnt / "run", tmp_path / "none", **keys)
  for name, array in loaded(tmp_path / "at once")[0].items():
    np.testing.assert_array_equal(loaded(tmp_path / "apart")[0][name], array)


@pytest.mark.slow
def test_a_folder_the_head_and_rounded_inputs_have_it_too(learnt, tmp_path):
  keys = {"calibration": learnt / "text.txt", "max_target_length": TINY["max_target_length"], "dtype": "float32"}
  targets = {"weight_format": "int8", "weight_format_targets": ["layers/", "head"]}
  maxtext.convert(learnt / "run", tmp_path / "hf")
  maxtext.quantize(tmp_path / "hf", tmp_path / "from folder", **keys, **targets)
  maxtext.quantize(learnt / "run", tmp_path / "from run", **keys, **targets)
  maxtext.quantize(learnt / "run", tmp_path / "inputs", **keys, quantization="int8")
  expected = loaded(tmp_path / "from run")[0]
  assert "head/weight_scale" in expected
  for name, array in loaded(tmp_path / "from folder")[0].items():
    np.testing.assert_array_equal(array, expected[name], err_msg=name)
  for name, array in loaded(tmp_path / "inputs")[0].items():
    if not name.startswith("head/"):
      np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_inputs_that_float32_does_not_resolve(data):
  """One direction, a million times larger than the others: what is stored stays as near as the nearest."""
  _, weight, _ = data
  direction = np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32) * 1e12
  found = rounded("int8", 0, weight, direction @ direction.T)
  format_ = STORED_FORMATS["int8"]
  stored = np.asarray(decode(found, format_, 0, jnp.float32))
  assert np.isfinite(stored).all()
  assert np.abs(stored - weight).max() < 20 * found["weight_scale"].max()


def test_what_cannot_be_calibrated_is_an_error(learnt, tmp_path):
  (tmp_path / "short.txt").write_text("too short")
  (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
  for text, message in (("short.txt", r"has \d+ tokens; GPTQ takes rows of"), ("none.txt", "cannot be read: .*No such"),
                        ("binary.txt", "cannot be read: .*utf-8")):  # fmt: skip
    with pytest.raises(ConfigError, match=message):
      maxtext.quantize(learnt / "run", tmp_path / "out", weight_format="int8", calibration=tmp_path / text)
    assert not (tmp_path / "out").exists()
