"""A cache in pages: what a request gets is the same, with far too few pages for all, and no page is lost."""

import asyncio
import json
import math
import operator
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding

from maxtext import ConfigError
from maxtext.inference import inference_model
from maxtext.inference.block_table import BlockTable
from maxtext.inference.decode_state import forward_step
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.prefix_cache import PrefixCache
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from maxtext.kernels.attention import reference
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.paged_attention import paged
from maxtext.layers.paged_kv_cache import read_pages
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.topology import Topology
from maxtext.models.build import build_model
from maxtext.models.model import Model
from tests.inference_support import answering, ask, random_model
from tests.support import program, tiny
from tests.test_scheduler import SLOTS, collect, make_engine, requests

LENGTH, SIZE, COUNT = 48, 4, 16  # twelve pages for the longest text, so four of them never fit
PAGED = {
  "attention": "paged",
  "pagedattn_tokens_per_page": SIZE,
  "pagedattn_num_pages": COUNT,
  "pagedattn_head_dim_alignment": 12,
}


@pytest.fixture(scope="module")
def whole():
  """A text has a row of its own."""
  return make_engine(program(tiny()).model)


@pytest.fixture(scope="module")
def engine():
  return make_engine(program(tiny(**PAGED)).model)


def everyone():
  """Random requests, and some whose answers depend on what they have answered already."""
  counting = SamplingParams(
    temperature=0.7, frequency_penalty=1.5, presence_penalty=0.5, min_tokens=25, stop_token_ids=(1, 2, 3)
  )
  return [*requests(32), *(Request([n] * 9, replace(counting, seed=n)) for n in range(4))]


def check_pages(table):
  """Every page is free or one slot's."""
  held = table.entries[table.entries < table.num_pages].tolist()
  assert len(held) == len(set(held)) == table.num_pages - table.num_free_pages


def write(engine, asked, prefixes=None):
  """Events by request, in the order in which they were first answered, and how often pages were given back."""
  scheduler, found = Scheduler(engine, prefixes), {}
  total = scheduler.num_free_pages
  for request in asked:
    scheduler.submit(request)
  while scheduler.busy:
    collect(scheduler.step(), found)
    check_pages(engine.block_table)
  assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_free_pages) == (0, 0, total)
  return found, scheduler.num_preemptions


def check_same(found, expected):
  assert list(found) == list(expected), "first come, first served"
  for request, events in expected.items():
    for field in ("token", "finish_reason"):
      assert [getattr(event, field) for event in found[request]] == [getattr(event, field) for event in events]
    log_probs = [[event.logprob for event in answer] for answer in (found[request], events)]
    np.testing.assert_allclose(*log_probs, atol=1e-4, rtol=0)


def test_too_few_pages_change_no_answer(whole, engine):
  asked = everyone()
  expected, none = write(whole, asked)
  found, preempted = write(engine, asked)
  assert none == 0
  assert preempted >= 10
  check_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True])
def test_guesses_have_pages_too(whole, drafted):
  """And whoever gave its pages back may find the beginning of its text."""
  asked = [*everyone(), *(Request([5, 9, 70, 3] * 6, SamplingParams(temperature=0.0)) for _ in range(4))]
  model = program(tiny(**PAGED)).model
  draft = DraftModel(model, operator.or_(*jax.jit(model.init)(1))) if drafted else None
  guessing = make_engine(model, num_speculative_tokens=3, reuse_rows=True, draft_model=draft)
  found, preempted = write(guessing, asked, PrefixCache(10**9, 0))
  assert preempted >= 10
  check_same(found, write(whole, asked)[0])


