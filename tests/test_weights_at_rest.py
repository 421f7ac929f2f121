"""Weights at rest in few bits: what is stored is what was rounded, wherever it is rounded, loaded and multiplied."""

import json
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix
import torch
import transformers
from flax import nnx

import maxtext
from maxtext import LLM, ConfigError, SamplingParams, load_config
from maxtext.checkpoint.inspect import served_keys
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.inference.inference_model import load_params, make_engine
from maxtext.kernels.weight_quantize import STORED_FORMATS, decode, encode, stored_shapes
from maxtext.layers.lora import is_adapter
from maxtext.layers.matmul import matmul
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.layers.merged_lora import MergedLora
from maxtext.layers.parameter_paths import join
from maxtext.layers.quantized_weight import QuantizedFormat, WeightRounding
from maxtext.layers.weight_format import StoredWeight
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import abstract_model, build_model
from maxtext.weights.load import load_weights
from maxtext.weights.quantized import Mxfp4
from maxtext.weights.resolve import resolve_source
from maxtext.weights.weights_at_rest import load_rounded, plain_model
from tests.inference_support import random_model
from tests.support import TINY, program
from tests.test_matmul_seam import stepped, values
from tests.test_parity import CASES, RUN
from tests.vocabularies import SENTENCES, hugging_face

BLOCKS = {"int8": 0, "int4": 32, "fp8": 0, "nf4": 64, "mxfp4": 32, "nvfp4": 16}


def gate(cases, *taken):
  """Cases, of which the gate takes some and the night all."""
  return [case if case in taken else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def weights(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1:])), jnp.float32)


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_arrays_have_the_shapes_that_a_model_declares(name):
  format_, block = STORED_FORMATS[name], BLOCKS[name]
  found = encode(weights(128, 6, 3), format_, block)
  assert {n: (a.shape, a.dtype) for n, a in found.items()} == {
    n: (shape, jnp.dtype(dtype)) for n, (shape, dtype) in stored_shapes(format_, block, 128, (6, 3)).items()
  }
  assert sum(a.nbytes for a in found.values()) < (1.1 if format_.bits == 8 else 0.65) * 128 * 18


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_a_weight_comes_back_within_half_a_step(name):
  weight = weights(128, 12).at[:, 3].set(0.0).at[:32, 5].set(0.0)
  block = BLOCKS[name]
  found = decode(encode(weight, STORED_FORMATS[name], block), STORED_FORMATS[name], block, jnp.float32)
  blocks = np.abs(np.asarray(weight)).reshape(-1, block or 128, 12).max(1, keepdims=True)
  step = {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 28, "nf4": 0.153, "mxfp4": 1 / 3.9, "nvfp4": 1 / 5.5}[name]
  error = np.abs(np.asarray(found - weight)).reshape(-1, block or 128, 12)
  assert (error <= blocks * step * 1.001).all()
  assert not found[:, 3].any()
  assert not found[:32, 5].any()


@pytest.mark.parametrize("name", [name for name in STORED_FORMATS if STORED_FORMATS[name].bits == 4])
def test_four_bits_lose_little_more_in_bfloat16(name):
  """The last bit of a scale, of a value and of their product; nothing where scales are powers of two."""
  arrays = encode(weights(128, 12), STORED_FORMATS[name], BLOCKS[name])
  found, expected = (decode(arrays, STORED_FORMATS[name], BLOCKS[name], dtype) for dtype in (jnp.bfloat16, jnp.float32))
  most = {"mxfp4": 0, "nf4": 3}.get(name, 2) * 2.0**-8
  np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1.01 * most, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", STORED_FORMATS)
def test_a_weight_that_is_not_finite_is_not_hidden(name, value):
  weight = weights(128, 4).at[7, 1].set(value)
  block = BLOCKS[name]
  found = decode(encode(weight, STORED_FORMATS[name], block), STORED_FORMATS[name], block, jnp.float32)
  assert not np.isfinite(found[:, 1]).all()


@pytest.mark.parametrize(
  ("name", "block"), [("int8", 0), ("int8", 32), ("int4", 0), ("int4", 32), ("fp8", 0), ("fp8", 64)]
)
def test_values_and_scales_equal_qwix(name, block):
  weight = weights(128, 10)
  kind = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}[name]
  theirs = qwix.quantize(weight, kind, channelwise_axes=(1,), tiled_axes={0: block} if block else {})
  ours = encode(weight, STORED_FORMATS[name], block)
  np.testing.assert_array_equal(ours["weight_scale"], theirs.scale.reshape(ours["weight_scale"].shape))
  back = decode(ours, STORED_FORMATS[name], block, jnp.float32)
  most = float((jnp.iinfo if name.startswith("int") else jnp.finfo)(kind).max)
  values = theirs.qvalue.astype(jnp.float32).reshape(128, 10).clip(-most, most)
  scale = jnp.repeat(theirs.scale.reshape(-1, 10), block or 128, 0)
  np.testing.assert_array_equal(back, values * scale)


