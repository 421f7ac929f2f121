"""Continuous batching: what a request gets does not depend on who else is there, and no slot is lost."""

import random
from dataclasses import replace

import jax
import pytest

from maxtext.inference.engine import Engine
from maxtext.inference.prefix_cache import PrefixCache
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from tests.support import program, tiny

SLOTS = 4


KEYS = {"attention_type": "local_sliding", "sliding_window_size": 7}


def make_engine(model, kind=Engine, **changes):
  shardings = jax.tree.map(lambda a: a.sharding, (model.params, model.buffers))
  params, buffers = jax.jit(model.init, out_shardings=shardings)(0)
  return kind(model, params | buffers, SLOTS, max_model_len=48, max_prompt_len=40, chunk_size=16, **changes)


@pytest.fixture(scope="module")
def engine():
  """A tiny model with windows, whose prompts are prefilled in chunks."""
  return make_engine(program(tiny(**KEYS)).model)


@pytest.fixture(scope="module")
def split_engine():
  """The same on a mesh of four devices."""
  config = tiny(**KEYS, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
  return make_engine(program(config, devices=4).model)


def requests(count):
  draw = random.Random(0)
  return [
    Request(
      [draw.randrange(128) for _ in range(draw.randint(1, 40))],
      SamplingParams(
        temperature=draw.choice([0.0, 0.8, 1.5]),
        top_k=draw.choice([0, 20]),
        seed=draw.randrange(2**31),
        repetition_penalty=draw.choice([1.0, 1.3]),
        max_tokens=draw.choice([None, 1, 5, 30]),
        stop_token_ids=draw.choice([(), (3, 4)]),
        logprobs=draw.choice([0, 2]),
      ),
    )
    for _ in range(count)
  ]


def collect(events, found):
  for event in events:
    found.setdefault(event.request, []).append(event)
  return found


def test_alone_and_among_others(engine):
  everyone = requests(32)
  together, draw = Scheduler(engine), random.Random(1)
  arrivals, found = list(everyone), {}
  while arrivals or together.busy:
    for _ in range(min(draw.choice([0, 0, 1, 3]), len(arrivals))):
      together.submit(arrivals.pop(0))
    collect(together.step(), found)
  assert (together.num_running, together.num_waiting) == (0, 0)
  assert found.keys() == set(everyone)
  for request in everyone:
    alone = Scheduler(engine)
    alone.submit(request)
    assert collect(alone.run(), {})[request] == found[request]
    last = found[request][-1]
    count, most = len(found[request]), request.sampling_params.max_tokens or 48
    assert count <= min(most, 48 - len(request.prompt))
    assert last.finish_reason == ("stop" if last.token in request.sampling_params.stop_token_ids else "length")
    assert all(event.finish_reason is None for event in found[request][:-1])
    assert all(len(event.top_logprobs) == request.sampling_params.logprobs for event in found[request])


def test_first_come_first_served(engine):
  scheduler, everyone = Scheduler(engine), requests(9)
  for request in everyone:
    scheduler.submit(request)
  assert list(collect(scheduler.run(), {})) == everyone


def test_cancelled_requests_leave_at_once(engine):
  scheduler = Scheduler(engine)
  patient = [Request([1] * 20, SamplingParams(temperature=0.0)) for _ in range(SLOTS + 2)]
  for request in patient:
    scheduler.submit(request)
  while scheduler.num_running < SLOTS:
    scheduler.step()
  for request in (patient[0], patient[-1]):  # one has a slot, one waits
    scheduler.cancel(request)
  ended = [event.request for event in scheduler.step() if event.finish_reason == "cancelled"]
  assert set(ended) == {patient[0], patient[-1]}
  scheduler.step()
  assert scheduler.num_running == SLOTS, "who waited has taken the slot"
  scheduler.cancel(patient[0])  # again, when it is over
  rest = collect(scheduler.run(), {})
  assert rest.keys() == set(patient[1:-1]), "tokens of the step that ran meanwhile are dropped"
  assert all(rest[request][-1].finish_reason == "length" for request in patient[1:-1])
  assert (scheduler.num_running, scheduler.num_waiting, scheduler.busy) == (0, 0, False)


class Noting(Engine):
  """Notes when steps are started, of how many slots, and when they are read."""

  def start_step(self, active, token_bitmask=None):
    number, result = len(self.started), super().start_step(active, token_bitmask)
    self.started.append(sum(active))

    def read():
      self.ahead.append(len(self.started) - 1 - number)
      return result()

    return read


def test_a_step_is_started_before_the_one_before_is_read():
  engine = make_engine(program(tiny(**KEYS)).model, kind=Noting)

  def write(params):
    engine.started, engine.ahead = [], []
    scheduler = Scheduler(engine)
    for number, one in enumerate(params):
      scheduler.submit(Request([number + 1] * 5, one))
    return list(collect(scheduler.run(), {}).values())

  greedy = SamplingParams(temperature=0.0, max_tokens=7)
  texts = write([replace(greedy, max_tokens=most) for most in (7, 1, 4, 9, 5)])
  assert sum(engine.started) == sum(map(len, texts)) == 26, "the last token is known to be the last"
  assert engine.ahead == [1] * (len(engine.started) - 1) + [0]
  third = texts[0][2].token
  first = next(i for i, event in enumerate(texts[0]) if event.token == third) + 1
  ((*_, last),) = write([replace(greedy, stop_token_ids=(third,))])
  assert (last.token, last.finish_reason) == (third, "stop")
  assert engine.started == [1] * (first + 1), "it takes part in one more step, which is not read"
  assert engine.ahead == [1] * first


class Counting(Engine):
  """Notes the lengths of what was prefilled."""

  def prefill_chunk(self, chunk, *arguments):
    self.lengths.append(len(chunk.tokens))
    return super().prefill_chunk(chunk, *arguments)


@pytest.mark.parametrize("host_bytes", [0, 10**9])
def test_shared_beginnings_are_prefilled_once(host_bytes):
  """A window, so that a row is not all of the past. Two rows have room on the device."""
  engine = make_engine(program(tiny(**KEYS)).model, kind=Counting, reuse_rows=True)
  row = sum(array.nbytes for array in jax.tree.leaves(engine.state.cache)) // SLOTS
  scheduler = Scheduler(engine, PrefixCache(2 * row, host_bytes))
  draw = random.Random(2)
  first = [draw.randrange(128) for _ in range(36)]
  other = [draw.randrange(128) for _ in range(30)]

  def write(prompt, scheduler=scheduler):
    engine.lengths = []
    scheduler.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=4)))
    return [(event.token, round(event.logprob, 4)) for event in scheduler.run()], engine.lengths

  cold = {tuple(p): write(p, Scheduler(engine))[0] for p in (first, other, [*first[:32], 1, 2, 3])}
  assert write(first) == (cold[tuple(first)], [16, 16, 3])
  assert write(first) == (cold[tuple(first)], []), "the whole prompt was there"
  assert write([*first[:32], 1, 2, 3]) == (cold[*first[:32], 1, 2, 3], [2])
  assert write(other) == (cold[tuple(other)], [16, 13])
  there = [] if host_bytes else [16, 16, 3]
  assert write(first) == (cold[tuple(first)], there), "displaced rows wait on the host, if it has room"


@pytest.mark.mesh
def test_a_mesh_changes_nothing(engine, split_engine):
  written = []
  for one in (engine, split_engine):
    scheduler = Scheduler(one)
    for request in requests(6):
      scheduler.submit(request)
    written.append([[event.token for event in events] for events in collect(scheduler.run(), {}).values()])
  assert written[0] == written[1]
  keys = split_engine.state.cache[0][0]["key"]
  assert keys.shape == (2, SLOTS, 2, 7, 8)
  assert keys.addressable_shards[0].data.shape == (2, SLOTS // 2, 1, 7, 8)
  assert split_engine._decode_step._cache_size() == 1, "compiled once"
