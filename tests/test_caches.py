"""A text read in chunks, or token by token from a cache, gives the logits of training, for every kind of cache.

Families are those of `tests/data/tiny_models.json`. Rounded caches are compared with exact ones, and weighed.
"""

import json
import math
import operator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import ConfigError, load_config
from maxtext.inference import programs
from maxtext.inference.decode_state import forward_step
from maxtext.inference.engine import Engine, PrefillChunk, dropless
from maxtext.inference.prefix_cache import PrefixCache
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from maxtext.kernels import decode_attention as step_kernel
from maxtext.layers.kv_cache import KVCacheQuantization
from maxtext.layers.paged_kv_cache import PagedKVCache, insert_row
from maxtext.models.model import Model
from tests.cases import cases
from tests.support import program, tiny

TINY_MODELS = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
FAMILIES = {name: case["keys"] for name, case in TINY_MODELS.items()}
QUICK = ("gemma2",)  # with windows
LENGTH, READ = 40, 20
RUN = {"max_target_length": LENGTH, "per_device_batch_size": 1, "dataset_type": "synthetic", "dtype": "float32",
       "jax_cache_dir": ""}  # fmt: skip
TEXT = np.random.default_rng(0).integers(0, 96, LENGTH, dtype=np.int32).tolist()
LATENT = (("mla_naive_kvcache", False),)
PAGES = np.array([[6, 2, 8, 0, 3]])  # of the text

# Every kind of cache. A wrong one of another family changes what test_engine compares with its reference.
GATE = ("gemma2", "gpt_oss", "llama4_scout", "deepseek3", "deepseek32", "qwen3_next")
every_family = pytest.mark.parametrize("name", cases(FAMILIES, QUICK, GATE))


def kinds(name):
  """The caches that a family can have."""
  return [(), LATENT] if FAMILIES[name].get("attention_type") == "mla" else [()]


@cache
def model_of(name, keys=()):
  return dropless(program(load_config(**FAMILIES[name] | RUN | dict(keys))).model)


@cache
def parameters(name):
  """Every one random: initial values hide mistakes."""
  params, buffers = jax.jit(model_of(name).init)(0)
  rng = np.random.default_rng(0)
  return {n: p + 0.1 * rng.standard_normal(p.shape, np.float32) for n, p in (params | buffers).items()}


def engine_of(name, keys=()):
  model, params = model_of(name, keys), parameters(name)
  return Engine(model, params, slots=2, max_model_len=LENGTH, max_prompt_len=36, chunk_size=16, reuse_rows=True)


def prefilled(engine, *ends):
  """The row of the first tokens of the text, in chunks that end there."""
  row, start = None, 0
  for end in ends:
    row, start = engine.prefill_chunk(PrefillChunk(start, TEXT[start:end]), row), end
  return row


def reader(name, keys=()):
  """A function of the row of the first `READ` tokens: logits of the others, fed token by token. It is compiled once."""
  step = jax.jit(partial(forward_step, model_of(name, keys)))

  def read(row):
    found = []
    for position in range(READ, LENGTH):
      logits, row, _ = step(parameters(name), row, jnp.array([TEXT[position : position + 1]]), jnp.array([position]))
      found.append(logits[0, 0])
    return np.stack(found)

  return read


def paged_reader(name, keys):
  """The same for a cache in pages, of those layers that keep the whole text; None where none does."""
  plain = model_of(name, keys)
  model = Model.of(plain.spec, plain.execution.replace(pages=PagedKVCache(count=9, size=8, alignment=12)))
  decoder, step = model.bind(parameters(name)), jax.jit(partial(forward_step, model))
  kinds = decoder.cache_specs(1, LENGTH)

  @jax.jit
  def in_pages(row):
    def put(kind, whole, one):
      return insert_row(whole, one, PAGES[0]) if kind.paged else one

    return jax.tree.map(put, kinds, decoder.init_cache(1, LENGTH), row)

  def read(row):
    found, cache = [], in_pages(row)
    for position in range(READ, LENGTH):
      fed = jnp.array([TEXT[position : position + 1]]), jnp.array([position])
      logits, cache, _ = step(parameters(name), cache, *fed, pages=PAGES)
      found.append(logits[0, 0])
    return np.stack(found)

  return read if any(kind.paged for kind in jax.tree.leaves(kinds)) else None


