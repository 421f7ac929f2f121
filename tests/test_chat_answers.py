"""Answers taken apart: what a chat template writes is read back, and what is malformed stays text."""

# ruff: noqa: RUF001 (marks of DeepSeek)

import json
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext.data.chat_answers import AnswerFormat, FunctionCall, required_calls, required_calls_schema, shown_tokens
from maxtext.data.chat_messages import template_messages
from maxtext.data.conversations import answer_tokens
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Request, TokenOutput
from maxtext.serving.protocol import ChatCompletionRequest
from maxtext.serving.responses import ResponseBuilder
from tests.chat_templates import make_tokenizer, open_tokenizer

STYLES = ("llama3", "mistral", "mistral_named", "qwen3", "deepseek", "deepseek_bare", "harmony")
TRICKY = ("</tool_call>", '"}]', "<|end|>", "<|im_end|>", "\\u007f1\x7f", "{", "👩‍👧é\u200d", "[TOOL_CALLS]", "\n```")

values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.sampled_from(TRICKY)
  | st.text(st.characters(codec="utf-8"), max_size=8),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
  max_leaves=6,
)
calls = st.tuples(st.from_regex(r"[\w.:-]{1,12}", fullmatch=True), st.dictionaries(st.sampled_from(["x", "é"]), values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def styles(folder):
  """{style: tokenizer and the format of its answers}"""
  opened = {style: open_tokenizer(folder, style) for style in STYLES}
  return {style: (tokenizer, AnswerFormat.of(tokenizer)) for style, tokenizer in opened.items()}


def read(parser, pieces):
  """The content, the reasoning and the calls of an answer that arrives in pieces."""
  parts = [*map(parser.add, pieces), parser.finish()]
  found = [call for part in parts for call in part.calls]
  return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), found


def parse(styles, style, text, names=("add",), size=3, prompt=""):
  parser = styles[style][1].parser(prompt, set(names))
  return read(parser, [text[n : n + size] for n in range(0, len(text), size)])


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=25)
@given(found=st.lists(calls, min_size=1, max_size=2), size=st.integers(1, 9), thought=st.sampled_from(["", "a\nb"]))
def test_calls_that_a_template_writes_are_read_back(styles, style, found, size, thought):
  """From tokens, as they are generated, in pieces of any size."""
  tokenizer, answer_format = styles[style]
  found = found[:1] if style == "harmony" else found
  thought = thought or "is" if style.startswith("deepseek") else thought  # which is opened by its template
  message = {
    "role": "assistant",
    "reasoning_content": thought,
    "tool_calls": [{"id": "a1b2c3d4e", "function": {"name": name, "arguments": given}} for name, given in found],
  }
  messages = template_messages([{"role": "user", "content": "the one?"}, message])
  tokens = answer_tokens(tokenizer, messages, {})
  shown = shown_tokens(tokenizer, answer_format.marks)
  text = tokenizer.decode(tokens, shown)
  prompt = tokenizer.decode(tokenizer.chat(messages[:1], answer=True), shown)
  parser = answer_format.parser(prompt, {name for name, _ in found})
  content, reasoning, read_back = read(parser, [text[n : n + size] for n in range(0, len(text), size)])
  assert [(call.name, json.loads(call.arguments)) for call in read_back] == found, text
  assert content == ""
  if style in ("qwen3", "harmony", "deepseek"):
    assert reasoning == thought


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=25)
@given(
  pieces=st.lists(
    st.sampled_from(
      ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<think>",
       "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<|python_tag|>", "<|channel|>final", "<|message|>", "<|call|>",
       "<|start|>assistant to=functions.add", '{"name": "add", "arguments": ', "{", "}", "[" * 3000, '"', "\n", "x",
       '{"name": "add", "arguments": {"x": NaN}}', '{"name": "add", "arguments": {"x": 1e999}}', "9" * 5000,
       '{"name": "add", "arguments": {"x": "\\ud800"}}', '{"name": "add", "arguments": "{}"}'])
    | st.text(max_size=4),
    max_size=8,
  )
)  # fmt: skip
def test_no_answer_makes_a_parser_fail(styles, style, pieces):
  """And what it takes for a call is one that JSON and UTF-8 can carry."""
  for prompt in ("", "<think>"):
    content, reasoning, found = read(styles[style][1].parser(prompt, {"add"}), pieces)
    assert len(content) + len(reasoning) <= len("".join(pieces))
    for call in found:
      assert call.name == "add"
      assert isinstance(json.loads(call.arguments, parse_constant=lambda name: pytest.fail(name)), dict)
      call.arguments.encode()


