"""A trained model as a Python object, and an engine whose parameters are swapped while it writes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxtext import LLM, ConfigError, SamplingParams
from maxtext.inference import inference_model
from maxtext.inference.decode import chat
from maxtext.inference.engine import validate_params
from maxtext.inference.inference_model import InferenceModel, make_engine
from maxtext.inference.scheduler import Request
from tests.inference_support import finish, random_model

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
CHUNKED = {
  "use_chunked_prefill": True, "prefill_chunk_size": 16, "max_prefill_predict_length": 40,
  "enable_prefix_caching": True,
}  # fmt: skip
LONG = list(range(100, 136))  # in three chunks


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
  loaded = random_model(tmp_path_factory.mktemp("llm"))
  return LLM.of(replace(loaded, tokenizer=replace(loaded.tokenizer, chat_template=TEMPLATE)))


def parameters(llm, seed):
  """Others of the same model."""
  model = llm.engine.model
  shardings = jax.tree.map(lambda a: a.sharding, (model.params, model.buffers))
  params, buffers = jax.jit(model.init, out_shardings=shardings)(seed)
  return params | buffers


def live_bytes():
  gc.collect()
  return sum(array.nbytes for array in jax.live_arrays())


def test_generate_is_what_the_engine_writes(llm):
  texts = ["the cat", "on", "a mat is where"]
  outputs = llm.generate(texts, GREEDY)
  requests = [llm._model.make_request(llm.tokenizer.encode(text).tolist(), GREEDY) for text in texts]
  for text, output, answer in zip(texts, outputs, finish(llm._model, requests), strict=True):
    assert llm.tokenizer.decode(list(output.prompt_token_ids)) == text
    assert list(output.token_ids) == answer.token_ids
    assert (output.text, output.finish_reason) == (answer.text, "length")
    assert output.versions == (0,) * 8
    assert output.logprobs == tuple(event.logprob for event in answer.outputs)
    assert all(
      max(top.values()) == p and len(top) == 2 for p, top in zip(output.logprobs, output.top_logprobs, strict=True)
    )
  (alone,) = llm.generate(list(outputs[1].prompt_token_ids), GREEDY)
  assert alone == outputs[1], "tokens for a text, and one for many"
  (silent,) = llm.generate("on")
  assert (silent.logprobs, silent.top_logprobs) == (None, None)
  shown = []
  llm.generate("on", GREEDY, shown.append)
  assert "".join(shown) == outputs[1].text
  assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_way(llm):
  drawn = [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)]
  outputs = llm.generate(["on"] * 3, drawn)
  assert len({output.token_ids for output in outputs}) == 3
  assert llm.generate("on", drawn[1]) == [outputs[1]]
  first = outputs[0].token_ids[0]
  (stopped,) = llm.generate("on", replace(drawn[0], stop_token_ids=[first]))
  assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ((first,), "", "stop")


def test_score_is_what_generate_reports(llm):
  (output,) = llm.generate("the cat sat", replace(GREEDY, min_tokens=30, max_tokens=30))
  prompt = output.prompt_token_ids
  scores = llm.score([*prompt, *output.token_ids])
  assert scores.shape == (len(prompt) + 29,)
  np.testing.assert_allclose(scores[len(prompt) - 1 :], output.logprobs, atol=1e-4, rtol=0)
  assert llm.score([3]).shape == (0,)
  for wrong in ([], [1] * 97, [1, 258]):
    with pytest.raises(ConfigError, match=r"can be scored|is not a token id"):
      llm.score(wrong)


def test_chat(llm):
  turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
  (answer,) = llm.chat(turns, GREEDY)
  assert llm.tokenizer.decode(list(answer.prompt_token_ids)) == "<a><b>"
  assert llm.generate("<a><b>", GREEDY) == [answer]
  assert llm.chat([turns, turns[:1]], GREEDY)[0] == answer


def test_an_interrupt_ends_an_answer_and_then_the_chat(llm, monkeypatch):
  """A real signal in the midst of an answer; what was shown of it is part of the conversation."""
  shown, conversations = [], []
  whole, own, letter = SamplingParams(temperature=0.0, max_tokens=40), llm.chat, int(llm.tokenizer.encode("x")[0])
  monkeypatch.setattr(llm, "chat", lambda messages, *rest: conversations.append([*messages]) or own(messages, *rest))

  def show(text):
    shown.append(text)
    if len(shown) == 3:
      os.kill(os.getpid(), signal.SIGINT)

  def lines():
    yield "a\n"
    assert 3 <= len(shown) < 8, "the answer ended soon after the signal"
    yield "b\n"
    raise KeyboardInterrupt  # at the prompt, as Python raises it

  with pytest.raises(KeyboardInterrupt):
    chat(llm, lines(), replace(whole, logit_bias={letter: 100.0}), show)
  cut = conversations[1][1]
  assert (cut["role"], cut["content"]) == ("assistant", "".join(shown[: shown.index("\n", 2)]))
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_chat_shows_reasoning_apart(llm, monkeypatch):
  tokenizer = replace(llm.tokenizer, chat_template=TEMPLATE + "{# <think> </think> #}")
  thinker = LLM.of(replace(llm._model, tokenizer=tokenizer))
  conversations, shown = [], []

  def answers(messages, params, on_text, *rest):
    conversations.append([*messages])
    for text in ("<thi", "nk>\nhm", "m\n</th", "ink>\n\nyes", "."):
      on_text(text)

  monkeypatch.setattr(thinker, "chat", answers)
  chat(thinker, ["a\n", "b\n"], GREEDY, shown.append, lambda text: f"[{text}]")
  assert "".join(shown) == "[hm][m]\n\nyes.\n" * 2
  assert conversations[1][1] == {"role": "assistant", "content": "yes.", "reasoning_content": "hmm"}


def test_log_probabilities_of_prompts_are_scores(tmp_path):
  """Of a prompt in several chunks, also where a prefix of it is cached."""
  llm = LLM.of(random_model(tmp_path, **CHUNKED))
  params = SamplingParams(max_tokens=0, prompt_logprobs=2)
  for prompt in (LONG, LONG, LONG[:1]):
    llm.generate(prompt, GREEDY)
    (output,) = llm.generate(prompt, params)
    assert (output.token_ids, output.finish_reason) == ((), "length")
    found = [one.logprob for one in output.prompt_logprobs]
    np.testing.assert_allclose(found, llm.score(prompt), atol=2e-5)
    assert all(len(one.top) == 2 and one.top[0][1] >= one.logprob for one in output.prompt_logprobs)
  assert llm.generate(LONG, GREEDY)[0].prompt_logprobs is None


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"temperature": -1}, r"temperature=-1: it must be 0 to 1e\+30"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300"),
    ({"top_k": 2**31}, "top_k=2147483648"),
    ({"top_p": 0}, "top_p=0"),
    ({"max_tokens": -1}, "max_tokens=-1"),
    ({"min_p": 2.0}, "min_p=2.0: it must be 0 to 1"),
    ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "301 tokens have a bias, and 300 may"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias: token 3 has nan"),
    ({"logprobs": 21}, "logprobs=21: it must be 0 to 20, or None"),
    ({"stop": ["a", ""]}, "stop: an empty string"),
  ],
)
def test_sampling_parameters_are_checked(wrong, message):
  with pytest.raises(ValueError, match=message):
    SamplingParams(**wrong)
  assert SamplingParams(stop="ab") == SamplingParams(stop=["ab"])


def test_nothing_is_answered_where_one_prompt_is_wrong(llm):
  with pytest.raises(ConfigError, match="17 tokens, more than max_prefill_predict_length=16"):
    llm.generate(["on", "x" * 17])
  with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
    llm.generate(["on", "on"], [GREEDY])

  def fail(_):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    llm.generate(["on"] * 4, GREEDY, fail)
  assert len(llm.generate("on", GREEDY)[0].token_ids) == 8, "what was interrupted is gone"


def programs(engine):
  return [engine._prefill, engine._prefill_chunk, engine._insert, engine._decode_step, engine._speculative_step]


def test_parameters_are_swapped_a_hundred_times_under_load(tmp_path):
  """Nothing is compiled, nothing is left behind, and every token says who wrote it."""
  llm = LLM.of(random_model(tmp_path, **CHUNKED))
  engine, trees = llm.engine, [parameters(llm, seed) for seed in (1, 2)]
  params = replace(GREEDY, min_tokens=12, max_tokens=12)
  prompts = [LONG[: 5 + 7 * (n % 5)] for n in range(5)]
  expected = []
  for tree in trees:  # what each writes alone; compiles everything
    engine.update_params(tree, 0)
    expected.append({tuple(prompt): llm.generate(prompt, params)[0].token_ids for prompt in prompts})
  assert expected[0] != expected[1]
  compiled, sizes = [], [program._cache_size() for program in programs(engine)]
  llm._scheduler._prefix_cache.clear()

  def listen(name, seconds, **_):
    if "compile" in name or "trace" in name:
      compiled.append(name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    before, scheduler, found, begun, version = live_bytes(), llm._scheduler, {}, {}, 0
    while version < 100 or scheduler.busy:
      if version < 100:
        version += 1
        engine.update_params(trees[version % 2], version)
        if version % 3 == 0:
          begun[request := Request(prompts[version % 5], params)] = version
          scheduler.submit(request)
      for step in range(2):
        for event in scheduler.step():
          found.setdefault(event.request, []).append(event)
          assert event.version in (version, version - 1 + step), "the first reads what was started before the swap"
    scheduler._prefix_cache.clear()
    assert live_bytes() == before
    assert compiled == []
    jax.jit(lambda x: x + version)(1.0)
    assert compiled, "it would have been heard"
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert [program._cache_size() for program in programs(engine)] == sizes
  assert len(found) == 33
  for request, events in found.items():
    versions = [event.version for event in events]
    assert len(events) == 12
    assert versions == sorted(versions)
    assert versions[0] >= begun[request]
    assert len(set(versions)) > 3 or versions[-1] == 100, "they were swapped while it was answered"
  for tree, number in ((0, 200), (1, 201)):
    llm.update_params(trees[tree], number)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [expected[tree][tuple(prompt)] for prompt in prompts]
    assert {version for output in outputs for version in output.versions} == {number}
  size, before = sum(array.nbytes for array in trees[0].values()), live_bytes()
  trees[0] = None
  assert live_bytes() == before - size, "the engine has nothing of the parameters that it had before"


def test_parameters_come_from_another_thread(tmp_path):
  """Versions never change inside of a step, and what is generated ends as it should."""
  llm = LLM.of(random_model(tmp_path))
  trees, over, last = [parameters(llm, seed) for seed in (1, 2)], threading.Event(), 0

  def swap():
    nonlocal last
    while not over.is_set():
      last += 1
      llm.update_params(trees[last % 2], last)
      time.sleep(0.001)

  thread = threading.Thread(target=swap)
  thread.start()
  try:
    outputs = llm.generate(["on", "the cat", "mat"], replace(GREEDY, min_tokens=60, max_tokens=60))
  finally:
    over.set()
    thread.join()
  assert llm.version == last, "the last one is in use, also where it came during the last step"
  for output in outputs:
    assert len(output.token_ids) == len(output.versions) == 60
    assert list(output.versions) == sorted(output.versions)
    assert len(set(output.versions)) > 3


def test_a_prompt_half_way_is_not_kept_for_others(tmp_path):
  """Its row is of two parameter trees, so neither the prefix cache nor the last prompt's row may have it."""
  llm = LLM.of(random_model(tmp_path, multi_sampling=True, **CHUNKED))
  first, second = (parameters(llm, seed) for seed in (1, 2))
  llm.update_params(second, 1)
  expected = llm.generate(LONG, GREEDY)[0].token_ids
  llm.update_params(first, 2)
  scheduler = llm._scheduler
  scheduler.submit(Request(LONG, GREEDY))
  scheduler.step()
  scheduler.step()
  llm.update_params(second, 3)
  assert [event.version for event in scheduler.run() if event.token is not None] == [3] * 8
  assert llm.generate(LONG, GREEDY)[0].token_ids == expected


