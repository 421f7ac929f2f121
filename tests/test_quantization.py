"""Quantized training: the rounding equals qwix's, three passes multiply few bits, and it runs on every mesh."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint.export import export_parameters
from maxtext.checkpoint.options import array_storage
from maxtext.kernels.grouped_matmul import GroupedMatmul
from maxtext.kernels.quantize import FORMATS, RangeCalibration, dequantize, quantize
from maxtext.layers.linear import Linear
from maxtext.layers.matmul import PlainMatmul
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.layers.quantized_matmul import Operand, QuantizedMatmul
from maxtext.layers.sparse_matmul import largest
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.step import gradients
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from tests.support import losses, program, tiny

SLOW, MESH = pytest.mark.slow, pytest.mark.mesh
CASES = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
DELAYED = {
  "quantization": "fp8",
  "act_quantization_calibration_method": "delayed,4",
  "weight_quantization_calibration_method": "delayed,4",
}
SCALINGS = {"int8": {"quantization": "int8"}, "fp8": {"quantization": "fp8"}, "fp8 delayed": DELAYED}


def values(*shape, seed=0, spread=3.0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape[-1:])), jnp.float32)


QWIX = {"int8": jnp.int8, "int4": jnp.int4, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@pytest.mark.parametrize("method", ["absmax", "absmax,0.7", "rms,3", "fixed,-2,2"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_qwix(name, method):
  x = values(6, 40).at[:, 3].set(0.0)
  ours = quantize(x, FORMATS[name], (0,), RangeCalibration.parse(method))
  theirs = qwix.quantize(x, QWIX[name], channelwise_axes=(1,), calibration_method=method)
  most = float((jnp.iinfo if name.startswith("int") else jnp.finfo)(QWIX[name]).max)
  np.testing.assert_array_equal(ours.values.astype(jnp.float32), theirs.qvalue.astype(jnp.float32).clip(-most, most))
  np.testing.assert_array_equal(ours.scale, theirs.scale)


def test_rounding_is_the_same_whatever_is_around_it():
  x = values(64, 96)
  alone, jitted = quantize(x, FORMATS["int8"], (0,)), jax.jit(lambda x: quantize(x * 1, FORMATS["int8"], (0,)))(x)
  np.testing.assert_array_equal(alone.values, jitted.values)
  half = quantize(x.astype(jnp.bfloat16), FORMATS["int8"], (0,))
  np.testing.assert_array_equal(
    half.values, quantize(x.astype(jnp.bfloat16).astype(jnp.float32), FORMATS["int8"], (0,)).values
  )


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_value_that_is_not_finite_is_not_hidden(value):
  x = jnp.ones((2, 4)).at[0, 1].set(value)
  found = dequantize(quantize(x, FORMATS["int8"], (1,)), jnp.float32)
  assert not np.isfinite(found[0]).all()
  np.testing.assert_allclose(found[1], 1.0, rtol=0.01)


EVERY = {name: Operand(FORMATS[name]) for name in FORMATS}
LINEAR = MatmulCall(Site("layer/up", "linear"), "abc,cd->abd", jnp.float32)


def passes(call, matmul, x, weight, seen):
  out, back = jax.vjp(lambda x, w: matmul(call, {}, PlainMatmul(), x, w), x, weight)
  return (out, *back(seen))


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_three_passes_equal_qwix(name):
  x, weight, seen = values(2, 8, 32, spread=1), values(32, 24, seed=1, spread=1), values(2, 8, 24, seed=2, spread=1)
  of_gradient = "int8" if name == "int8" else "e5m2"
  matmul = QuantizedMatmul(input=EVERY[name], weight=EVERY[name], gradient=EVERY[of_gradient])
  found = jax.jit(lambda *a: passes(LINEAR, matmul, *a))(x, weight, seen)

  def product(a, b, a_dims, b_dims, kinds):
    rest = [tuple(i for i in range(v.ndim) if i not in dims) for v, dims in ((a, a_dims), (b, b_dims))]
    a, b = (qwix.quantize(v, QWIX[k], channelwise_axes=r) for v, k, r in zip((a, b), kinds, rest, strict=True))
    if "int8" in kinds:  # the lowest integer is not used here
      a, b = (v.replace(qvalue=jnp.maximum(v.qvalue, -127)) for v in (a, b))
    return qwix.dot_general(a, b, ((a_dims, b_dims), ((), ())))

  expected = (
    product(x, weight, (2,), (0,), (name, name)),
    product(seen, weight, (2,), (1,), (of_gradient, name)),
    product(x, seen, (0, 1), (0, 1), (name, of_gradient)),
  )
  exact = passes(LINEAR, QuantizedMatmul(), x, weight, seen)
  for ours, theirs, plain in zip(found, expected, exact, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max()))
    error = float(jnp.linalg.norm(ours - plain) / jnp.linalg.norm(plain))
    assert 1e-4 < error < (0.03 if name == "int8" else 0.1)


@pytest.mark.parametrize("kernel", ["tiled", "ragged_dot"])
@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_experts_equal_a_loop_over_them(name, kernel):
  sizes = jnp.array([5, 0, 9, 2])
  x, weight, seen = values(20, 16, spread=1), values(4, 16, 12, seed=1, spread=1), values(20, 12, seed=2, spread=1)
  rows = jnp.arange(20)[:, None] < 16  # the last four belong to nobody
  x, seen = jnp.where(rows, x, 0), jnp.where(rows, seen, 0)
  call = MatmulCall(
    Site("experts/up", "experts"), "mi,xio->mo", jnp.float32, kernel=GroupedMatmul(kernel), group_sizes=sizes
  )
  of_gradient = "int8" if name == "int8" else "e5m2"
  matmul = QuantizedMatmul(input=EVERY[name], weight=EVERY[name], gradient=EVERY[of_gradient])
  found = passes(call, matmul, x, weight, seen)

  def rounded(v, kind, axes):
    return dequantize(quantize(v, FORMATS[kind], axes), jnp.float32)

  out, by_x, by_w, start = jnp.zeros((20, 12)), jnp.zeros((20, 16)), [], 0
  x_rows, seen_rows = rounded(x, name, (0,)), rounded(seen, of_gradient, (0,))
  for e, size in enumerate(np.asarray(sizes)):
    own = slice(start, start := start + int(size))
    out = out.at[own].set(rounded(x, name, (1,))[own] @ rounded(weight[e], name, (0,)))
    by_x = by_x.at[own].set(rounded(seen, of_gradient, (1,))[own] @ rounded(weight[e], name, (1,)).T)
    by_w.append(x_rows[own].T @ seen_rows[own])
  for ours, theirs in zip(found, (out, by_x, jnp.stack(by_w)), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_shards_of_a_batch_have_their_own_scales():
  x, weight, seen = values(4, 8, 32), values(32, 24, seed=1), values(4, 8, 24, seed=2)
  x = x.at[:2].multiply(100.0)  # so that one scale loses the other half
  kinds = {"input": EVERY["int8"], "weight": EVERY["int8"], "gradient": EVERY["int8"]}
  whole, parts = (passes(LINEAR, QuantizedMatmul(**kinds, shards=n), x, weight, seen) for n in (1, 2))
  halves = [passes(LINEAR, QuantizedMatmul(**kinds), x[h], weight, seen[h])[2] for h in (slice(2), slice(2, 4))]
  np.testing.assert_allclose(parts[2], halves[0] + halves[1], rtol=1e-5, atol=1e-3)
  np.testing.assert_array_equal(parts[0], whole[0])
  assert float(jnp.abs(parts[2] - whole[2]).max()) > 0
  three, four = (passes(LINEAR, QuantizedMatmul(**kinds, shards=n), x, weight, seen) for n in (3, 4))
  np.testing.assert_array_equal(three[2], four[2], err_msg="three do not divide four rows")
  weights_only = QuantizedMatmul(weight=EVERY["int4"], shards=2)
  np.testing.assert_array_equal(
    passes(LINEAR, weights_only, x, weight, seen)[2], passes(LINEAR, QuantizedMatmul(), x, weight, seen)[2]
  )


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_long_sums_do_not_overflow(devices):
  x, seen = jnp.ones((4, 40_000, 2)), jnp.ones((4, 40_000, 3))  # 160,000 times 127 * 127 is more than an int32 holds
  matmul = QuantizedMatmul(input=EVERY["int8"], weight=EVERY["int8"], gradient=EVERY["int8"], batch_shards=devices)
  np.testing.assert_allclose(passes(LINEAR, matmul, x, jnp.ones((2, 3)), seen)[2], 160_000, rtol=0.01)


@pytest.mark.parametrize("name", ["int8", "e4m3"])
@pytest.mark.parametrize("shards", [1, 2])
def test_devices_multiply_their_parts_with_the_scales_of_the_batch(name, shards):
  x, weight, seen = values(8, 4, 32), values(32, 24, seed=1), values(8, 4, 24, seed=2)
  x = x.at[:2].multiply(100.0)
  kinds = {"input": EVERY[name], "weight": EVERY[name], "gradient": EVERY[name], "shards": shards}
  one, four = (passes(LINEAR, QuantizedMatmul(**kinds, batch_shards=n), x, weight, seen)[2] for n in (1, 4))
  np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.mesh
def test_devices_send_gradients_in_the_dtype_of_the_run():
  """What is summed over devices is the gradient, not the integers that it is made of."""
  made = program(tiny(**RUN | {"per_device_batch_size": 1, "quantization": "int8", "ici_fsdp_parallelism": 8}), 8)
  sums = re.findall(r" = (.*?) (?:all-reduce|reduce-scatter)\(", made.lower().compile().as_text())
  assert any("f32[48,4,8]" in kinds for kinds in sums), "of the queries' weight"
  assert not any("s32" in kinds for kinds in sums)


def products(text):
  """The operand types of every matmul in a lowered program."""
  found = re.findall(r"stablehlo\.dot_general.*?: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
  return [tuple(kind.rsplit("x", 1)[-1] for kind in pair) for pair in found]


IN_GATE = {"mixtral": (), "deepseek3": SLOW}
FAMILIES = [pytest.param(c, marks=IN_GATE.get(c, pytest.mark.nightly)) for c in CASES]


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_multiplies_eight_bits_in_all_passes(case):
  keys = CASES[case]["keys"] | {"max_target_length": 16, "per_device_batch_size": 1, "dataset_type": "synthetic"}
  counts = {}
  for quantization in ("", "int8", "fp8"):
    config = load_config(**keys, quantization=quantization, jax_cache_dir="")
    p = program(config)
    wanted = [site for site in _sites(p.model) if site.role in ("linear", "experts")]
    counts[quantization] = len(wanted), products(_lowered(p))
  sites, plain = counts[""]
  assert not [pair for pair in plain if "i8" in pair or "f8" in "".join(pair)]
  for quantization, pairs in (
    ("int8", {("i8", "i8")}),
    ("fp8", {("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")}),
  ):
    found = [pair for pair in counts[quantization][1] if pair in pairs]
    assert set(found) == pairs
    for pair in pairs:  # forward, gradient of the input, gradient of the weight
      assert found.count(pair) >= (3 if len(pairs) == 1 else 1) * sites, f"{pair} for {sites} weights"


def _lowered(p):
  return (
    jax.jit(lambda params, buffers, batch: gradients(p.model, LanguageModeling(), params, buffers, batch))
    .lower(p.model.params, p.model.buffers, p.batch)
    .as_text()
  )


def _sites(model):
  modules = (m for _, m in nnx.iter_graph(model.bind(model.params | model.buffers)) if isinstance(m, Linear))
  return {m.site for m in modules}


RUN = {"steps": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def one_device():
  return {(n, k): losses(tiny(**RUN | model | keys)) for n, keys in SCALINGS.items() for k, model in MODELS.items()}


MODELS = {"dense": {}, "experts": EXPERTS}
EIGHT = {"devices": 8, "per_device_batch_size": 1}
# The scales of a weight gradient are those of a micro-batch, and of the rows that a device has for its experts: there
# the rounding differs. Elsewhere only sums have another order, which moves few values over a rounding's edge.
WAYS = {
  "unrolled": ("dense", {"scan_layers": False}, 2e-4),
  "less remat": ("experts", {"remat_policy": "minimal"}, 2e-4),
  "accumulation": ("dense", {"gradient_accumulation_steps": 4, "per_device_batch_size": 2}, 4e-3),
  "fsdp 4 x tensor 2": ("dense", EIGHT | {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, 3e-4),
  "fsdp 2 x tensor 2 x expert 2": (
    "experts",
    EIGHT | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2},
    4e-3,
  ),
  "context 2 x data 2 x fsdp_transpose 2": (
    "dense",
    EIGHT | {
      "ici_context_parallelism": 2, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 1,
      "ici_fsdp_transpose_parallelism": 2, "replicate_quant_scale": True,
    },
    2e-4,
  ),
  "pipeline 2 x fsdp 2": (
    "dense",
    {
      "devices": 4, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 2,
      "num_pipeline_microbatches": 4,
    },
    4e-3,
  ),
}  # fmt: skip
QUICK = ("accumulation", "fsdp 4 x tensor 2", "fsdp 2 x tensor 2 x expert 2")


@pytest.mark.parametrize(
  "scaling", [pytest.param(s, marks=pytest.mark.nightly if s == "fp8" else ()) for s in SCALINGS]
)
@pytest.mark.parametrize(
  "way",
  [
    pytest.param(w, marks=[MESH] * ("devices" in keys) + [pytest.mark.nightly] * (w not in QUICK))
    for w, (_, keys, _) in WAYS.items()
  ],
)
def test_losses_are_the_same_wherever_a_model_runs(way, scaling, one_device):
  model, keys, tolerance = WAYS[way]
  keys = RUN | MODELS[model] | SCALINGS[scaling] | keys
  devices = keys.pop("devices", 1)
  np.testing.assert_allclose(losses(tiny(**keys), devices), one_device[scaling, model], rtol=tolerance)


@MESH
def test_devices_send_weights_of_experts_in_eight_bits():
  keys = RUN | EXPERTS | {"shard_exp_on_fsdp": True, "ici_fsdp_parallelism": 4, "per_device_batch_size": 1}
  gathers = {}
  for name, quantization in (("plain", {}), ("int8", {"quantization": "int8"})):
    p = program(tiny(**keys | quantization), 4)
    text = p.lower().compile().as_text()
    shape = p.model.struct(next(n for n in p.model.params if n.endswith("experts/gate/weight"))).shape
    inner = ",".join(map(str, shape[-2:]))
    gathers[name] = set(re.findall(rf"= (\w+)\[[\d,]*{inner}\]\S* all-gather\(", text))
  assert gathers == {"plain": {"f32"}, "int8": {"s8"}}


def test_losses_follow_those_of_float32(one_device):
  for model, keys in MODELS.items():
    plain = losses(tiny(**RUN | keys))
    assert plain[-1] < plain[0] - 0.1
    for name in SCALINGS:
      found = one_device[name, model]
      assert not np.array_equal(found, plain), name
      np.testing.assert_allclose(found, plain, rtol=0.01, err_msg=name)


def test_delayed_scaling_takes_the_range_of_earlier_steps():
  p = program(tiny(**DELAYED))
  state, batch = p.init(), next(p.feed()).batch
  histories = []
  for _ in range(6):
    state, _ = p.step(state, batch)
    histories.append({n: np.asarray(a) for n, a in state.buffers.items() if n.endswith("input_history")})
  assert histories[0], "there are histories"
  for name in histories[0]:
    steps = np.stack([h[name] for h in histories])
    assert (steps[0][..., 1:] == 0).all(), "one step was seen"
    assert (steps[0][..., 0] > 0).all()
    np.testing.assert_array_equal(steps[1][..., 1], steps[0][..., 0], err_msg="it moved on by one")
    np.testing.assert_array_equal(steps[5][..., 3], steps[2][..., 0], err_msg="four are kept")


def test_delayed_scaling_does_not_look_at_this_step():
  matmul = QuantizedMatmul(input=Operand(FORMATS["int8"], RangeCalibration("delayed", 2)), weight=EVERY["int8"])
  x, weight = values(2, 8, 32), values(32, 24, seed=1)
  own = {"input_amax": nnx.Variable(jnp.zeros(())), "input_history": nnx.Variable(jnp.array([0.5, 2.0]))}
  found = matmul(LINEAR, own, PlainMatmul(), x, weight)
  rounded = dequantize(quantize(x, FORMATS["int8"], (2,), amax=jnp.float32(2.0)), jnp.float32)
  assert float(jnp.abs(rounded).max()) == pytest.approx(2.0, rel=0.01), "larger values are cut"
  expected = jnp.einsum("abc,cd->abd", rounded, dequantize(quantize(weight, FORMATS["int8"], (0,)), jnp.float32))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
  assert own["input_amax"][...] == jnp.abs(x).max()


def test_a_skipped_step_leaves_histories_as_they_were():
  p = program(
    tiny(**RUN | DELAYED | {"steps": 8}, skip_step_on_spikes=True, skip_step_interval=2, skip_step_scaling_factor=0.0)
  )
  state, feed, histories, skipped = p.init(), p.feed(), [], []
  for _ in range(8):
    state, figures = p.step(state, next(feed).batch)
    histories.append(
      np.concatenate([np.asarray(a).ravel() for n, a in sorted(state.buffers.items()) if "history" in n])
    )
    skipped.append(int(figures["skipped_steps"]))
  assert 0 < skipped[-1] < 6, "some are above the mean of two, and some are not"
  same = [np.array_equal(a, b) for a, b in zip(histories[1:], histories[:-1], strict=True)]
  assert same == [now > before for now, before in zip(skipped[1:], skipped[:-1], strict=True)]


def test_masks_are_not_lost(tmp_path):
  folder = {"base_output_directory": str(tmp_path), "enable_checkpointing": True, "async_checkpointing": False}
  sparse = SPARSE | {"weight_sparsity_start_step": 1}
  maxtext.train(tiny(**folder, **sparse, run_name="sparse", steps=2))
  source = str(tmp_path / "sparse")
  with pytest.raises(ConfigError, match="has masks of N:M sparsity, which this run would leave out"):
    maxtext.train(tiny(load_parameters_path=source, steps=1))
  assert resolve_source(source, {}).config.weight_sparsity_n == 2
  apart = str(export_parameters(array_storage(tiny()), source, str(tmp_path / "apart"), None))
  for path in (source, apart):
    config = tiny(**sparse, load_parameters_path=path)
    model = program(config).model
    found = load_weights(config, model, model.params | model.buffers)
    masks = [np.asarray(found[name]).mean() for name in model.matmul_buffers if name.endswith("mask")]
    assert masks == [0.5] * 7, path


def test_a_file_gives_bits_by_path(tmp_path):
  file = tmp_path / "bits.json"
  file.write_text(
    json.dumps(
      {"__default__": {"w_bits": 8, "a_bits": 8}, "feed_forward/down": {"w_bits": 4}, "attention": {"w_bits": None}}
    )
  )
  p = program(tiny(quantization="intmp", quant_cfg_path=str(file)))
  formats = {}
  for site in _sites(p.model):
    wanting = [one for one in p.model.execution.matmul if one.wants(site)]
    assert len(wanting) <= 1
    formats["/".join(site.path.split("/")[-2:])] = wanting[0].weight.format if wanting else None
  assert formats["feed_forward/down"] == FORMATS["int4"]
  assert formats["feed_forward/up"] == FORMATS["int8"]
  assert all(found is None for path, found in formats.items() if path.startswith("attention"))
  found = losses(tiny(quantization="intmp", quant_cfg_path=str(file), steps=2))
  assert np.isfinite(found).all()


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    ({"quantization": "te_fp8_delayedscaling"}, "quantization=te_fp8_delayedscaling is not supported: it is of Trans"),
    ({"quantization": "nanoo_fp8"}, "one kind of GPU"),
    ({"quantization": "intmp"}, "needs quant_cfg_path"),
    ({"weight_sparsity_n": 2}, "weight_sparsity_n=2 and weight_sparsity_m=None must be N and M"),
    ({"weight_sparsity_n": 4, "weight_sparsity_m": 4}, "such as 2 and 4"),
    ({"weight_sparsity_n": 2, "weight_sparsity_m": 7}, "weight_sparsity_m=7 does not divide the 48 inputs of"),
    ({"quantization": "int8", "shard_mode": "explicit"}, "needs shard_mode=auto"),
    ({"quantization": "int8", "quantization_local_shard_count": 0}, "must be 1 or more, or -1"),
    (
      {"quantization": "int8", "act_quantization_calibration_method": "minmax"},
      "act_quantization_calibration_method: 'mi",
    ),
    ({"quantization": "int8", "weight_quantization_calibration_method": "fixed,-1,2"}, "not symmetric"),
    ({"quantization": "int8", "weight_quantization_calibration_method": "fixed,nan"}, "needs a number above 0"),
    (
      {"quantization": "fp8", "act_quantization_calibration_method": "delayed,2.5"},
      "needs a whole number of steps up to 1,024",
    ),
    ({"quantization": "fp8", "bwd_quantization_calibration_method": "delayed"}, "only inputs and weights"),
    ({"quantization": "intmp", "quant_cfg_path": "/nowhere.json"}, "quant_cfg_path=/nowhere.json cannot be read"),
  ],
)
def test_errors_name_the_key(keys, words):
  with pytest.raises(ConfigError, match=re.escape(words)):
    program(tiny(**keys))


@pytest.mark.parametrize(
  "text",
  [
    "[]",
    "{",
    '{"a": {"w_bits": 8.0}}',
    "[" * 100000,
    '{"a": {"w_bits": 3}}',
    '{"(": {"w_bits": 8}}',
    '{"a": {"bits": 8}}',
    '{"a": 8}',
  ],
)
def test_a_bad_file_of_bits_is_named(tmp_path, text):
  file = tmp_path / "bits.json"
  file.write_text(text)
  with pytest.raises(ConfigError, match=re.escape(f"quant_cfg_path={file}")):
    program(tiny(quantization="intmp", quant_cfg_path=str(file)))


SPARSE = {
  "weight_sparsity_n": 2,
  "weight_sparsity_m": 4,
  "weight_sparsity_start_step": 2,
  "weight_sparsity_update_step": 2,
}


def test_masks_keep_the_largest_of_every_block():
  weight = values(3, 2, 8, 5)
  mask = largest(weight, 1, 2, 2, 4)  # blocks of 4 along the 16 inputs of each of 3 copies
  blocks, kept = np.abs(np.asarray(weight)).reshape(3, 4, 4, 5), np.asarray(mask).reshape(3, 4, 4, 5)
  assert (kept.sum(2) == 2).all()
  least, most = np.where(kept, blocks, np.inf).min(2), np.where(kept, 0, blocks).max(2)
  assert (least >= most).all()
  assert np.asarray(largest(jnp.ones((4, 1)), 0, 1, 2, 4)).ravel().tolist() == [True, True, False, False]


@pytest.mark.parametrize("way", ["one device", pytest.param("mesh", marks=MESH)])
def test_weights_are_dense_first_and_then_sparse(way):
  mesh = {
    "per_device_batch_size": 1,
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 2,
    "ici_expert_parallelism": 2,
  }
  config = tiny(**EXPERTS | SPARSE | {"quantization": "int8", "steps": 6} | (mesh if way == "mesh" else {}))
  p = program(config, 8 if way == "mesh" else 1)
  state, batch, shares = p.init(), next(p.feed()).batch, []
  for step in range(5):
    masks = {n: np.asarray(a) for n, a in state.buffers.items() if n.endswith("sparsity/mask")}
    assert len(masks) == 7, "four of attention, three of the experts"
    shares.append([mask.mean() for mask in masks.values()])
    if step == 3:
      before = masks
    state, figures = p.step(state, batch)
    assert np.isfinite(figures["loss"])
  assert shares[:2] == [[1.0] * 7] * 2, "dense before the start"
  assert shares[2:] == [[0.5] * 7] * 3
  after = {n: np.asarray(a) for n, a in state.buffers.items() if n.endswith("sparsity/mask")}
  assert any((after[n] != before[n]).any() for n in after), "masks are made again"


def test_a_mask_changes_what_a_model_computes():
  p = program(tiny(**SPARSE))
  state, batch = p.init(), next(p.feed()).batch
  name = "groups/0/layers/0/feed_forward/up/matmul/sparsity/mask"
  params, buffers = state.params, dict(state.buffers)
  whole = gradients(p.model, LanguageModeling(), params, buffers, batch)
  buffers[name] = buffers[name].at[:, :24].set(False)
  part = gradients(p.model, LanguageModeling(), params, buffers, batch)
  assert part.loss != whole.loss
  grad = np.asarray(part.grads["groups/0/layers/0/feed_forward/up/weight"])
  assert not grad[:, :24].any()
  assert grad[:, 24:].any()