class Source:
  def __init__(self, array):
    self.array = np.asarray(array)
    self.shape, self.dtype = self.array.shape, self.array.dtype

  def read(self):
    return self.array


def test_mxfp4_is_what_published_models_store():
  """Pairs of inputs in a byte, the first in the low half, and a power of two for 32 of them."""
  weight = weights(64, 6)
  found = encode(weight, STORED_FORMATS["mxfp4"], 32)
  blocks = np.asarray(found["weight"]).T.reshape(1, 6, 2, 16)
  published = Mxfp4(Source(blocks), Source(np.asarray(found["weight_scale"]).T.reshape(1, 6, 2)))
  np.testing.assert_array_equal(
    published.read()[0].astype(np.float32), decode(found, STORED_FORMATS["mxfp4"], 32, "f4")
  )


def test_four_bit_floats_are_rounded_half_to_even():
  x = np.array([*(i / 16 for i in range(-112, 113)), -0.0], np.float32)
  whole = np.concatenate([x, np.full(-len(x) % 32, 4.0, np.float32)])[:, None]  # the scale is 1
  found = decode(encode(jnp.asarray(whole), STORED_FORMATS["mxfp4"], 32), STORED_FORMATS["mxfp4"], 32, jnp.float32)
  blocks = np.abs(whole).reshape(-1, 32).max(1)
  scale = np.repeat(2.0 ** (np.floor(np.log2(blocks)) - 2), 32)[:, None]
  expected = (whole / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
  np.testing.assert_array_equal(found, expected)


def test_nvfp4_has_scales_of_scales():
  weight = weights(64, 6)
  found = encode(weight, STORED_FORMATS["nvfp4"], 16)
  largest = np.abs(np.asarray(weight)).reshape(4, 16, 6).max(1)
  whole = np.float32(448 * 6) / np.abs(np.asarray(weight)).max()
  np.testing.assert_allclose(found["weight_global_scale"], whole, rtol=1e-6)
  np.testing.assert_array_equal(
    np.asarray(found["weight_scale"], np.float32),
    (largest / 6 * whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
  )


EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
  "llama": TINY,
  "experts": TINY | EXPERTS,
  "latent": CASES["deepseek3"]["keys"] | {"mla_naive_kvcache": False, "dtype": "float32"},
}


@pytest.mark.parametrize("contraction", ["ab,bc->ac", "abc,bcd->ad"])
def test_many_tokens_are_multiplied_by_rows_in_their_order(contraction):
  """Few tokens are taken apart for rows that share a byte. The gradient of that is padding between lanes, which the
  TPU's compiler does not end with for the batches of training; both ways compute the same."""
  rounding = WeightRounding("nf4", 64)
  inputs = (128,) if contraction == "ab,bc->ac" else (4, 32)
  arrays = encode(weights(128, 8), rounding.stored, rounding.block)
  call = MatmulCall(Site("layers/0/query", "linear"), contraction, jnp.float32)

  def run(x):
    return matmul([], {}, call, x, StoredWeight(QuantizedFormat(rounding), arrays), None)

  def gradient(x):
    return jax.vjp(run, x)[1](jnp.ones((len(x), 8)))[0]

  x = weights(513, *inputs, seed=1)
  plain = np.asarray(decode(arrays, rounding.stored, rounding.block, jnp.float32), np.float64)
  for few, rows in ((True, 512), (False, 513)):
    expected = np.asarray(x[:rows], np.float64).reshape(rows, -1) @ plain
    np.testing.assert_allclose(run(x[:rows]), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    back = np.broadcast_to(plain.sum(1), (rows, 128)).reshape(rows, *inputs)
    np.testing.assert_allclose(gradient(x[:rows]), back, rtol=0, atol=1e-5 * np.abs(back).max())
    assert (" pad[" in str(jax.make_jaxpr(gradient)(x[:rows]))) == few


def served(**keys):
  """A model for inference."""
  config = load_config(**RUN | keys)
  return build_model(config, make_mesh(config, jax.devices()[:1]), serving=True)


def stored(model, params):
  """Plain parameters as a model stores them."""
  return load_rounded(model, plain_model(model), Plain(plain_model(model), params))


class Plain:
  def __init__(self, model, params):
    self.model, self.params = model, params

  def indices(self, path):
    return [(i,) for i in range(self.params[path].shape[0])] if self.model.contracted[path][0] else [()]

  def piece(self, path, index):
    return np.asarray(self.params[path][index])

  def codes(self, path, index, rounding):
    return None

  def check(self):
    pass


def dequantized(model, arrays):
  rounding, plain, found = model.execution.weight_format.rounding, plain_model(model), {}
  for name in plain.weight_names:
    leaves = {
      leaf.removeprefix(f"{name.removesuffix('weight')}"): a for leaf, a in arrays.items() if leaf.startswith(name)
    }
    found[name] = arrays[name]
    if len(leaves) > 1:
      found[name] = rounding.decode(leaves, plain.struct(name).shape, plain.contracted[name][0], jnp.float32)
  return found


@pytest.mark.parametrize(
  ("name", "family"), [("int4", "llama"), ("nvfp4", "experts"), ("int8", "latent"), ("nf4", "latent")]
)
def test_a_model_computes_with_what_is_stored(name, family):
  keys = FAMILIES[family] | ({"weight_block_size": 8} if name in ("nf4", "int4") else {}) | {"weight_format": name}
  model = served(**keys)
  plain = plain_model(model)
  params = values(plain)
  arrays = stored(model, params)
  assert arrays.keys() == model.params.keys() | model.buffers.keys()
  changed = [path for path in plain.params if f"{path}_scale" in arrays]
  assert all("layers/" in path for path in changed)
  assert not [path for path in changed if re.search("norm|router|embed|head/", path)]
  assert len(changed) >= 7
  rounded = dequantized(model, arrays)
  assert (
    0.001 < np.abs(np.asarray(rounded[changed[0]] - params[changed[0]])).max() / np.abs(params[changed[0]]).max() < 0.2
  )
  expected = stepped(plain, rounded)
  np.testing.assert_allclose(stepped(model, arrays), expected, atol=2e-5 * float(jnp.abs(expected).max()))
  lowered = (
    jax.jit(lambda p: model.bind(p).hidden(jnp.zeros((1, 4), int), jnp.arange(4)[None])[0]).lower(arrays).as_text()
  )
  kept = {arrays[path].shape for path in arrays if arrays[path].dtype == jnp.float32}
  arguments = lowered[lowered.index("@main(") : lowered.index(") -> ", lowered.index("@main("))]
  for path in changed:
    shape = plain.struct(path).shape
    assert shape in kept or f"tensor<{'x'.join(map(str, shape))}xf32>" not in arguments, "no plain copy is an argument"


RUN_KEYS = TINY | {
  "dataset_type": "synthetic", "dtype": "float32", "per_device_batch_size": 2, "steps": 2, "enable_checkpointing": True,
  "async_checkpointing": False, "enable_tensorboard": False, "log_period": 100, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a run with experts."""
  folder = tmp_path_factory.mktemp("trained")
  maxtext.train(load_config(**RUN_KEYS | EXPERTS | {"base_output_directory": str(folder), "run_name": "run"}))
  return folder / "run"


def loaded(source, **keys):
  """The parameters of an engine."""
  config = resolve_source(str(source), {"dataset_type": "synthetic", "scan_layers": True, **keys}).config
  model = build_model(config, make_mesh(config, jax.devices()[:1]), serving=True)
  return load_params(config, model), model


def assert_equal(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == array.dtype, name
    np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(array), err_msg=name)


@pytest.mark.parametrize("name", gate(["int8", "nvfp4"], "nvfp4"))
def test_weights_are_the_same_however_they_come_to_be_at_rest(name, trained, tmp_path):
  """Rounded at load, by the command, saved at load, and from a Hugging Face folder."""
  at_load, model = loaded(trained, weight_format=name)
  assert sum(a.nbytes for n, a in at_load.items() if "/experts/" in n) < 0.29 * 4 * sum(
    s.size for n, s in plain_model(model).params.items() if "/experts/" in n
  )
  assert main(["quantize", str(trained), str(tmp_path / "out"), "--format", name]) == 0
  assert_equal(loaded(tmp_path / "out")[0], at_load)
  assert_equal(loaded(tmp_path / "out", checkpoint_is_quantized=True)[0], at_load)
  for _ in range(2):  # a server that is started again finds them
    assert_equal(loaded(trained, weight_format=name, save_quantized_params_path=str(tmp_path / "saved"))[0], at_load)
  other = {"weight_format": "int4", "weight_block_size": 16, "save_quantized_params_path": str(tmp_path / "saved")}
  with pytest.raises(ConfigError, match="saved is there already"):
    loaded(trained, **other)
  assert_equal(loaded(tmp_path / "saved")[0], at_load)
  assert "save_quantized_params_path" not in served_keys(str(tmp_path / "saved"), {}), "it can be served"
  maxtext.convert(trained, tmp_path / "hf")
  maxtext.quantize(tmp_path / "hf", tmp_path / "from_hf", weight_format=name)
  assert_equal(loaded(tmp_path / "from_hf")[0], at_load)
  assert_equal(loaded(tmp_path / "hf", weight_format=name)[0], at_load)


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_are_loaded_one_by_one_are_those_of_the_stack(devices, trained, tmp_path):
  maxtext.convert(trained, tmp_path / "hf")
  format_ = {"weight_format": "int4", "weight_block_size": 8}
  stacks = loaded(trained, **format_)[0]
  for source in (trained, tmp_path / "hf"):
    keys = {"dataset_type": "synthetic", "scan_layers": False, **format_} | (TENSOR if devices == 2 else {})
    config = resolve_source(str(source), keys).config
    model = build_model(config, make_mesh(config, jax.devices()[:devices]), serving=True)
    found = load_params(config, model)
    assert not found.keys() & model.unstacked
    bound = {join(*path): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model.bind(dict(found))))}
    for name, stack in stacks.items():
      np.testing.assert_array_equal(np.asarray(bound[name]), np.asarray(stack), err_msg=name)
    whole = "groups/0/layers/0/feed_forward/experts/gate/weight"
    assert found[f"{whole}[0]"].sharding.num_devices == devices
    assert (found[f"{whole}[0]"].sharding.is_fully_replicated) == (devices == 1)


def test_layers_that_were_loaded_one_by_one_are_swapped_for_those_of_a_stack(trained, tmp_path):
  """On a mesh, by arrays as training has them."""
  format_ = {"weight_format": "int4", "weight_block_size": 8}
  config = resolve_source(str(trained), {"dataset_type": "synthetic", "scan_layers": False, **format_} | TENSOR).config
  model = build_model(config, make_mesh(config, jax.devices()[:2]), serving=True)
  params = load_params(config, model)
  assert not params.keys() & model.unstacked
  llm = LLM.of(replace(random_model(tmp_path), config=config, engine=make_engine(config, model, params)))
  how = SamplingParams(temperature=0.0, max_tokens=8)
  expected = llm.generate([[1, 2, 3]], how)[0].token_ids
  stacks = {name: jax.device_put(a, model.struct(name).sharding) for name, a in loaded(trained, **format_)[0].items()}
  others = stacks | {"head/weight": -stacks["head/weight"]}
  for version, (tree, same) in enumerate(((others, False), (stacks, True)), 1):
    llm.update_params(tree, version)
    (found,) = llm.generate([[1, 2, 3]], how)
    assert (found.token_ids == expected) == same
    assert set(found.versions) == {version}


def logits(model, params):
  """Through one program, of a batch."""
  tokens, positions = jnp.arange(24).reshape(2, 12) * 5, jnp.tile(jnp.arange(12), (2, 1))

  @jax.jit
  def run(params):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(tokens, positions)[0])

  return np.asarray(run(params))


def assert_arrays_of(arrays, path, expected):
  """The arrays that stand for a weight."""
  for leaf, array in expected.items():
    np.testing.assert_array_equal(arrays[path.removesuffix("weight") + leaf], array, err_msg=leaf)


def assert_same_logits(found, expected, exactly):
  """Equal, or as sums in another order are: the last weight that rounding moved would be felt."""
  np.testing.assert_allclose(found, expected, rtol=0, atol=0 if exactly else 2e-6 * np.abs(expected).max())


QAT = {
  "int4": {"weight_format": "int4", "weight_block_size": 8},
  "nvfp4": {"weight_format": "nvfp4"},
  "W8A8": {"quantization": "int8"},
  "fp8": {"quantization": "fp8"},
}


@pytest.mark.parametrize("way", gate(QAT, "int4", "W8A8"))
def test_what_is_stored_is_what_was_trained(way, tmp_path):
  """Quantization-aware training: the exported weights are bitwise those of the step, and so are logits from them; of
  four bits, but for the order of sums."""
  keys = RUN_KEYS | EXPERTS | QAT[way] | {"base_output_directory": str(tmp_path), "run_name": "run"}
  p = program(load_config(**keys))
  maxtext.train(load_config(**keys))
  step = load_weights(resolve_source(str(tmp_path / "run"), {}).config, p.model, p.model.params | p.model.buffers)
  assert all(step[name].dtype == jnp.float32 for name in p.model.params), "the trained weights are plain"
  maxtext.quantize(tmp_path / "run", tmp_path / "out", **QAT[way])
  arrays, model = loaded(tmp_path / "out", **{k: v for k, v in QAT[way].items() if k == "quantization"})
  path = "groups/0/layers/0/feed_forward/experts/gate/weight"
  assert arrays[path].dtype == {"W8A8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(way, jnp.uint8)
  if "weight_format" in QAT[way]:
    rounding = model.execution.weight_format.rounding
    assert_arrays_of(arrays, path, rounding.encode(step[path], *plain_model(model).contracted[path]))
  assert_same_logits(logits(model, arrays), logits(p.model, step), exactly="quantization" in QAT[way])
  assert np.abs(logits(p.model, step) - logits(plain_model(p.model), step)).max() > 1e-3, "rounding is felt"


def test_gradients_pass_the_rounding():
  """Straight-through: those of the rounded weights."""
  keys = RUN_KEYS | {"weight_format": "nf4", "weight_block_size": 8, "enable_checkpointing": False}
  p = program(load_config(**keys))
  plain = plain_model(p.model)
  rounding = p.model.execution.matmul[0].rounding
  params = values(plain)

  def loss(model, params):
    decoder = model.bind(params)
    return jnp.square(decoder.logits(decoder.hidden(jnp.arange(8)[None], jnp.arange(8)[None])[0])).mean()

  def rounded(name, weight):
    if not name.endswith("/weight") or "layers/" not in name:
      return weight
    stacked, contracted = plain.contracted[name]
    return rounding.decode(rounding.encode(weight, stacked, contracted), weight.shape, stacked, jnp.float32)

  found = jax.jit(jax.grad(lambda params: loss(p.model, params)))(params)
  expected = jax.jit(jax.grad(lambda params: loss(plain, params)))({n: rounded(n, a) for n, a in params.items()})
  for name, gradient in expected.items():
    np.testing.assert_allclose(
      found[name], gradient, rtol=1e-4, atol=1e-6 * float(jnp.abs(gradient).max()), err_msg=name
    )


@pytest.mark.parametrize("name", gate(["int4", "int8"], "int4"))
def test_adapters_train_on_weights_at_rest(name, trained, tmp_path):
  """QLoRA: the base is stored in few bits and does not change, and adapters learn what they would beside its values
  multiplied out."""
  format_ = {"weight_format": name} | ({"weight_block_size": 16} if name == "int4" else {})
  maxtext.quantize(trained, tmp_path / "base", **format_)
  maxtext.convert(tmp_path / "base", tmp_path / "hf", to="huggingface")
  lora = {"lora_rank": 4, "learning_rate": 3e-2, "steps": 4, "base_output_directory": str(tmp_path)}

  def losses_from(run, base, **keys):
    found = []

    class Losses(maxtext.Callback):
      def on_step(self, step, figures):
        found.append(figures["loss"])

    start = {"load_parameters_path": str(tmp_path / base), "run_name": run}
    config = resolve_source(None, RUN_KEYS | EXPERTS | lora | start | keys).config
    maxtext.train(config, callbacks=[Losses()])
    return found

  found = losses_from("rest", "base", **format_)
  assert len({round(loss, 3) for loss in found}) == 4
  assert losses_from("folder", "hf", **format_) == found, "from a folder that holds the same, bit for bit"
  np.testing.assert_allclose(losses_from("plain", "hf"), found, rtol=1e-5)
  base = loaded(tmp_path / "base")[0]
  after, model = loaded(tmp_path / "rest", **format_)
  assert_equal({name: after[name] for name in base}, base)
  assert any(np.abs(after[name]).max() > 0 for name in after if name.endswith("/lora/b"))
  assert all(is_adapter(name) for name in model.params)


@pytest.mark.nightly
def test_adapters_of_a_plain_base_are_served_beside_one_at_rest(trained, tmp_path):
  """The checkpoint of adapters names a base that they were trained on plainly; it is rounded at load, and still
  verified."""
  maxtext.convert(trained, tmp_path / "hf")
  for base, name in ((trained, "plain"), (tmp_path / "hf", "folder")):
    start = {"load_parameters_path": str(base), "base_output_directory": str(tmp_path), "run_name": name}
    maxtext.train(resolve_source(None, RUN_KEYS | EXPERTS | {"lora_rank": 2, "steps": 1} | start).config)
    found, _ = loaded(tmp_path / name, weight_format="int8")
    expected, _ = loaded(trained, weight_format="int8")
    assert_equal({path: found[path] for path in expected}, expected)
    assert any(map(is_adapter, found))
    quantized, _ = loaded(tmp_path / name, quantization="int8")
    assert_equal({path: quantized[path] for path in expected}, expected)


def test_what_is_merged_is_what_was_trained(trained, tmp_path):
  """Merge-aware LoRA on a base at rest: the merged file has what the step computed with."""
  format_ = {"weight_format": "int4", "weight_block_size": 16}
  lora = {"lora_rank": 4, "lora_alpha": 64.0, "lora_merge_aware": True, "learning_rate": 3e-2, "steps": 3}
  start = {"load_parameters_path": str(trained), "base_output_directory": str(tmp_path), "run_name": "run"}
  keys = RUN_KEYS | EXPERTS | lora | format_ | start
  maxtext.train(load_config(**keys))
  p = program(load_config(**keys))
  config = resolve_source(str(tmp_path / "run"), {}).config
  step = load_weights(config, p.model, p.model.params | p.model.buffers)
  maxtext.quantize(tmp_path / "run", tmp_path / "merged", **format_)
  arrays, model = loaded(tmp_path / "merged")
  assert not any(map(is_adapter, arrays))
  base = loaded(trained, **format_)[0]
  path = "groups/0/layers/0/feed_forward/experts/gate/weight"
  assert (np.asarray(arrays[path]) != np.asarray(base[path])).mean() > 0.01, "the adapter is felt"
  assert_same_logits(logits(model, arrays), logits(p.model, step), exactly=False)
  rounding, (stacked, contracted) = model.execution.weight_format.rounding, plain_model(model).contracted[path]
  plain = rounding.decode(
    {leaf: step[path.removesuffix("weight") + leaf] for leaf in ("weight", "weight_scale")},
    plain_model(model).struct(path).shape, stacked, jnp.float32,
  )  # fmt: skip
  [merging] = [one for one in p.model.execution.matmul if isinstance(one, MergedLora)]
  adapter = [step[path.replace("/weight", f"/matmul/lora/{name}")] for name in ("a", "b")]
  merged = jnp.stack([merging.merge(*one[:1], 1, *one[1:]) for one in zip(plain, *adapter, strict=True)])
  assert_arrays_of(arrays, path, rounding.encode(merged, stacked, contracted))
  maxtext.convert(tmp_path / "run", tmp_path / "hf", to="huggingface")  # merged, and not rounded
  weights = loaded(tmp_path / "hf", weight_format="")[0]
  np.testing.assert_allclose(weights[path], dequantized(model, arrays)[path], atol=0.1)


WRONG = {
  "targets": (
    {"weight_format": "int8", "weight_format_targets": ["layers/", "nonsense"]},
    "'nonsense' is the path of no",
  ),
  "sparse": ({"weight_format": "int8", "weight_sparsity_n": 2, "weight_sparsity_m": 4}, "leave weight_sparsity_n out"),
  "explicit": ({"weight_format": "int8", "shard_mode": "explicit"}, "needs shard_mode=auto"),
  "merge without a format": ({"lora_rank": 2, "lora_merge_aware": True}, "set that too"),
  "weight_format": ({"weight_format": "int3"}, "weight_format"),
  "block": ({"weight_format": "int8", "weight_block_size": 7}, r"weight_block_size|not a multiple of 7"),
  "odd block": ({"weight_format": "int4", "weight_block_size": 5}, "weight_block_size=5 must be even"),
  "fixed block": ({"weight_format": "nvfp4", "weight_block_size": 8}, "nvfp4 has blocks of 16; leave it out"),
  "another": ({"weight_format": "int4", "quantization": "int8"}, "is not what quantization=int8 multiplies by"),
  "plain": ({"checkpoint_is_quantized": True}, "has plain weights"),
  "pattern": ({"weight_format": "int8", "weight_format_targets": ["("]}, "weight_format_targets"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_name_the_key(case, trained):
  keys, problem = WRONG[case]
  with pytest.raises(ConfigError, match=problem):
    loaded(trained, **keys)


def test_weights_at_rest_are_not_taken_for_others(trained, tmp_path):
  maxtext.quantize(trained, tmp_path / "out", weight_format="int4", weight_block_size=8)
  for keys in ({"weight_format": "nf4"}, {"weight_block_size": 16}, {"weight_format": ""}):
    with pytest.raises(ConfigError, match=r"holds weights at rest with weight_format=int4"):
      loaded(tmp_path / "out", **keys)
  start = {"load_parameters_path": str(tmp_path / "out"), "base_output_directory": str(tmp_path), "run_name": "start"}
  with pytest.raises(ConfigError, match="holds weights at rest with"):
    maxtext.train(load_config(**RUN_KEYS | EXPERTS | start))
  with pytest.raises(ConfigError, match="is not rounded again"):
    maxtext.quantize(tmp_path / "out", tmp_path / "again", weight_format="int8")
  with pytest.raises(ConfigError, match="no-such-folder is not a folder"):
    maxtext.quantize("no-such-folder", tmp_path / "none", weight_format="int8")
  with pytest.raises(ConfigError, match="set weight_format"):
    maxtext.quantize(trained, tmp_path / "none")


def test_a_base_at_rest_is_a_trained_one():
  with pytest.raises(ConfigError, match="set load_parameters_path"):
    load_config(**RUN_KEYS | {"lora_rank": 2, "weight_format": "int8"})


TENSOR = {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 1}


@pytest.mark.parametrize(
  ("serving", "keys", "problem"),
  [
    (False, {"weight_format": "int8"}, "each of which would find scales of its own"),
    (True, {"weight_format": "int4", "weight_block_size": 16}, "5 blocks of 16 inputs, which this mesh splits over 2"),
  ],
)
def test_a_mesh_does_not_split_what_shares_a_scale(serving, keys, problem):
  """The width of experts is 80."""
  config = load_config(**RUN_KEYS | EXPERTS | TENSOR | keys)
  with pytest.raises(ConfigError, match=problem):
    build_model(config, make_mesh(config, jax.devices()[:2]), serving=serving)


@pytest.mark.parametrize("name", gate(["int4", "int8"], "int4"))
def test_a_mesh_computes_what_one_device_does(name, trained):
  """Experts at rest, with their width split over two devices."""
  format_ = {"weight_format": name} | ({"weight_block_size": 8} if name == "int4" else {})
  expected = logits(*reversed(loaded(trained, **format_)))
  config = resolve_source(str(trained), {"dataset_type": "synthetic", **TENSOR, **format_}).config
  model = build_model(config, make_mesh(config, jax.devices()[:2]), serving=True)
  path = "groups/0/layers/0/feed_forward/experts/down/weight"
  assert model.params[path].sharding.num_devices == 2
  found = logits(model, load_params(config, model))
  np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_weights_at_rest_count_as_what_they_stand_for():
  keys = TINY | {"lora_rank": 2, "load_parameters_path": "somewhere"}
  sizes = [
    program(load_config(**RUN | keys | format_)).model.size
    for format_ in ({}, {"weight_format": "nf4", "weight_block_size": 16}, {"weight_format": "int8"})
  ]
  assert len(set(sizes)) == 1


def test_a_damaged_checkpoint_is_named_with_its_key(trained, tmp_path):
  shutil.copytree(trained, tmp_path / "run")
  for file in (tmp_path / "run" / "checkpoints").rglob("*"):
    if file.is_file() and "record" not in file.parts and file.stat().st_size > 20_000:
      content = bytearray(file.read_bytes())
      content[len(content) // 2] ^= 0x40
      file.write_bytes(bytes(content))
  with pytest.raises(RunError, match=r"load_parameters_path=.*is damaged"):
    loaded(tmp_path / "run", weight_format="int8")


@pytest.mark.nightly
def test_magnitudes_are_those_of_weights_and_not_of_codes(dense, tmp_path):
  """DoRA, in from a PEFT folder and out to one, beside weights at rest."""
  keys = RUN_KEYS | dict.fromkeys(["base_emb_dim"], 64) | {"base_mlp_dim": 128, "head_dim": 16}
  start = {"load_parameters_path": str(dense), "base_output_directory": str(tmp_path), "run_name": "dora"}
  maxtext.train(load_config(**keys | {"lora_rank": 2, "use_dora": True, "weight_format": "int8", "steps": 1} | start))
  maxtext.convert(tmp_path / "dora", tmp_path / "peft", to="peft")
  found, _ = loaded(dense, weight_format="int8", lora_input_adapters_path=str(tmp_path / "peft"))
  trained_, _ = loaded(tmp_path / "dora", weight_format="int8", lora_rank=2, use_dora=True)
  magnitudes = [path for path in trained_ if path.endswith("/magnitude")]
  assert magnitudes
  for path in magnitudes:
    np.testing.assert_allclose(found[path], trained_[path], atol=1e-4)


def test_weights_at_rest_are_evaluated(trained, tmp_path):
  """From the folder, or rounded as they are loaded; and the loss is not that of the plain weights."""
  maxtext.quantize(trained, tmp_path / "out", weight_format="int4", weight_block_size=16)
  found = maxtext.evaluate(tmp_path / "out", eval_steps=2)
  assert found == maxtext.evaluate(trained, eval_steps=2, weight_format="int4", weight_block_size=16)
  whole = maxtext.evaluate(trained, eval_steps=2)
  assert found["tokens"] == whole["tokens"]
  assert abs(found["loss"] - whole["loss"]) > 1e-5


@pytest.mark.nightly
def test_a_folder_is_evaluated_on_the_data_of_its_run(tmp_path):
  """With the run's own tokenizer, length, batch and text, none of which are named again; keys that are given
  still win. A folder from Hugging Face knows of no data, and says so."""
  hugging_face(tmp_path / "tokenizer")
  words = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path / 'tokenizer'}", "vocab_size=300"]
  texts = {"train": SENTENCES * 4, "eval": SENTENCES, "other": [sentence[::-1] for sentence in SENTENCES]}
  for name, text in texts.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "text.txt").write_text("\n\n".join(text))
    prepare = ["data", "prepare", *words, "--from", str(tmp_path / name), "--to", str(tmp_path / f"{name}.data")]
    assert main([*prepare, "--workers", "1"]) == 0
  keys = RUN_KEYS | {
    "vocab_size": 300, "dataset_type": "grain", "grain_train_files": str(tmp_path / "train.data"), "steps": 6,
    "grain_eval_files": str(tmp_path / "eval.data"), "eval_interval": 6,
    "tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path / "tokenizer"), "num_epoch": 20,
    "base_output_directory": str(tmp_path), "run_name": "run", "max_target_length": 24, "quantization": "int8",
  }  # fmt: skip
  maxtext.train(load_config(**keys))
  assert main(["quantize", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "int8"]) == 0
  found, own = maxtext.evaluate(tmp_path / "out"), maxtext.evaluate(tmp_path / "run", quantization="")
  assert found["tokens"] == own["tokens"] > 100
  assert found["loss"] == pytest.approx(own["loss"], rel=0.01)
  assert found["loss"] != own["loss"]
  other = maxtext.evaluate(tmp_path / "out", grain_eval_files=str(tmp_path / "other.data"))
  assert abs(other["loss"] - own["loss"]) > 0.1 * own["loss"], "other data has another loss"
  maxtext.convert(tmp_path / "run", tmp_path / "hf", to="huggingface")
  maxtext.quantize(tmp_path / "hf", tmp_path / "from_hf", weight_format="int8")
  with pytest.raises(ConfigError, match="dataset"):
    maxtext.evaluate(tmp_path / "from_hf", eval_steps=2)


def test_an_interrupted_quantization_resumes(trained, tmp_path):
  class StopError(Exception):
    pass

  def stop(count, *_):
    if count == 9:
      raise StopError

  with pytest.raises(StopError):
    maxtext.quantize(trained, tmp_path / "out", weight_format="int8", progress=stop)
  assert not (tmp_path / "out").exists()
  maxtext.quantize(trained, tmp_path / "out", weight_format="int8")
  assert_equal(loaded(tmp_path / "out")[0], loaded(trained, weight_format="int8")[0])


GIGABYTES = {"": (13.959, 16.061), "int8": (6.985, 9.087), "int4": (3.708, 5.810), "nf4": (3.926, 6.028)}


@pytest.mark.parametrize("name", GIGABYTES)
def test_bytes_of_a_real_model(name):
  """Layers, and all of it, of Llama 3.1 8B: the figures of the page."""
  config = load_config(model_name="llama3.1-8b", dataset_type="synthetic", weight_dtype="bfloat16", weight_format=name)
  model = abstract_model(config, serving=True)
  sizes = {path: s.size * s.dtype.itemsize / 1e9 for path, s in (model.params | model.buffers).items()}
  layers = sum(size for path, size in sizes.items() if "layers/" in path)
  assert (layers, sum(sizes.values())) == pytest.approx(GIGABYTES[name], abs=1e-3)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """The folder of a Llama run whose sizes every format fits."""
  folder = tmp_path_factory.mktemp("dense")
  sizes = {"base_emb_dim": 64, "base_mlp_dim": 128, "head_dim": 16, "base_output_directory": str(folder)}
  maxtext.train(load_config(**RUN_KEYS | sizes | {"run_name": "run"}))
  return folder / "run"


EXPORTED = {
  "int8": {},
  "int8 and inputs": {"quantization": "int8"},
  "int4": {"weight_block_size": 32},
  "fp8": {},
  "nvfp4": {},
  "mxfp4": {},
}


@pytest.mark.parametrize("case", gate(EXPORTED, "int8 and inputs", "int4"))
def test_compressed_tensors_hold_what_is_at_rest(case, dense, tmp_path):
  """Out to a folder, and in again without being multiplied out; and transformers reads the same weights from it."""
  keys = EXPORTED[case] | {"weight_format": case.split()[0]}
  maxtext.quantize(dense, tmp_path / "rest", **keys)
  arrays, model = loaded(tmp_path / "rest", **({"quantization": "int8"} if "inputs" in case else {}))
  folder = maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
  content = json.loads((folder / "config.json").read_text())["quantization_config"]
  assert "lm_head" in content["ignore"]
  assert (content["config_groups"]["group_0"]["input_activations"] is not None) == ("inputs" in case)
  assert_equal(loaded(folder, **keys)[0], arrays)
  expected = dequantized(model, arrays)
  found = loaded(folder)[0]
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)
  four_bit_floats = "fp4" in case  # which it multiplies out in bfloat16 alone
  dtype = torch.bfloat16 if four_bit_floats else torch.float32
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
  tokens = np.arange(10)[None] * 7
  with torch.no_grad():
    answer = theirs(torch.tensor(tokens)).logits.float().numpy()
  decoder = plain_model(model).bind(expected)
  ours = decoder.logits(decoder.hidden(jnp.asarray(tokens), jnp.arange(10)[None])[0])
  most = float(np.abs(answer).max())
  np.testing.assert_allclose(ours, answer, atol=(0.05 if "inputs" in case or four_bit_floats else 1e-5) * most)


def test_four_bits_are_exported_without_those_of_inputs(dense, tmp_path):
  maxtext.quantize(dense, tmp_path / "rest", quantization="int4")
  maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
  content = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
  assert content["config_groups"]["group_0"]["input_activations"] is None


HOSTILE = {
  "group of text": ("int4", lambda weights: weights.update(group_size="32")),
  "group of -2": ("int4", lambda weights: weights.update(group_size=-2)),
  "group that cuts": ("int4", lambda weights: weights.update(group_size=5)),
  "blocks": ("int4", lambda weights: weights.update(strategy="block")),
  "zero points": ("int4", lambda weights: weights.update(symmetric=False)),
  "other bits": ("int4", lambda weights: weights.update(num_bits=3)),
  "other type": ("int4", lambda weights: weights.update(num_bits=8, type="float", group_size=None)),
  "no global scale": ("mxfp4", lambda weights: weights.update(group_size=16)),
}


@pytest.fixture(scope="module")
def exported(dense, tmp_path_factory):
  """Folders of compressed-tensors, by format."""
  work = tmp_path_factory.mktemp("exported")
  for name, block in (("int4", {"weight_block_size": 32}), ("mxfp4", {})):
    maxtext.quantize(dense, work / f"{name}.rest", weight_format=name, **block)
    maxtext.convert(work / f"{name}.rest", work / name, to="huggingface")
  return work


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused(case, exported, tmp_path):
  name, change = HOSTILE[case]
  shutil.copytree(exported / name, tmp_path / "hf")
  file = tmp_path / "hf" / "config.json"
  content = json.loads(file.read_text())
  change(content["quantization_config"]["config_groups"]["group_0"]["weights"])
  file.write_text(json.dumps(content))
  with pytest.raises((ConfigError, RunError)):
    loaded(tmp_path / "hf")


def test_what_compressed_tensors_cannot_hold(dense, trained, tmp_path):
  maxtext.quantize(dense, tmp_path / "rest", weight_format="nf4")
  with pytest.raises(ConfigError, match="weight_format=nf4 is none of compressed-tensors' formats"):
    maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