@pytest.mark.parametrize(
  ("style", "text", "expected"),
  [
    # malformed, cut off, and of a tool that nobody offered
    ("qwen3", '<tool_call>{"name": "add"}</tool_call>!', ('<tool_call>{"name": "add"}</tool_call>!', "", [])),
    ("qwen3", 'so <tool_call>{"name": "ad', ('so<tool_call>{"name": "ad', "", [])),
    ("qwen3", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "", [])),
    ("llama3", '{"name": "Ada", "parameters": {}}', ('{"name": "Ada", "parameters": {}}', "", [])),
    ("llama3", '{"x": 1} and so on', ('{"x": 1} and so on', "", [])),
    ("mistral", "[TOOL_CALLS]nothing", ("[TOOL_CALLS]nothing", "", [])),
    ("deepseek", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>",
     ("<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>", "", [])),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>{", ("{", "", [])),
    ("harmony", "no message", ("no message", "", [])),
    # text beside calls, and forms that templates do not write themselves
    ("qwen3", 'I ask. \n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n',
     ("I ask.", "", [FunctionCall("add", "{}")])),
    ("qwen3", "<think>\nwell\n</think>\n\nyes", ("yes", "well", [])),
    ("qwen3", "<think>\nwell", ("", "well", [])),
    ("qwen3", "a <think> b", ("a <think> b", "", [])),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"x": 1}}; {"name": "add", "parameters": {}}',
     ("", "", [FunctionCall("add", '{"x": 1}'), FunctionCall("add", "{}")])),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "123456789"}]',
     ("", "", [FunctionCall("add", "{}")])),
    ("mistral_named", '[TOOL_CALLS]add[CALL_ID]12345[ARGS]{"x": {}}', ("", "", [FunctionCall("add", '{"x": {}}')])),
    ("harmony", "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>yes",
     ("yes", "well", [])),
    ("harmony", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
     ("", "", [FunctionCall("add", "{}")])),
  ],
)  # fmt: skip
def test_answers(styles, style, text, expected):
  for size in (1, 4, 1000):
    assert parse(styles, style, text, size=size) == expected


_BEGIN, _CALL, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
  ("style", "pieces"),
  [
    ("deepseek", [f"{_BEGIN}{_CALL}add\n```json", "\n" * 600, f"x<｜tool▁call▁end｜>{_END}"]),
    ("deepseek", [_BEGIN, _CALL, "<｜tool▁sep｜>" * 8000, _END]),
    ("mistral", ["[TOOL_CALLS]add{}", " " * 12000, "!"]),
    ("qwen3", ['<tool_call>{"name": "', *["</tool_call>"] * 20000]),
    ("harmony", ['<|channel|>commentary to=functions.add<|message|>{"x": "', *["<|end|>"] * 20000]),
  ],
)
def test_a_long_answer_takes_little_time(styles, style, pieces):
  """Of what repeats, where an expression could match in many ways, or a call would be read again at each mark."""
  begin = time.process_time()
  content, _, found = read(styles[style][1].parser("", {"add"}), pieces)
  assert (found, time.process_time() - begin < 2.0) == ([], True)
  assert content


def test_reasoning_that_the_prompt_has_opened(styles):
  assert parse(styles, "deepseek", "well\n</think>\n\nyes", prompt="<think>\n") == ("yes", "well", [])
  assert parse(styles, "deepseek", "well</think", prompt="<think>\n") == ("", "well</think", [])
  assert parse(styles, "qwen3", "yes", prompt="<think>\n\n</think>\n\n") == ("yes", "", [])


def test_required_calls_are_what_their_schema_allows():
  """References in parameters lead to their place in the schema of all calls."""
  parameters = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}},
    "$defs": {"Place": {"type": "integer"}},
  }
  tools = [{"function": {"name": "go", "parameters": parameters}}, {"function": {"name": "stop"}}]
  schema = json.loads(required_calls_schema(tools, 2))
  found = [{"name": "go", "arguments": {"at": 1}}, {"name": "stop", "arguments": {}}]
  jsonschema.validate(found, schema)
  for wrong in ([], found * 2, [{"name": "go", "arguments": {"at": "x"}}], [{"name": "no", "arguments": {}}]):
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate(wrong, schema)
  assert read(required_calls("", {"go", "stop"}), [json.dumps(found)]) == (
    "", "", [FunctionCall("go", '{"at": 1}'), FunctionCall("stop", "{}")],
  )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_reasoning_text_and_calls(styles, stream):
  """From the tokens of a generated answer, as the server builds it."""
  tokenizer, _ = styles["qwen3"]
  answer = (
    '<think>\nwell\n</think>\n\nI add. \n<tool_call>\n{"name": "add", "arguments": {"x": "é"}}\n</tool_call><|im_end|>'
  )
  tokens = tokenizer.encode_continuation(answer, special=True)
  asked = {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "add"}}]}
  chat = ChatCompletionRequest.model_validate(asked)
  request = Request([1], SamplingParams(stop_token_ids=tokens[-1:]))
  builder = ResponseBuilder(chat, "m", tokenizer, [request.prompt])
  output, chunks = IncrementalDetokenizer(request, tokenizer, builder.shown), []
  for token in tokens:
    event = TokenOutput(request, token, finish_reason="stop" if token == tokens[-1] else None)
    text = output.add(event)
    if stream and (chunk := builder.chunk(0, output, text, event)):
      chunks.append(chunk["choices"][0])
  if stream:
    deltas = [chunk["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    message = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content")}
    reason, index = chunks[-1]["finish_reason"], calls[0].pop("index")
    assert (index, len(chunks) > 4) == (0, True)
  else:
    (choice,) = builder.response([output], [([1], None)])["choices"]
    message, reason, calls = choice["message"], choice["finish_reason"], choice["message"]["tool_calls"]
  assert (message["content"], message["reasoning_content"], reason) == ("I add.", "well", "tool_calls")
  assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"x": "é"}'}]
  assert len(calls[0]["id"]) == 9