def test_prefill_files_belong_to_their_parameters(tmp_path):
  llm = LLM.of(random_model(tmp_path, prefill_cache_dir=str(tmp_path / "kept")))
  first, second = (parameters(llm, seed) for seed in (1, 2))
  expected = []
  for version, tree in enumerate((first, second, first)):
    llm.update_params(tree, version)
    expected.append(llm.generate("the cat", GREEDY)[0].token_ids)
  assert expected[0] == expected[2] != expected[1]
  assert len(list((tmp_path / "kept").iterdir())) == 2
  reads = LLM.of(random_model(tmp_path, prefill_cache_dir=str(tmp_path / "kept"), load_from_prefill_dir=True))
  with pytest.raises(ConfigError, match="has no cache of this prompt by these parameters"):
    reads.generate("the cat", GREEDY)
  for version, tree in enumerate((second, first)):
    reads.update_params(tree, version)
    assert reads.generate("the cat", GREEDY)[0].token_ids == expected[1 - version]


def test_another_tree_is_refused_by_path(llm):
  params = parameters(llm, 0)
  path = sorted(params)[0]
  array = params[path]
  device = jax.devices()[1]
  for wrong, message in (
    ({p: a for p, a in params.items() if p != path}, f"{path} is missing"),
    (params | {"more": array}, "more is no parameter"),
    (params | {path: array[:-1]}, rf"{path} is float32\[.*\], and the model has float32\["),
    (params | {path: array.astype("bfloat16")}, rf"{path} is bfloat16\["),
    (params | {path: np.asarray(array)}, f"{path} is a ndarray; place it"),
    (params | {path: jax.device_put(array, device)}, f"{path} is placed as .*, and the model has it as"),
  ):
    with pytest.raises(ValueError, match=message):
      llm.update_params(wrong, 7)
  gone = params | {path: array + 0}
  gone[path].delete()
  with pytest.raises(ValueError, match=f"{path} was deleted or donated"):
    llm.update_params(gone, 7)
  assert llm.version == 0
  elsewhere = params | {path: jax.device_put(np.asarray(array), jax.devices()[0])}  # the same, in other words
  checked = validate_params(llm.engine._structs, elsewhere)
  assert elsewhere[path].sharding != checked[path].sharding == llm.engine._structs[path].sharding
  assert checked[path].unsafe_buffer_pointer() == elsewhere[path].unsafe_buffer_pointer(), "nothing was copied"
  llm.generate(["on"] * 3, GREEDY)
  llm.engine.update_params(elsewhere, 0)
  sizes = [program._cache_size() for program in programs(llm.engine)]
  assert len(llm.generate("on", GREEDY)[0].token_ids) == 8
  assert [program._cache_size() for program in programs(llm.engine)] == sizes


