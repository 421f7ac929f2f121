"""The calls that people make of a server, by OpenAI's own client: a real process, and a tiny model of transformers."""

import base64
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from tests.chat_templates import TEMPLATES, VOCAB_SIZE, make_tokenizer
from tests.flags import flags
from tests.test_serving import MAXTEXT, wait_until

KEY = {"authorization": "Bearer secret"}
KEYS = (
  "dtype=float32", "weight_dtype=float32", "matmul_precision=highest", "per_device_batch_size=4", "jax_cache_dir=",
  "--max-model-len=640", "use_chunked_prefill=true", "prefill_chunk_size=32",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
  "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "to": {"$ref": "#/$defs/To"}},
  "required": ["x", "to"], "additionalProperties": False, "$defs": {"To": {"enum": ["é", "b"]}}}}}  # fmt: skip
OTHER = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the one?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder of Hugging Face with random weights, a tokenizer and a chat template."""
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  folder = make_tokenizer(tmp_path_factory.mktemp("tiny") / "tiny")
  (folder / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, initializer_range=0.3, max_position_embeddings=256, tie_word_embeddings=False,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(folder)
  return folder


@pytest.fixture(scope="module")
def reference(folder):
  """The same model by transformers."""
  import transformers

  return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


@contextmanager
def serving(folder, *words):
  """A server's address, and the file that it logs to."""
  environment = os.environ | flags() | {"MAXTEXT_API_KEYS": "secret"}
  command = [MAXTEXT, "serve", str(folder), *KEYS, "--port=0", *words]
  log = folder / "log"
  with (
    log.open("w") as errors,
    subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
  ):
    try:
      found = re.match(r"serving tiny on (http://\S+)\n", process.stdout.readline())
      assert found, log.read_text()
      yield SimpleNamespace(address=found[1], log=log)
    finally:
      process.kill()


@pytest.fixture(scope="module")
def server(folder):
  with serving(folder, "--access-log") as server:
    yield server


@pytest.fixture(scope="module")
def client(server):
  return openai.OpenAI(base_url=f"{server.address}/v1", api_key="secret", max_retries=0, timeout=120)


def post(server, path, body, **headers):
  """The status, the JSON and the headers of an answer."""
  data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
  asked = urllib.request.Request(server.address + path, data, {"content-type": "application/json"} | KEY | headers)
  try:
    with urllib.request.urlopen(asked, timeout=120) as reply:
      return reply.status, reply.read(), reply.headers
  except urllib.error.HTTPError as error:
    return error.code, error.read(), error.headers


def refused(server, path, body):
  """The message of a 400 in OpenAI's form."""
  status, raw, _ = post(server, path, body)
  assert status == 400, raw
  error = json.loads(raw)["error"]
  assert error.keys() == {"message", "type", "param", "code"}
  return error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(client, stream):
  """The arguments match their schema, whatever the model is, and a template takes the call back."""
  named = {"type": "function", "function": {"name": "add"}}
  for choice in ("required", named):
    asked = CHAT | {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120}
    if stream:
      chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
      calls, reason = [call for one in chunks for call in one.delta.tool_calls or ()], chunks[-1].finish_reason
      assert [call.index for call in calls] == [0]
    else:
      message = client.chat.completions.create(**asked).choices[0]
      calls, reason = message.message.tool_calls, message.finish_reason
      assert message.message.content is None
      result = {"role": "tool", "tool_call_id": calls[0].id, "content": "7"}
      again = CHAT["messages"] + [message.message, result]
      assert client.chat.completions.create(model="tiny", messages=again, tools=[TOOL], max_tokens=2).choices
    assert reason == "tool_calls"
    for call in calls:
      arguments = json.loads(call.function.arguments)
      assert call.function.name == "stop" or (0 <= arguments["x"] <= 9 and arguments["to"] in ("é", "b"))
    assert choice == "required" or [call.function.name for call in calls] == ["add"]


