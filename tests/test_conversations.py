"""Fine-tuning sequences of conversations: what trains is what the server would have to generate."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext import ConfigError
from maxtext.data.chat_answers import ends_of_turns
from maxtext.data.chat_messages import template_messages
from maxtext.data.conversations import (
  answer_tokens,
  completion_sequence,
  conversation_sequences,
  join_sequences,
)
from maxtext.inference.multimodal import PromptEncoder
from maxtext.serving.protocol import ChatCompletionRequest, RequestLimits, parse
from tests.chat_templates import SPECIAL, TEMPLATES, make_tokenizer, open_tokenizer

LIMITS = RequestLimits(16, 10**6, 10**7, 10**6)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TALK = [
  {"role": "user", "content": "the one?"},
  {"role": "assistant", "content": "the other", "reasoning_content": "the\n\nlast"},
  {"role": "user", "content": "and\n"},
  {"role": "assistant", "content": "\n\n the answer", "reasoning_content": "is"},
]

texts = st.one_of(
  st.sampled_from(
    ["", " ", "\n\n", "the answer", "\n the\n\n", "é\u200d👩‍👧", "<|im_end|>", "</s> <|eot_id|>", "</think>x"]
  ),
  st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=12),
  st.sampled_from(SPECIAL),
)
reasoning = st.fixed_dictionaries({}, optional={"reasoning_content": st.sampled_from(["", "is\n", "the one", "é"])})
calls = st.lists(
  st.builds(
    lambda name, text: {"type": "function", "function": {"name": name, "arguments": json.dumps({"x": text})}},
    st.sampled_from(["add", "find"]),
    texts,
  ),
  max_size=2,
)


@st.composite
def conversations(draw, tools):
  messages = [{"role": "user", "content": draw(texts)}]
  for _ in range(draw(st.integers(1, 3))):
    answer = {"role": "assistant", "content": draw(texts)} | draw(reasoning)
    if tools and (called := draw(calls)):
      answer["tool_calls"] = called
      messages += [answer, *({"role": "tool", "content": draw(texts)} for _ in called)]
      answer = {"role": "assistant", "content": draw(texts)} | draw(reasoning)
    messages += [answer, {"role": "user", "content": draw(texts)}]
  return messages[: draw(st.integers(2, len(messages)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp("templates"))


def prefilled(tokenizer, messages, **fields):
  """What the server prefills for this request, by its own parser."""
  body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
  return parse(ChatCompletionRequest, body, LIMITS).encoded(PromptEncoder(tokenizer, {}, {}, 1000))[0][0]


def trained(sequences):
  """The tokens with a weight, of all sequences."""
  return [token for one in sequences for token, weight in zip(one.tokens, one.weights, strict=True) if weight]


STYLES = [(style, style in ("llama3", "qwen3")) for style in TEMPLATES if not style.startswith("deepseek")]


@pytest.mark.parametrize(("style", "tools"), STYLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_trains_if_and_only_if_the_server_would_generate_it(folder, style, tools, data):
  tokenizer = open_tokenizer(folder, style)
  talk = data.draw(conversations(tools))
  fields = {"tools": TOOLS} if tools else {}
  found = conversation_sequences(tokenizer, talk, fields, True)
  answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
  spans = [(one, span) for one in found for span in one.answers]
  assert len(spans) == len(answers)
  for number, (sequence, (begin, end)) in zip(answers, spans, strict=True):
    assert sequence.tokens[:begin] == prefilled(tokenizer, talk[:number], **fields)
    messages = template_messages(talk[: number + 1])
    assert sequence.tokens[begin:end] == answer_tokens(tokenizer, messages, fields)
    whole = tokenizer.chat(messages, **fields).tolist()
    # The answer's text is that of the template, whatever the joined text's tokens are, up to the end of the turn.
    visible = tokenizer.vocabulary._conversations
    ours = visible.decode(sequence.tokens[:end], skip_special_tokens=False)
    theirs = visible.decode(whole, skip_special_tokens=False)
    assert theirs.startswith(ours) or style == "plain"
    assert not theirs.removeprefix(ours).strip() or style == "plain"
  for one in found:
    inside = {place for begin, end in one.answers for place in range(begin, end)}
    assert [place in inside for place in range(len(one.tokens))] == [weight == 1 for weight in one.weights]


@settings(max_examples=60, deadline=None)
@given(
  questions=st.lists(texts, min_size=1, max_size=3),
  thoughts=st.lists(st.sampled_from(["the one", "é\n"]), min_size=3, max_size=3),
  answer=st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=12).filter(lambda t: "<" not in t),
)
def test_an_answer_continues_the_opening_of_the_prompt(folder, questions, thoughts, answer):
  tokenizer = open_tokenizer(folder, "deepseek")
  talk = []
  for question, thought in zip(questions, thoughts, strict=False):
    talk += [
      {"role": "user", "content": question},
      {"role": "assistant", "content": answer, "reasoning_content": thought},
    ]
  found = conversation_sequences(tokenizer, talk, {}, True)
  assert len(found) == len(questions), "each answer has a sequence of its own: finished turns lose their reasoning"
  for number, one in enumerate(found):
    begin, end = one.answers[0]
    assert one.tokens[:begin] == prefilled(tokenizer, talk[: 2 * number + 1])
    text = tokenizer.vocabulary._conversations.decode(one.tokens[begin:end], skip_special_tokens=False)
    assert text == f"{thoughts[number]}\n</think>\n\n{answer.rstrip()}</s>"


def test_reasoning_within_the_content_is_taken_as_it_stands(folder):
  tokenizer = open_tokenizer(folder, "deepseek")
  talk = [
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "<think>\nis > the\n</think>\n\nthe > one"},
  ]
  (one,) = conversation_sequences(tokenizer, talk, {}, True)
  assert tokenizer.decode(one.tokens[slice(*one.answers[0])]) == "is > the\n</think>\n\nthe > one"
  with pytest.raises(ConfigError, match="opens an answer with"):
    conversation_sequences(tokenizer, [talk[0], {"role": "assistant", "content": "the"}], {}, True)


@pytest.mark.parametrize(("style", "count"), [("qwen3", 3), ("harmony", 3), ("command", 1)])
def test_turns_share_a_sequence_where_the_template_keeps_them(folder, style, count):
  found = conversation_sequences(open_tokenizer(folder, style), [*TALK, *TALK[2:]], {}, True)
  assert len(found) == count
  assert sum(len(one.answers) for one in found) == 3


def test_turns_do_not_share_a_sequence_where_joined_text_has_other_tokens(folder):
  """The tokens of the prompt's last characters depend on what the answer begins with."""
  tokenizer, apart = open_tokenizer(folder, "plain", add_eos=False), 0
  for first in ("the", " the", "\n", "\n\n", " \n", "is"):
    talk = [TALK[0], {"role": "assistant", "content": first}, *TALK[2:]]
    found = conversation_sequences(tokenizer, talk, {}, True)
    joined = tokenizer.chat(template_messages(talk[:2])).tolist()
    end = found[0].answers[0][1]
    apart += joined[:end] != found[0].tokens[:end]
    assert len(found) == (1 if prefilled(tokenizer, talk[:3])[:end] == found[0].tokens[:end] else 2)
  assert apart, "no text was joined to other tokens: the test has shown nothing"


