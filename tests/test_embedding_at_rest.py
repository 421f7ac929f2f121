"""The embedding and the head at rest in few bits, on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from jax.extend.core import jaxprs_in_params
from safetensors.torch import load_file

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint.inspect import read_metadata
from maxtext.checkpoint.location import locate
from maxtext.cli.main import main
from maxtext.inference.inference_model import load_params
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import abstract_model, build_model
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from maxtext.weights.weights_at_rest import plain_model
from tests.support import TINY, program
from tests.test_matmul_seam import stepped, values
from tests.test_weights_at_rest import RUN_KEYS, assert_equal, assert_same_logits, gate, loaded, logits, served, stored

WHOLE = {"weight_format_targets": ["layers/", "embedding", "head"]}
SIZES = {"base_emb_dim": 64, "base_mlp_dim": 128, "head_dim": 16, "logits_via_embedding": False}
TIED = {"logits_via_embedding": True, "normalize_embedding_logits": False}
BLOCK = {"int4": {"weight_block_size": 32}, "nf4": {"weight_block_size": 32}}


@pytest.fixture(scope="module", params=["untied", "tied"])
def run(request, tmp_path_factory):
  """The folder of a run."""
  folder = tmp_path_factory.mktemp(request.param)
  keys = RUN_KEYS | SIZES | (TIED if request.param == "tied" else {})
  maxtext.train(load_config(**keys | {"base_output_directory": str(folder), "run_name": "run"}))
  return folder / "run"


def multiplied(model, arrays):
  """Every parameter of the plain model, from what is stored."""
  rounding, plain, found = model.execution.weight_format.rounding, plain_model(model), {}
  for name in plain.weight_names:
    leaves = {leaf: arrays[f"{name}{leaf[6:]}"] for leaf in LEAVES if f"{name}{leaf[6:]}" in arrays}
    if len(leaves) == 1:
      found[name] = arrays[name]
    elif name == "embedding/table":
      of_head = {leaf: array.T for leaf, array in leaves.items()}
      found[name] = rounding.decode(of_head, plain.struct(name).shape[::-1], 0, jnp.float32).T
    else:
      found[name] = rounding.decode(leaves, plain.struct(name).shape, plain.contracted[name][0], jnp.float32)
  return found


LEAVES = ("weight", "weight_scale", "weight_global_scale")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", gate(["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"], "int4"))
def test_a_model_computes_with_what_is_stored(name, tied):
  model = served(**TINY | SIZES | WHOLE | BLOCK.get(name, {}) | {"weight_format": name, "logits_via_embedding": tied})
  plain = plain_model(model)
  params = values(plain)
  arrays = stored(model, params)
  assert arrays.keys() == model.params.keys() | model.buffers.keys()
  table = arrays["embedding/table"]
  assert table.shape == (128, 64 if name in ("int8", "fp8") else 32), "a row of the vocabulary is in one place"
  assert ("head/weight_scale" in arrays) != tied
  rounded = multiplied(model, arrays)
  if not tied:  # a row and a channel of the head are rounded alike
    same = stored(model, params | {"head/weight": params["embedding/table"].T})
    np.testing.assert_array_equal(same["head/weight"].T, same["embedding/table"])
    np.testing.assert_array_equal(same["head/weight_scale"].T, same["embedding/table_scale"])
  expected = stepped(plain, rounded)
  np.testing.assert_allclose(stepped(model, arrays), expected, atol=2e-5 * float(jnp.abs(expected).max()))
  assert np.abs(expected - stepped(plain, params)).max() > 1e-3, "rounding is felt"
  assert model.size == plain.size


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_a_lookup_multiplies_out_its_rows_alone(name):
  """No array of the program has as many elements as the table, but the table."""
  model = served(**TINY | SIZES | WHOLE | {"weight_format": name, "vocab_size": 4096})
  tokens = jnp.arange(6)[None]

  def embed(params):
    return model.bind(params).embed(tokens, jnp.arange(6)[None])

  arrays = stored(model, values(plain_model(model)))
  program = jax.make_jaxpr(embed)(arrays)
  made = [v.aval for equation in equations(program.jaxpr) for v in equation.outvars]
  assert max(aval.size for aval in made if aval.dtype in (jnp.float32, jnp.int32)) < 4096
  table = plain_model(model).bind(multiplied(model, arrays)).embed(tokens, jnp.arange(6)[None])
  np.testing.assert_array_equal(jax.jit(embed)(arrays), table)


def equations(jaxpr):
  """All equations, those of inner programs too."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