def test_text_beside_tools(client):
  """A random model calls nothing: text, whatever it offers."""
  for choice in ("auto", "none"):
    message = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice=choice, max_tokens=8).choices[0].message
    assert message.tool_calls is None


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tool_choice": "required"}, "tool_choice: the request has no tool to call"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool 'x' to call"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format: tool"),
    ({"tools": [TOOL] * 129}, "tools: List should have at most 128"),
    ({"tools": [{"function": {"name": "add\n"}}]}, "tools.0.function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"}, "tools: "),
    ({"tools": [{"function": {"name": "f", "parameters": {"$ref": "#/$defs/x"}}}], "tool_choice": "required"}, "tools"),
    ({"logit_bias": {str(n): 1 for n in range(50000)}}, "50000 tokens have a bias, and 300 may"),
    ({"logit_bias": {"600": 1}}, "600 is not a token id"),
    ({"logit_bias": {"x": 1}}, "'x' is not a token id"),
    ({"logit_bias": {"1": "1"}}, "the bias of token 1 must be a number"),
    ({"logit_bias": {"1": 101}}, "the bias of token 1 must be a number"),
    ({"logit_bias": [1]}, "logit_bias: Value error, must be an object"),
    (b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": NaN}}', "bias of token 1"),
    (b'{"messages": [{"role": "user", "content": "a"}], "min_p": NaN}', "min_p"),
    ({"min_p": 1.1}, "min_p: "),
    ({"ignore_eos": "perhaps"}, "ignore_eos: "),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos: response_format decides"),
    ({"stream_options": {"include_usage": True}}, "stream_options: only with stream=true"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: "),
    ({"max_tokens": -1}, "max_tokens: "),
    (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    ({"tools": [{"function": {"name": "f", "parameters": {"a": json.loads("[" * 150 + "]" * 150)}}}],
      "tool_choice": "required"}, ""),
  ],
)  # fmt: skip
def test_wrong_fields_are_named(server, fields, message):
  assert message in refused(server, "/v1/chat/completions", CHAT | fields if isinstance(fields, dict) else fields)


PROMPTS = [[5, 9, 300, 41, 7, 7, 100], [11], list(range(20, 90))]


def reference_logprobs(reference, tokens):
  """Of each token but the first."""
  import torch

  with torch.no_grad():
    logprobs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), -1).numpy()
  return logprobs[:-1], [float(logprobs[n, token]) for n, token in enumerate(tokens[1:])]


def test_log_probabilities_of_prompts_are_those_of_transformers(client, reference):
  """What lm-eval asks: batches of token ids, echoed, with one token more or none; the last prompt has three chunks."""
  for most in (0, 1):
    answer = client.completions.create(
      model="tiny", prompt=PROMPTS, max_tokens=most, logprobs=1, echo=True, temperature=0
    )
    assert answer.usage.completion_tokens == most * len(PROMPTS)
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
      found = choice.logprobs
      assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
      assert len(found.tokens) == len(prompt) + most
      everything, own = reference_logprobs(reference, prompt)
      np.testing.assert_allclose(found.token_logprobs[1 : len(prompt)], own, atol=1e-4)
      best = [max(one.values()) for one in found.top_logprobs[1 : len(prompt)]]
      np.testing.assert_allclose(best, everything.max(-1), atol=1e-4)
      greedy = [logprob == top for logprob, top in zip(found.token_logprobs[1 : len(prompt)], best, strict=True)]
      assert greedy == [token == one.argmax() for token, one in zip(prompt[1:], everything, strict=True)]


def test_prompt_logprobs_as_vllm_has_them(client, server, reference):
  """By token id, with ranks; and a chat's."""
  prompt = PROMPTS[0]
  body = {"prompt": prompt, "prompt_logprobs": 3, "max_tokens": 1}
  listed = json.loads(post(server, "/v1/completions", body)[1])["choices"][0]["prompt_logprobs"]
  everything, _ = reference_logprobs(reference, prompt)
  assert listed[0] is None
  for token, own, one in zip(prompt[1:], everything, listed[1:], strict=True):
    assert {*map(int, one)} == {token, *np.argsort(-own)[:3].tolist()}
    for named, found in one.items():
      assert found["logprob"] == pytest.approx(own[int(named)], abs=1e-4)
      assert found["rank"] == 1 + (own > own[int(named)]).sum()
  chat = json.loads(post(server, "/v1/chat/completions", CHAT | {"prompt_logprobs": 0, "max_tokens": 1})[1])
  assert len(chat["choices"][0]["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_an_echo_is_streamed_first(client):
  asked = {"model": "tiny", "prompt": "the one", "max_tokens": 3, "temperature": 0, "echo": True, "seed": 1}
  whole = client.completions.create(**asked, logprobs=2).choices[0]
  assert whole.text.startswith("the one")
  chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, logprobs=2, stream=True)]
  assert "".join(chunk.text for chunk in chunks) == whole.text
  assert [token for chunk in chunks for token in chunk.logprobs.tokens] == whole.logprobs.tokens
  plain = list(client.completions.create(**asked, stream=True))
  assert "".join(chunk.choices[0].text for chunk in plain) == whole.text