def test_a_short_row_leaves_nothing_of_the_request_before(monkeypatch):
  """Not even where no query sees it: what is infinite there would spoil the sums."""
  monkeypatch.setattr(programs, "_SHORTEST_ROW", 8)
  used, new = (engine_of("gemma2") for _ in range(2))
  lengths = [max(array.shape[-2] for array in jax.tree.leaves(used.prefill(TEXT[:n]))) for n in (6, 20)]
  assert lengths == [32, LENGTH]  # a chunk has at least 16 tokens
  for count, steps in ((20, 16), (6, 12), (3, 0)):
    used.insert(used.prefill(TEXT[:count]), 1, TEXT[:count], SamplingParams(temperature=0.0))
    for _ in range(steps):
      used.decode_step([False, True])
  new.insert(new.prefill(TEXT[:3]), 1, TEXT[:3], SamplingParams(temperature=0.0))
  slots = [[array[:, 1] for array in jax.tree.leaves(engine.state.cache)] for engine in (used, new)]
  jax.tree.map(np.testing.assert_array_equal, *slots)


def forward(name):
  @jax.jit
  def logits(params, tokens):
    decoder = model_of(name).bind(params)
    return decoder.logits(decoder.hidden(tokens, jnp.arange(LENGTH)[None])[0])[0, READ:]

  return np.asarray(logits(parameters(name), jnp.array([TEXT])))


@every_family
def test_caches_give_the_logits_of_training(name):
  expected = forward(name)
  for keys in kinds(name):
    engine, read = engine_of(name, keys), reader(name, keys)
    cold = prefilled(engine, 16, READ)
    logits = read(cold)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    if read_pages := paged_reader(name, keys):
      np.testing.assert_allclose(read_pages(cold), logits, atol=1e-5, rtol=0)
    shared = prefilled(engine, 16)
    for _ in range(2):  # the same chunks, from a row that others went on from
      jax.tree.map(np.testing.assert_array_equal, engine.prefill_chunk(PrefillChunk(16, TEXT[16:READ]), shared), cold)
    np.testing.assert_allclose(read(prefilled(engine, 7, READ)), logits, atol=1e-5, rtol=0)  # other chunks


@pytest.mark.parametrize("keys", [(), (("quantize_kvcache", True), ("kv_quant_axis", "heads_and_dkv"))])
def test_a_step_reads_as_far_as_any_row_has_come(keys):
  """In blocks that do not divide the ring: what lies behind is not read, and reading it would change no bit."""
  model = model_of("gemma2", keys)
  by_blocks = model_of("gemma2", (*keys, ("use_ragged_attention", True), ("ragged_block_size", 12)))
  row = prefilled(engine_of("gemma2", keys), 16, READ)
  rows = jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), row)
  tokens, positions, params = jnp.array([[3], [4]]), jnp.array([READ, LENGTH - 1]), parameters("gemma2")
  step = jax.jit(partial(forward_step, by_blocks))
  alone, cache, _ = step(params, rows, tokens, positions, active=jnp.array([True, False]))
  beside, same, _ = step(params, rows, tokens, positions, active=jnp.array([True, True]))
  np.testing.assert_array_equal(alone[0], beside[0])
  np.testing.assert_array_equal(*(jax.tree.leaves(c)[0][:, 0] for c in (cache, same)))
  whole, *_ = jax.jit(partial(forward_step, Model.of(model.spec, model.execution.replace(block=None))))(
    params, rows, tokens, positions
  )
  np.testing.assert_allclose(beside, whole, atol=1e-5, rtol=0)
  spoilt = jax.tree.map(lambda a: a if a.dtype == jnp.int8 else a.at[..., 24:, :].set(jnp.nan), rows)
  np.testing.assert_array_equal(
    step(params, spoilt, tokens, positions, active=jnp.array([True, False]))[0][0], alone[0]
  )


@pytest.mark.parametrize(("axis", "calls"), [("tensor", True), ("context", False), ("pipeline", False)])
def test_the_kernel_for_one_token_reads_and_writes_a_layer_in_place(monkeypatch, axis, calls):
  """On two devices that have a key head each, over several blocks of places; rows are at positions of their own.

  Where devices have a part of the places or layers, it is not called.
  """
  monkeypatch.setattr(step_kernel, "_BLOCK_BYTES", 16 * 128 * 4)
  axes = {f"ici_{axis}_parallelism": 2, "ici_fsdp_parallelism": 1}
  model = program(tiny(head_dim=128, **axes), devices=2).model
  params, rng, T = jax.jit(lambda: operator.or_(*model.init(0)))(), np.random.default_rng(0), 64
  empty = jax.jit(lambda p: model.bind(p).init_cache(3, T))(params)
  rows = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32)), empty)
  tokens, positions = jnp.array([[3], [4], [5]]), jnp.array([0, 21, T - 1])

  def advanced(**changes):
    execution = model.execution.replace(attention=replace(model.execution.kernels.attention, interpret=True), **changes)
    return jax.jit(partial(forward_step, Model.of(model.spec, execution)))(params, rows, tokens, positions)

  (logits, cache, _), (expected, written, _) = advanced(decode_attention=True), advanced(block=None)
  assert np.abs(expected - advanced(block=16)[0]).max() < 1e-5
  np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)
  jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=0), cache, written)
  with_kernel = jax.make_jaxpr(
    partial(forward_step, Model.of(model.spec, model.execution.replace(decode_attention=True)))
  )
  assert ("pallas_call" in str(with_kernel(params, rows, tokens, positions))) == calls