@pytest.mark.parametrize("name", gate(["int8", "int4", "nvfp4"], "int4"))
def test_weights_are_the_same_however_they_come_to_be_at_rest(name, run, tmp_path):
  """Rounded at load, by the command, saved at load, from a Hugging Face folder, and out to one and in again."""
  keys = BLOCK.get(name, {}) | {"weight_format": name} | WHOLE
  at_load, model = loaded(run, **keys)
  assert at_load["embedding/table"].dtype == (jnp.int8 if name == "int8" else jnp.uint8)
  block = ["--block", "32"] if name == "int4" else []
  assert main(["quantize", str(run), str(tmp_path / "out"), "--format", name, "--embedding", *block]) == 0
  assert_equal(loaded(tmp_path / "out")[0], at_load)
  assert_equal(loaded(run, **keys, save_quantized_params_path=str(tmp_path / "saved"))[0], at_load)
  maxtext.convert(run, tmp_path / "hf")
  assert_equal(loaded(tmp_path / "hf", **keys)[0], at_load)
  if model.spec.tied:
    return
  folder = maxtext.convert(tmp_path / "out", tmp_path / "exported", to="huggingface")
  assert_equal(loaded(folder, **keys)[0], at_load)
  plain = loaded(folder)[0]
  for path, array in multiplied(model, at_load).items():
    np.testing.assert_array_equal(plain[path], array, err_msg=path)
  with pytest.raises(ConfigError, match="holds weights at rest with"):
    loaded(tmp_path / "out", weight_format_targets=["layers/"])


def test_compressed_tensors_reads_the_embedding(run, tmp_path):
  """By its own library, which transformers calls; that itself fills packed embeddings with random numbers."""
  keys = {"weight_format": "int4", "weight_block_size": 32} | WHOLE
  maxtext.quantize(run, tmp_path / "rest", **keys)
  arrays, model = loaded(tmp_path / "rest")
  if model.spec.tied:
    with pytest.raises(ConfigError, match="ties no head to an embedding in few bits"):
      maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
    return
  folder = maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
  config = transformers.AutoConfig.from_pretrained(folder)
  scheme = QuantizationConfig.model_validate(config.quantization_config)
  assert scheme.config_groups["group_0"].targets == ["Linear", "Embedding"]
  assert not scheme.ignore
  del config.quantization_config
  theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
  compressor = ModelCompressor(scheme)
  apply_quantization_config(theirs, scheme, run_compressed=False)
  compressor.compress_model(theirs)
  theirs.load_state_dict(load_file(folder / "model.safetensors"))
  compressor.decompress_model(theirs)
  expected = multiplied(model, arrays)
  np.testing.assert_array_equal(theirs.model.embed_tokens.weight.detach(), expected["embedding/table"])
  np.testing.assert_array_equal(theirs.lm_head.weight.detach().T, expected["head/weight"])
  tokens = np.arange(10)[None] * 7
  with torch.no_grad():
    answer = theirs(torch.tensor(tokens)).logits.float().numpy()
  decoder = plain_model(model).bind(expected)
  ours = decoder.logits(decoder.hidden(jnp.asarray(tokens), jnp.arange(10)[None])[0])
  np.testing.assert_allclose(ours, answer, atol=1e-5 * float(np.abs(answer).max()))


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_stored_is_what_was_trained(tied, tmp_path):
  """Quantization-aware training rounds the lookup and the head as they will be stored."""
  format_ = {"weight_format": "int4", "weight_block_size": 16} | WHOLE
  keys = RUN_KEYS | SIZES | format_ | {"logits_via_embedding": tied}
  keys |= {"base_output_directory": str(tmp_path), "run_name": "run"}
  p = program(load_config(**keys))
  maxtext.train(load_config(**keys))
  step = load_weights(resolve_source(str(tmp_path / "run"), {}).config, p.model, p.model.params | p.model.buffers)
  assert step["embedding/table"].dtype == jnp.float32, "the trained weights are plain"
  maxtext.quantize(tmp_path / "run", tmp_path / "out", **format_)
  arrays, model = loaded(tmp_path / "out")
  rounding = model.execution.weight_format.rounding
  table = rounding.encode(step["embedding/table"].T, 0, 1)
  np.testing.assert_array_equal(arrays["embedding/table"], table["weight"].T)
  assert_same_logits(logits(model, arrays), logits(p.model, step), exactly=False)