def test_biases_min_p_and_ends(client, server):
  """A bias chooses a token, and forbids one; a min_p of one is greedy; and an end may be ignored."""
  asked = {"model": "tiny", "prompt": "the", "max_tokens": 4, "logprobs": 1}

  def tokens(**fields):
    body = asked | {"seed": 1, "temperature": 2.0} | fields
    return json.loads(post(server, "/v1/completions", body)[1])["choices"][0]["logprobs"]["tokens"]

  greedy = tokens(temperature=0)
  assert tokens(min_p=1.0) == tokens(min_p=1.0, seed=2) == greedy
  assert tokens(seed=1) != tokens(seed=2)

  def drawn(**fields):
    (choice,) = json.loads(post(server, "/v1/completions", asked | {"temperature": 0} | fields)[1])["choices"]
    return choice

  def ids(text):
    return json.loads(post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})[1])["tokens"]

  (letter,), (end,) = ids("x"), [json.loads(post(server, "/tokenizer_info", None)[1])["eos_token_id"]]
  assert drawn(logit_bias={str(letter): 100})["text"] == "xxxx"
  first = ids(drawn(max_tokens=1)["text"])
  if len(first) == 1:
    assert drawn(max_tokens=1, logit_bias={str(first[0]): -100})["text"] != drawn(max_tokens=1)["text"]
  ended = drawn(logit_bias={str(end): 100})
  assert (ended["text"], ended["finish_reason"]) == ("", "stop")
  ignored = drawn(logit_bias={str(end): 100}, ignore_eos=True)
  assert (len(ignored["logprobs"]["tokens"]), ignored["finish_reason"]) == (4, "length")
  alone = drawn()["text"]
  together = client.completions.create(
    model="tiny", prompt=["the"] * 3, max_tokens=4, temperature=0, logit_bias={str(letter): 100}, n=1
  )
  assert ({choice.text for choice in together.choices}, drawn()["text"]) == ({"xxxx"}, alone)


def test_streams_tell_their_usage(client):
  chunks = list(
    client.chat.completions.create(**CHAT, max_tokens=2, stream=True, stream_options={"include_usage": True})
  )
  assert chunks[-1].usage.completion_tokens == 2
  assert chunks[-1].choices == []
  assert not any(chunk.usage for chunk in chunks[:-1])


def test_a_request_need_not_name_its_model(server):
  status, body, _ = post(server, "/v1/completions", {"prompt": "the", "max_tokens": 1})
  assert (status, json.loads(body)["model"]) == (200, "tiny")
  for path in ("/tokenize", "/v1/embeddings"):
    assert post(server, path, {"prompt": "a", "input": "a", "model": "dog"})[0] in (400, 404)
  assert post(server, "/v1/embeddings", {"input": "a", "model": "dog"})[0] == 404


def test_requests_have_ids_and_a_line_each(server):
  """The id is the client's if it can stand in a line."""
  before = len(server.log.read_text().splitlines())
  _, _, headers = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}, **{"x-request-id": "mine-7"})
  assert headers.get_all("x-request-id") == ["mine-7"]
  for wrong in ("a b", "é", "x" * 200):
    status, _, headers = post(server, "/nowhere%0Ainjected?secret=1", None, **{"x-request-id": wrong})
    assert status == 404
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
  wait_until(lambda: len(server.log.read_text().splitlines()) >= before + 4)
  lines = server.log.read_text().splitlines()[before:]
  assert re.fullmatch(r"127\.0\.0\.1 POST /v1/completions 200 \d+ B \d+\.\d{3} s mine-7", lines[0])
  assert [line.split()[2:4] for line in lines[1:]] == [["/nowhere%0Ainjected", "404"]] * 3