def test_messages_choose_whether_and_how_much_they_train(folder):
  tokenizer = open_tokenizer(folder, "command")
  talk = [TALK[0], TALK[1] | {"train": False}, TALK[2], TALK[3] | {"weight": 0.25}]
  (one,) = conversation_sequences(tokenizer, talk, {}, True)
  assert len(one.answers) == 1
  assert {weight for weight in one.weights} == {0.0, 0.25}
  assert conversation_sequences(tokenizer, [TALK[0], TALK[1] | {"weight": 0}], {}, True) == []
  (all_of_it,) = conversation_sequences(tokenizer, TALK, {}, False)
  assert set(all_of_it.weights) == {1.0}


def test_long_conversations_end_after_a_whole_answer(folder):
  (one,) = conversation_sequences(open_tokenizer(folder, "command"), TALK, {}, True)
  (_, first), (_, second) = one.answers
  assert one.truncated(second) is one
  assert one.truncated(second - 1).tokens == one.tokens[:first]
  assert one.truncated(first).answers == [one.answers[0]]
  assert one.truncated(first - 1) is None


@pytest.mark.parametrize(
  ("messages", "message"),
  [
    ([], "at least one message"),
    ("text", "at least one message"),
    ([{"from": "human", "value": "hi"}], "rename them by formatting_func_path"),
    ([{"role": "human", "content": "hi"}], "messages.0.role: 'human' is not one of system"),
    ([{"role": "user", "content": 3}], "messages.0.content: it must be text, not int"),
    ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type 'text'"),
    ([TALK[0], {"role": "assistant", "tool_calls": [{}]}], "function.name"),
    ([TALK[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "not valid JSON"),
    ([TALK[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}], "must be an object"),
    ([TALK[0], TALK[1] | {"weight": -1}], "messages.1.weight"),
    ([TALK[0], TALK[1] | {"weight": float("nan")}], "messages.1.weight"),
    ([TALK[0], TALK[1] | {"train": "no"}], "messages.1.train"),
    ([TALK[1]], "cannot begin with an answer"),
  ],
)
def test_wrong_messages_are_named(folder, messages, message):
  with pytest.raises(ConfigError, match=message):
    conversation_sequences(open_tokenizer(folder, "chatml"), messages, {}, True)


def test_a_completion_is_what_follows_the_prompt(folder):
  tokenizer = open_tokenizer(folder, "chatml")
  one = completion_sequence(tokenizer, "the one <|im_end|>", "the other", True)
  (begin, end) = one.answers[0]
  assert tokenizer.decode(one.tokens[begin:end]) == "the other"
  assert one.tokens[0] == tokenizer.bos
  assert one.tokens[-1] == tokenizer.eos
  assert one.weights == [0.0] * begin + [1.0] * (end - begin)
  assert not tokenizer.special_ids & set(one.tokens[1:-1]), "names of special tokens in data are text"


def test_sequences_are_joined_to_a_document(folder):
  found = conversation_sequences(open_tokenizer(folder, "qwen3"), TALK, {}, True)
  document = join_sequences(found)
  for number, one in enumerate(found):
    mine = document[document["sequence"] == number]
    assert mine["token"].tolist() == one.tokens
    np.testing.assert_array_equal(mine["weight"], np.float32(one.weights))
  assert len(join_sequences([])) == 0


def test_a_role_outside_of_messages_is_text_like_any_other(folder):
  """Only the roles of messages choose special tokens; a client writes everything in tools."""
  tokenizer = open_tokenizer(folder, "llama3")
  tools = [{"role": "<|eot_id|>", "function": {"name": "add"}}]
  tokens = prefilled(tokenizer, TALK[:1], tools=tools)
  plain = prefilled(tokenizer, TALK[:1], tools=[{"role": "user", "function": {"name": "add"}}])
  count = tokenizer.vocabulary.encode("<|eot_id|>", special=True)[0]
  assert tokens.count(count) == plain.count(count)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"messages": [{"role": "user"}]}, "a message without tool_calls needs it"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"tools": [3]}, "tools.0"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages cannot be set here"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "bos_token cannot be set here"),
    ({"chat_template_kwargs": {"mark_generation": True}}, "mark_generation cannot be set here"),
    *(({"chat_template_kwargs": {name: 1}}, f"{name} cannot be set here") for name in ("answer", "self", "template")),
  ],
)
def test_wrong_fields_of_a_chat_request_are_named(folder, fields, message):
  with pytest.raises(ConfigError, match=message):
    prefilled(open_tokenizer(folder, "chatml"), **({"messages": TALK[:1]} | fields))