def test_a_mesh_computes_what_one_device_does(run):
  """The vocabulary of the head and of the table is split over two devices."""
  format_ = {"weight_format": "int4", "weight_block_size": 32} | WHOLE
  expected = logits(*reversed(loaded(run, **format_)))
  for axis in ("tensor", "fsdp"):
    mesh = {"ici_fsdp_parallelism": 1, f"ici_{axis}_parallelism": 2}
    config = resolve_source(str(run), {"dataset_type": "synthetic", **mesh, **format_}).config
    model = build_model(config, make_mesh(config, jax.devices()[:2]), serving=True)
    assert not model.params["embedding/table"].sharding.is_fully_replicated
    found = logits(model, load_params(config, model))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


WRONG = {
  "half of a tied head": (TIED, {"weight_format_targets": ["layers/", "head"]}, "name both, or neither"),
  "half of a tied table": (TIED, {"weight_format_targets": ["layers/", "embedding"]}, "name both, or neither"),
  "inputs": ({}, WHOLE | {"quantization": "int8"}, "rounds neither the embedding nor the head"),
  "block": ({}, WHOLE | {"weight_format": "int4", "weight_block_size": 24}, "weight_block_size"),
}
EMBEDDING_ALONE = {"weight_format_targets": ["embedding"], "weight_format": "int4", "weight_block_size": 48}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_name_the_key(case):
  model, keys, problem = WRONG[case]
  with pytest.raises(ConfigError, match=problem):
    served(**TINY | SIZES | model | {"weight_format": "int8"} | keys)


def test_a_table_that_cannot_be_stored_is_not_trained_for():
  with pytest.raises(ConfigError, match="the 64 inputs of embedding are not a multiple of 48: choose another"):
    program(load_config(**RUN_KEYS | SIZES | EMBEDDING_ALONE))


@pytest.mark.parametrize("name", gate(["int8", "int4", "fp8"], "int4"))
def test_a_vocabulary_with_spare_rows_is_not_rounded_again(name, tmp_path):
  """Rounding again finds other scales: the largest value is no longer half a step beyond the last integer."""
  keys = {"weight_format": name} | BLOCK.get(name, {}) | WHOLE
  maxtext.train(load_config(**RUN_KEYS | SIZES | {"base_output_directory": str(tmp_path), "run_name": "run"}))
  maxtext.quantize(tmp_path / "run", tmp_path / "rest", **keys)
  folder = maxtext.convert(tmp_path / "rest", tmp_path / "hf", to="huggingface")
  before = loaded(folder, **keys)[0]
  for rows in (120, 136):
    found = loaded(folder, vocab_size=rows, override_model_config=True, **keys)[0]
    for path in ("embedding/table", "embedding/table_scale", "head/weight", "head/weight_scale"):
      there, ours = (np.asarray(one[path].T if path.startswith("head") else one[path]) for one in (before, found))
      np.testing.assert_array_equal(ours[: min(rows, 128)], there[:rows], err_msg=path)
      assert not np.any(ours[128:].astype(np.float32)), path


GIGABYTES = {"int8": 8.037, "fp8": 8.037, "int4": 4.267, "mxfp4": 4.267, "nf4": 4.518, "nvfp4": 4.518}
MOST = {"int8": 0.52, "fp8": 0.52, "int4": 0.29, "mxfp4": 0.29, "nf4": 0.29, "nvfp4": 0.29}


@pytest.mark.parametrize("name", GIGABYTES)
def test_bytes_of_a_real_model(name):
  """All of Llama 3.1 8B: the figures of the page."""
  keys = {"model_name": "llama3.1-8b", "dataset_type": "synthetic", "weight_dtype": "bfloat16"}
  model = abstract_model(load_config(**keys, weight_format=name, **WHOLE), serving=True)
  total = sum(s.size * s.dtype.itemsize for s in (model.params | model.buffers).values()) / 1e9
  assert total == pytest.approx(GIGABYTES[name], abs=1e-3)
  assert total / 16.061 <= MOST[name]


def test_the_embedding_is_rounded_beside_other_targets(run, tmp_path):
  out = maxtext.quantize(run, tmp_path / "out", weight_format="int8", weight_format_targets=["head"], embedding=True)
  assert read_metadata(locate(str(out))).config["weight_format_targets"]["value"] == ["head", "embedding"]