def test_tokens_of_texts_and_chats(server, folder):
  """As the tokenizer has them, and back."""
  from transformers import AutoTokenizer

  theirs, text = AutoTokenizer.from_pretrained(folder), "the answer é👩‍👧 <|im_end|>"
  body = json.loads(
    post(server, "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})[1]
  )
  assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
  assert body["max_model_len"] == 640
  assert json.loads(post(server, "/detokenize", {"tokens": body["tokens"]})[1]) == {"prompt": text}
  chat = json.loads(post(server, "/tokenize", {"messages": CHAT["messages"], "tools": [TOOL]})[1])
  expected = theirs.apply_chat_template(CHAT["messages"], tools=[TOOL], add_generation_prompt=True)["input_ids"]
  assert chat["tokens"] == expected
  info = json.loads(post(server, "/tokenizer_info", None)[1])
  assert (info["eos_token"], info["bos_token"], info["chat_template"]) == ("</s>", "<s>", TEMPLATES["qwen3"])


@pytest.mark.parametrize(
  ("path", "body", "message"),
  [
    ("/tokenize", {}, "write prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "write prompt or messages"),
    ("/tokenize", {"prompt": "a", "what": 1}, "what: Extra inputs"),
    ("/tokenize", {"prompt": " " * 10**5}, "The prompt has"),
    ("/tokenize", {"messages": []}, "write prompt or messages"),
    ("/tokenize", {"messages": [{"role": "x"}]}, "messages.0"),
    ("/detokenize", {"tokens": [512]}, "512 is no token"),
    ("/detokenize", {"tokens": [-1]}, "-1 is no token"),
    ("/detokenize", {"tokens": [10**30]}, "is no token"),
    ("/detokenize", {"tokens": "a"}, "tokens: "),
    ("/v1/embeddings", {"input": []}, "The prompt is empty"),
    ("/v1/embeddings", {"input": [[1], [512]]}, "512 is not a token id"),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions: Extra inputs"),
    ("/v1/embeddings", {"input": ["a"] * 1000}, "1000 prompts"),
    ("/v1/embeddings", b"[[", "not valid JSON"),
  ],
)
def test_what_cannot_be_tokenized_or_embedded(server, path, body, message):
  assert message in refused(server, path, body)


def test_embeddings_are_pooled_hidden_states(client, reference):
  """The mean of the last hidden states, of length 1, whatever is asked for beside it."""
  import torch

  found = client.embeddings.create(model="tiny", input=PROMPTS)
  for prompt, one in zip(PROMPTS, found.data, strict=True):
    with torch.no_grad():
      pooled = reference.model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(one.embedding, pooled / pooled.norm(), atol=1e-4)
  assert found.usage.prompt_tokens == sum(map(len, PROMPTS))
  floats = client.embeddings.create(model="tiny", input="the", encoding_format="float").data[0].embedding
  (text,) = client.with_raw_response.embeddings.create(model="tiny", input="the").http_response.json()["data"]
  np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text["embedding"]), "<f4"), np.float32(floats))


def test_the_rest_of_what_a_client_asks(client):
  """Structured outputs, log-probabilities and errors."""
  schema = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
  }
  named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
  answer = client.chat.completions.create(**CHAT, response_format=named, max_tokens=40, logprobs=True, top_logprobs=2)
  assert json.loads(answer.choices[0].message.content)["a"] in ("x", "y")
  assert all(len(one.top_logprobs) == 2 for one in answer.choices[0].logprobs.content)
  with pytest.raises(openai.NotFoundError):
    client.chat.completions.create(**(CHAT | {"model": "dog"}))
  with pytest.raises(openai.AuthenticationError):
    client.with_options(api_key="x").models.list()
  with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
    client.chat.completions.create(**CHAT, frequency_penalty=7)