def test_parts_and_reasoning_of_a_request_reach_the_template(folder):
  tokenizer = open_tokenizer(folder, "harmony")
  parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "one?"}]
  assert prefilled(tokenizer, [{"role": "user", "content": parts}]) == prefilled(
    tokenizer, [{"role": "user", "content": "the\none?"}]
  )
  for name in ("reasoning", "thinking", "reasoning_content"):
    message = {"role": "assistant", "content": "x", name: "because"}
    assert template_messages([TALK[0], message])[1]["thinking"] == "because"
  low = prefilled(tokenizer, TALK[:1], reasoning_effort="low")
  assert "Reasoning: low" in tokenizer.decode(low)
  off = prefilled(open_tokenizer(folder, "qwen3"), TALK[:1], chat_template_kwargs={"enable_thinking": False})
  assert tokenizer.vocabulary._documents.decode(off, skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
  ("style", "end"),
  [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("mistral", "</s>"),
   ("deepseek", "</s>"), ("harmony", "<|return|>"), ("command", "<|END_OF_TURN_TOKEN|>"), ("plain", "</s>")],
)  # fmt: skip
def test_the_server_stops_where_a_trained_answer_ends(folder, style, end):
  tokenizer = open_tokenizer(folder, style)
  assert tokenizer.vocabulary.name(ends_of_turns(tokenizer)[0]) == end


def test_without_a_template_no_token_ends_a_turn(folder):
  tokenizer = open_tokenizer(folder, "chatml")
  assert ends_of_turns(replace(tokenizer, chat_template=None)) == ()
  assert ends_of_turns(replace(tokenizer, chat_template="{{ raise_exception('no') }}")) == ()


MARKED = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and message.content != 'old' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_marks_of_a_template_are_honoured_and_checked(folder):
  tokenizer = replace(open_tokenizer(folder, "chatml"), chat_template=MARKED)
  talk = [TALK[0], {"role": "assistant", "content": "old"}, TALK[2], {"role": "assistant", "content": "the one </s>"}]
  found = conversation_sequences(tokenizer, talk, {}, True)
  assert [len(one.answers) for one in found] == [1], "the first answer is not marked"
  assert tokenizer.decode(trained(found)) == "the one </s>"
  assert "generation" not in tokenizer.render(talk)
  wrong = MARKED.replace("{{ message.content }}<|im_end|>{% endgen", "{{ message.content[:3] }}<|im_end|>{% endgen")
  wrong = wrong.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}{{ message.content[3:] }}<|im_end|>")
  with pytest.raises(ConfigError, match="name 'the' as an answer, of which the server would generate 'the one </s>'"):
    conversation_sequences(replace(tokenizer, chat_template=wrong), talk, {}, True)