@pytest.mark.mesh
@pytest.mark.slow
def test_a_mesh_changes_nothing(engine):
  config = tiny(**PAGED, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
  asked = everyone()[-8:]
  found, preempted = write(make_engine(program(config, devices=4).model), asked)
  assert preempted
  check_same(found, write(engine, asked)[0])


def test_who_gave_pages_back_can_leave(engine):
  """Whoever was let in last waits first; cancelled, it is gone, and its pages were free before."""
  scheduler = Scheduler(engine)
  patient = [Request([n] * 12, SamplingParams(temperature=0.0)) for n in range(SLOTS)]
  for request in patient:
    scheduler.submit(request)
  found = {}
  while not scheduler.num_preemptions:
    collect(scheduler.step(), found)
  last = max(found, key=patient.index)
  scheduler.cancel(last)
  assert [event.request for event in scheduler.step() if event.finish_reason == "cancelled"] == [last]
  collect(scheduler.run(), found)
  assert all(found[request][-1].finish_reason == "length" for request in patient if request is not last)
  assert scheduler.num_free_pages == COUNT


@pytest.mark.slow
def test_a_server_says_what_its_pages_do(tmp_path):
  """Two answers of a given form, for which there are not enough pages."""
  form = {"structured_outputs": {"regex": "[a-f]{70}"}, "n": 2, "seed": 3, "max_tokens": 80}
  asked = {"model": "tiny", "prompt": "a", **form}
  pages = {"pagedattn_tokens_per_page": 8, "pagedattn_num_pages": 13}
  texts, metrics = [], []
  for keys in ({}, {"attention": "paged", **pages}):
    loaded = random_model(tmp_path, **keys)
    with answering(loaded) as (_, app):
      _, answer = asyncio.run(ask(app, "/v1/completions", asked))
      texts.append([choice["text"] for choice in json.loads(answer)["choices"]])
      metrics.append(asyncio.run(ask(app, "/metrics"))[1])
  assert texts[0] == texts[1]
  assert all(re.fullmatch("[a-f]{70}", text) for text in texts[0])
  assert "maxtext_num_preemptions 0.0" in metrics[0]
  assert "maxtext_kv_cache_free_pages 13.0" in metrics[1]
  assert float(re.search(r"^maxtext_num_preemptions (\S+)$", metrics[1], re.MULTILINE)[1]) >= 1


def test_a_table_hands_out_every_page_once():
  table = BlockTable(num_pages=6, page_size=4, slots=3, max_pages_per_slot=4)
  assert table.allocate(0, 9)
  assert table.allocate(2, 1)
  assert table.allocate(0, 12), "they are there already"
  assert (table.num_free_pages, table.allocated_slots) == (2, [0, 2])
  assert not table.allocate(1, 9)
  assert (table.num_free_pages, table.allocated_slots) == (2, [0, 2]), "all or none"
  assert table.allocate(1, 8)
  check_pages(table)
  table.free(0)
  assert table.allocate(2, 99), "no more than it may have"
  assert (table.num_free_pages, table.allocated_slots) == (0, [2, 1])
  check_pages(table)


def test_the_keys_say_how_pages_are(engine):
  pools = jax.tree.leaves(engine.state.cache)
  assert {pool.shape for pool in pools} == {(2, 2, COUNT, SIZE, 12)}, "heads, layers, pages, places, filled up from 8"
  short = make_engine(program(tiny(**PAGED, pagedattn_max_pages_per_group=11)).model)
  assert Scheduler(short).max_output_len(40) == 4


REFUSED = {
  "windows": ({"attention_type": "local_sliding", "sliding_window_size": 7}, "attention=paged: no layer of this model"),
  "too few": ({"pagedattn_num_pages": 7}, "pagedattn_num_pages=7 are too few.*pagedattn_max_pages_per_group=7"),
  "no answer": ({"pagedattn_max_pages_per_group": 4}, "pagedattn_max_pages_per_group=4 .* leave no room"),
  "none": ({"pagedattn_max_pages_per_group": 0}, "pagedattn_max_pages_per_group=0 must be 1 or more"),
  "no pages": ({"attention": "chunked", "strict": True}, "no effect without attention=paged"),
}


def build(**keys):
  config = tiny(**(PAGED | {"max_prefill_predict_length": 16} | keys))
  model = program(config).model
  return inference_model.make_engine(config, model, model.params | model.buffers)


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(keys, message):
  with pytest.raises(ConfigError, match=message):
    build(**keys)


def draw(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("cap", [None, pytest.param(0.7, marks=pytest.mark.slow)])
def test_the_kernel_equals_the_reference(cap):
  """One row has a token, one a page that is not full, one all its pages; blocks of three do not divide them; on devices
  that split rows and heads. Keys and values are such that bfloat16 holds them."""
  B, H, K, R, N, P, M, D, W = 4, 4, 2, 2, 14, 8, 4, 8, 16
  lengths, order = np.array([1, 13, 32, 8], np.int32), iter(np.random.default_rng(0).permutation(N).tolist())
  table = np.array([[next(order) if m * P < length else N for m in range(M)] for length in lengths], np.int32)
  pools = [draw(n, K, R, N, P, W).at[..., D:].set(0).astype(jnp.bfloat16).astype(jnp.float32) for n in (0, 1)]
  q, layer, scoring = draw(2, B, 1, H, D), jnp.int32(1), ScoreSpec(D**-0.5, cap=cap)
  mesh = make_mesh(tiny(ici_data_parallelism=2, ici_fsdp_parallelism=1, ici_tensor_parallelism=2), jax.devices()[:4])
  with pltpu.force_tpu_interpret_mode():
    run = jax.jit(lambda *arrays: paged(*arrays, scoring, 3, mesh, "data", "tensor"))
    found = np.asarray(run(q, *pools, layer, table, lengths))
  k, v = (read_pages(pool, layer, table, jnp.zeros((B, 1, K, D))) for pool in pools)
  places = Tokens(np.broadcast_to(np.arange(M * P), (B, M * P)))
  np.testing.assert_allclose(found, reference(q, k, v, Tokens(lengths[:, None] - 1), places, scoring), atol=1e-5)


def paged_model(mesh, axes, **changes):
  """A model of bfloat16, whose pages the kernel reads; by the changes of its pages."""
  keys = {"attention": "paged", "dtype": "bfloat16", "head_dim": 64, "base_emb_dim": 256, "max_target_length": 256}
  config = tiny(**keys, **axes)
  model = build_model(config, make_mesh(config, mesh))
  return Model.of(
    model.spec, model.execution.replace(pages=replace(model.execution.kv_cache.pages, kernel=True, **changes))
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("axes", "calls"), [({"tensor": 2, "tensor_sequence": 2}, True), ({"tensor": 2, "pipeline": 2}, False)]
)
def test_a_model_reads_pages_by_the_kernel(axes, calls):
  """Where queries are split further than keys too; where layers are split, pages are gathered."""
  axes = {f"ici_{axis}_parallelism": parts for axis, parts in axes.items()}
  model = paged_model(jax.devices()[:4], axes, count=12, size=8, block=2, alignment=1)
  gathers = Model.of(model.spec, model.execution.replace(pages=replace(model.execution.kv_cache.pages, kernel=False)))
  params, _ = jax.jit(model.init)(0)
  slots = model.bind(params).cache_specs(2, 32)
  cache = jax.tree.map(lambda kind: draw(0, *kind.shape).astype(kind.dtype), slots)
  pages, fed = np.array([[7, 2, 12, 12], [0, 11, 4, 12]]), (jnp.array([[5], [6]]), jnp.array([10, 16]))
  plain, *_ = jax.jit(partial(forward_step, gathers))(params, cache, *fed, pages=pages)
  with pltpu.force_tpu_interpret_mode():
    step = jax.jit(partial(forward_step, model)).trace(params, cache, *fed, pages=pages)
    found, *_ = step.lower().compile()(params, cache, *fed, pages=pages)
  assert ("paged_attention" in str(step.jaxpr)) == calls
  np.testing.assert_allclose(found, plain, atol=0.02 * float(np.abs(plain).max()), rtol=0)
  elsewhere, *_ = jax.jit(partial(forward_step, gathers))(params, cache, *fed, pages=pages[::-1])
  assert np.abs(elsewhere - plain).max() > 0.2 * np.abs(plain).max(), "it matters which pages"


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p-8", "v6e-4"])
def test_a_step_on_tpus_reads_pages_where_they_lie(topology):
  """Nothing as large as one layer's part of a pool is copied."""
  pytest.importorskip("libtpu")
  model = paged_model(Topology.named(topology).devices(), {"ici_tensor_parallelism": 2}, count=4096)
  execution, params = model.execution, model.params

  def placed(kind):
    sharding = NamedSharding(execution.sharding.mesh, execution.sharding.partition(kind.shape, *kind.axes))
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)

  cache = jax.tree.map(placed, model.bind(params).cache_specs(8, 256))
  *fed, pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 1), (8,), (8, 8)))
  compiled = jax.jit(partial(forward_step, model), donate_argnums=1).lower(params, cache, *fed, pages=pages).compile()
  assert "paged_attention" in compiled.as_text()
  pool = cache[0][0]["key"]
  part = math.prod(pool.sharding.shard_shape(pool.shape)) * pool.dtype.itemsize // pool.shape[1]
  assert compiled.memory_analysis().temp_size_in_bytes < part