def test_the_page_needs_no_key(server):
  """It is whole, may ask its own server alone, and there is nothing else without a key."""
  with urllib.request.urlopen(server.address) as page:
    text = page.read().decode()
    assert page.headers["content-type"].startswith("text/html")
  assert "connect-src 'self'" in text
  assert '"needsKey":true' in text
  assert not re.search(r"(?:src|href)=[\"'](?!data:)|https?:", text)
  with pytest.raises(urllib.error.HTTPError, match="405"):
    urllib.request.urlopen(server.address, b"{}")
  for path in ("/x", "/v1/models", "//"):
    with pytest.raises(urllib.error.HTTPError, match="401"):
      urllib.request.urlopen(server.address + path)


def test_the_page_of_routes_lists_all_of_them(server):
  """Behind the API key; it has no script, and loads nothing."""
  status, page, headers = post(server, "/docs", None)
  described = json.loads(post(server, "/openapi.json", None)[1])
  assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
  for path in described["paths"]:
    assert f" {path}</code>" in page.decode()
  for field in described["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
    assert f'<th scope="row">{field}</th>' in page.decode()
  assert b"<script" not in page
  assert post(server, "/docs", None, authorization="Bearer other")[0] == 401


LM_EVAL_TASKS = {
  "choices": {
    "output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_choice": "choices",
    "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
  },
  "texts": {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
  },
  "answers": {
    "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{prompt}}",
    "generation_kwargs": {"until": ["one", "\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
  },
}  # fmt: skip
LM_EVAL_DOCUMENTS = [
  {"prompt": "the answer\n is", "choices": ["the one", "Q", "\n\nlast"], "answer": 0, "text": "the last\n one"},
  {"prompt": "Q: ä</s> the  ", "choices": ["a", "the  other"], "answer": 1, "text": "é"},
  {"prompt": "", "choices": ["the one", "and"], "answer": 0, "text": "and the last " * 120},
  {"prompt": "the X " * 250, "choices": ["the other", "J"], "answer": 1, "text": "the"},
]


def lm_eval_responses(folder, model, **arguments):
  """What a model of lm-eval answers to each request of each task."""
  from lm_eval import simple_evaluate
  from lm_eval.tasks import TaskManager

  data = folder / "documents.jsonl"
  data.write_text("".join(json.dumps(document) + "\n" for document in LM_EVAL_DOCUMENTS))
  files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "datasets")}
  tasks = [
    {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"} | task
    for name, task in LM_EVAL_TASKS.items()
  ]
  manager = TaskManager(include_defaults=False)
  found = simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **arguments)
  samples = {name: [sample["resps"] for sample in found["samples"][name]] for name in LM_EVAL_TASKS}
  return found["results"], samples


@pytest.mark.nightly
def test_lm_eval_scores_alike_in_process_by_the_server_and_by_transformers(server, folder, monkeypatch):
  """In process and by the server to the last digit, on one device each; the contexts that do not fit among them."""
  pytest.importorskip("lm_eval")
  import jax

  from maxtext.cli.decode import key_overrides, load_model, resolve_model_config
  from maxtext.cli.main import _parse
  from maxtext.evaluation.harness import HarnessLM
  from maxtext.evaluation.scoring import Scorer
  from maxtext.inference import inference_model
  from maxtext.inference.llm import LLM
  from maxtext.mesh.devices import make_mesh

  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setattr(inference_model, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
  arguments = _parse(["decode", str(folder), *KEYS])
  llm = LLM.of(load_model(arguments, resolve_model_config(key_overrides(arguments))))
  results, samples = lm_eval_responses(folder, HarnessLM(Scorer(llm)))
  of_server = {
    "model": "tiny", "base_url": f"{server.address}/v1/completions", "tokenizer": str(folder),
    "tokenizer_backend": "huggingface", "max_length": 640,
  }  # fmt: skip
  assert lm_eval_responses(folder, "local-completions", model_args=of_server, batch_size=3) == (results, samples)
  of_transformers = {"pretrained": str(folder), "dtype": "float32", "max_length": 638}
  theirs, expected = lm_eval_responses(folder, "hf", model_args=of_transformers, device="cpu", batch_size=1)
  for name, tolerance in (("choices", {"atol": 1e-4, "rtol": 0}), ("texts", {"rtol": 1e-6})):
    for own, other in zip(samples[name], expected[name], strict=True):
      np.testing.assert_allclose(np.array(own, float), np.array(other, float), **tolerance)
  assert samples["answers"] == expected["answers"]
  assert results["choices"] == theirs["choices"]