def rounded(dtype, axis):
  return (("quantize_kvcache", True), ("kv_quant_dtype", dtype), ("kv_quant_axis", axis))


@pytest.mark.parametrize(
  ("name", "kind", "dtype", "axis", "scales"),
  [
    ("gemma2", (), "int8", "heads_and_dkv", 1),
    pytest.param("gemma2", (), "int4", "dkv", 2, marks=pytest.mark.slow),
    pytest.param("deepseek3", (), "int8", "dkv", 4, marks=pytest.mark.slow),
    pytest.param("deepseek3", LATENT, "int8", "dkv", 1, marks=pytest.mark.slow),
  ],
)
def test_rounded_caches_are_small_and_near(name, kind, dtype, axis, scales):
  """Of two arrays per layer, with so many scales per token. The median leaves out tokens that rounding sent to another
  expert."""
  keys = kind + rounded(dtype, axis)
  exact, engine, read = engine_of(name, kind), engine_of(name, keys), reader(name, keys)
  sizes = [a.shape for a in jax.tree.leaves(exact.state.cache)]
  bits, places = int(dtype[3:]), sum(shape[0] * shape[1] * shape[-2] for shape in sizes)
  promised = sum(map(math.prod, sizes)) * bits // 8 + places * scales * 4
  assert sum(a.nbytes for a in jax.tree.leaves(engine.state.cache)) == promised
  expected = reader(name, kind)(prefilled(exact, 16, READ))
  logits = read(prefilled(engine, 16, READ))
  distance = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
  assert 1e-4 < np.median(distance) < {8: 0.015, 4: 0.25}[bits]
  np.testing.assert_allclose(read(prefilled(engine, 7, READ)), logits, atol=1e-5, rtol=0)  # in other chunks
  np.testing.assert_allclose(paged_reader(name, keys)(prefilled(engine, 16, READ)), logits, atol=1e-5, rtol=0)


def test_a_rounded_cache_serves_chunks_and_shared_beginnings():
  engine = engine_of("gemma2", rounded("int8", "heads_and_dkv"))
  scheduler = Scheduler(engine, PrefixCache(10**9, 0))

  def write(prompt, scheduler):
    scheduler.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=4)))
    return [(event.token, event.logprob) for event in scheduler.run()]

  cold = write(TEXT[:36], Scheduler(engine))
  assert write(TEXT[:36], scheduler) == cold
  assert write(TEXT[:36], scheduler) == cold, "its beginning was there"


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 7)])
@pytest.mark.parametrize(
  "rounding",
  [
    KVCacheQuantization(8, True),
    KVCacheQuantization(8, False),
    KVCacheQuantization(4, True),
    KVCacheQuantization(4, False),
  ],
)
def test_rounding_is_to_the_nearest(rounding, shape):
  x = np.random.default_rng(0).standard_normal(shape, np.float32)
  x[0, 0] = 0.0
  numbers, scale = rounding.quantize(x)
  per_head = rounding.per_head and len(shape) == 4
  assert scale.shape == ((2, 3, 4, 1) if per_head else (2, 3, *(1,) * (len(shape) - 2)))
  largest = np.abs(x).max(-1 if per_head else tuple(range(2, x.ndim)), keepdims=True)
  step = largest / {8: 127, 4: 7}[rounding.bits]
  restored = np.asarray(rounding.dequantize(numbers, scale, x))
  assert (np.abs(restored - x) <= step / 2 + 1e-6).all()
  assert numbers.nbytes == np.ceil(shape[-1] * rounding.bits / 8) * math.prod(shape[:-1])


def test_a_rounded_cache_needs_scales():
  with pytest.raises(ConfigError, match="kv_quant_axis=dkv"):
    tiny(quantize_kvcache=True, kv_quant_axis="")