@pytest.mark.slow
def test_layers_that_are_not_looped_over(tmp_path):
  """Parameters come as training has them, stacked; the engine has each layer's."""
  looped, apart = (LLM.of(random_model(tmp_path, scan_layers=scan)) for scan in (True, False))
  model = apart.engine.model
  engine = make_engine(apart.config, model, model.unstack_layers(parameters(apart, 0)), num_speculative_tokens=2)
  apart = LLM.of(replace(apart._model, engine=engine))
  for llm in (looped, apart):
    llm.update_params(parameters(llm, 3), 1)
  assert apart.generate("the cat", GREEDY)[0].token_ids == looped.generate("the cat", GREEDY)[0].token_ids
  assert engine.version == 1


def test_the_folder_of_compiled_programs_is_the_users(llm, tmp_path, monkeypatch):
  """It is set where the process has none, and left alone otherwise."""
  monkeypatch.setattr(inference_model, "load_run_tokenizer", lambda config: llm.tokenizer)
  monkeypatch.setattr(inference_model, "load_params", lambda config, model: parameters(llm, 0))
  config = llm.config.model_copy(update={"jax_cache_dir": str(tmp_path / "ours")})
  before = jax.config.values["jax_compilation_cache_dir"]
  try:
    for theirs, expected in ((None, config.jax_cache_dir), (str(tmp_path / "theirs"),) * 2):
      jax.config.update("jax_compilation_cache_dir", theirs)
      InferenceModel.load(config)
      assert jax.config.values["jax_compilation_cache_dir"] == expected
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def test_importing_the_package_imports_no_jax():
  words = (
    "import sys, maxtext; assert 'jax' not in sys.modules; maxtext.__version__; maxtext.SamplingParams(); maxtext.x"
  )
  done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=200, check=False)
  assert done.stderr.splitlines()[-1] == "AttributeError: module 'maxtext' has no attribute 'x'"
