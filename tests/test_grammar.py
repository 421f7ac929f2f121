"""Answers that keep a form: whatever a random model would write, what comes out is what was asked for."""

import asyncio
import json
import re
from dataclasses import replace

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st

from maxtext.inference.grammar import GrammarSpec
from maxtext.serving.limits import ServerLimits
from tests.inference_support import answering, ask, finish, random_model

SLOTS = 10
COLOURS = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
REGEX = r"[a-f]{2}-[0-9]{3}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """A model that writes bytes at random."""
  folder = tmp_path_factory.mktemp("bytes")
  return random_model(folder, max_target_length=400, per_device_batch_size=SLOTS)


def bounded(kind, low, high, most, above):
  """Schemas with both bounds, either or none."""
  bounds = st.tuples(*[st.integers(0, most)] * 2, st.booleans(), above)
  return bounds.map(
    lambda b: {"type": kind, **({low: min(b[:2])} if b[2] else {}), **({high: max(b[:2])} if b[3] else {})}
  )


def containers(inner):
  names = st.dictionaries(st.text('abé"\\ ', max_size=3), inner, max_size=4)
  return st.one_of(
    st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
      lambda d: {"type": "array", "items": d[0], "minItems": d[1], "maxItems": d[1] + d[2]}
    ),
    st.lists(inner, min_size=1, max_size=3).map(
      lambda d: {"type": "array", "prefixItems": d, "items": False, "minItems": len(d)}
    ),
    st.tuples(names, st.booleans()).map(
      lambda d: (
        {"type": "object", "properties": d[0], "additionalProperties": False}
        | ({"required": list(d[0])} if d[1] else {})
      )
    ),
    st.lists(inner, min_size=1, max_size=3).map(lambda d: {"anyOf": d}),
  )


# Strings and arrays are bounded: a random model ends an open string once in some hundred bytes.
plain = st.one_of(
  st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}]),
  st.sampled_from(["date", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
  st.sampled_from(["^[a-c]{1,3}$", "^x[0-9]?y$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
  st.lists(st.one_of(st.integers(-9, 9), st.none(), st.text(max_size=3)), min_size=1, max_size=3).map(
    lambda values: {"enum": values}
  ),
  bounded("string", "minLength", "maxLength", 5, st.just(True)),
  bounded("integer", "minimum", "maximum", 1200, st.booleans()),
  bounded("number", "minimum", "maximum", 50, st.booleans()),
)
nested = st.recursive(plain, containers, max_leaves=6)
schemas = nested | nested.map(
  lambda it: {"$defs": {"it": it}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}
)


def answers(loaded, asked):
  """Answers to (spec, seed), all at once."""
  requests = [
    loaded.make_request(
      [65], replace(loaded.sampling_params, seed=seed), loaded.grammar_compiler.compile(spec) if spec else None
    )
    for spec, seed in asked
  ]
  return finish(loaded, requests)


@pytest.mark.parametrize("many", [3, pytest.param(51, marks=pytest.mark.slow)])
def test_random_schemas(loaded, many):
  """Ten at a time, the first ten trivial. What finished is valid, and nearly all finish: numbers may be long."""
  ends = []
  slow = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]

  @hypothesis.settings(max_examples=many, deadline=None, derandomize=True, suppress_health_check=slow)
  @hypothesis.given(st.lists(schemas, min_size=SLOTS, max_size=SLOTS))
  def check(several):
    asked = [(GrammarSpec("schema", "json", json.dumps(schema)), seed) for seed, schema in enumerate(several)]
    for schema, answer in zip(several, answers(loaded, asked), strict=True):
      ends.append(answer.finish_reason)
      if answer.finish_reason == "stop":
        validator = jsonschema.Draft202012Validator
        jsonschema.validate(json.loads(answer.text), schema, validator, format_checker=validator.FORMAT_CHECKER)

  check()
  assert set(ends) <= {"stop", "length"}
  assert ends.count("stop") > 0.95 * len(ends)


def test_the_form_changes_nobody_else_and_repeats_by_seed(loaded):
  """Rows with a form beside rows without: each as alone, by the one program that there is."""
  asked = [(None, 1), (GrammarSpec("r", "regex", REGEX), 2), (None, 3), (GrammarSpec("r", "regex", REGEX), 4)]
  together = answers(loaded, asked)
  alone = [answers(loaded, [one])[0] for one in asked]
  assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
  assert together[1].text != together[3].text
  assert all(re.fullmatch(REGEX, together[place].text) for place in (1, 3))
  assert [event.logprob for event in together[1].outputs] == [event.logprob for event in alone[1].outputs]
  assert loaded.engine._decode_step._cache_size() == 1, "with a form and without"


@pytest.mark.slow
def test_guesses_change_neither_form_nor_others(loaded, tmp_path):
  """A step that must keep to a form writes one token in every row, and guesses go on after it."""
  asked = [(None, 1), (GrammarSpec("r", "regex", REGEX), 2), (None, 3)]
  guessing = random_model(tmp_path, num_speculative_tokens=2, max_target_length=400, per_device_batch_size=SLOTS)
  assert [a.token_ids for a in answers(guessing, asked)] == [a.token_ids for a in answers(loaded, asked)]


@pytest.fixture(scope="module")
def app(loaded):
  with answering(loaded, ServerLimits(max_queued_requests=18)) as (_, app):
    yield app


def schema(body, **more):
  return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": body, **more}}}


@pytest.mark.parametrize(
  ("asked", "form"),
  [
    (schema(COLOURS | {"additionalProperties": False}, strict=True), r'\{"c": "(red|blue)"\}'),
    ({"structured_outputs": {"regex": REGEX}}, REGEX),
    ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ({"response_format": {"type": "text"}}, r".*"),
  ],
)
def test_requests(app, asked, form):
  status, body = asyncio.run(
    ask(app, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 40, "n": 3} | asked)
  )
  texts = [choice["text"] for choice in json.loads(body)["choices"]]
  assert (status, len(texts)) == (200, 3)
  assert all(re.fullmatch(form, text, re.DOTALL) for text in texts)


@pytest.mark.parametrize(
  ("asked", "message"),
  [
    (schema({"type": "colour"}), "response_format.json_schema.schema: Invalid type: colour"),
    (schema({"type": "array", "uniqueItems": True}), 'schema: Unimplemented keys: ["uniqueItems"]'),
    (schema({"x-guidance": {"lenient": True}, "not": {}}), 'schema: Unimplemented keys: ["not"]'),
    (schema({"$ref": "http://127.0.0.1/x.json"}), "schema: Resource 'http://127.0.0.1/x.json' is not present"),
    (schema({"enum": ["\ud800"]}), "The request is not valid JSON: "),
    (schema({"type": "number", "minimum": float("nan")}), "response_format.json_schema.schema: "),
    (schema({"$ref": "#"}), "schema: no text matches it"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.regex: Field required"),
    ({"response_format": {"type": "yaml"}}, "response_format: Input tag 'yaml'"),
    (
      schema(COLOURS) | {"min_tokens": 3},
      "min_tokens: response_format.json_schema.schema decides where the output ends",
    ),
    (
      schema(COLOURS) | {"structured_outputs": {"regex": "a"}},
      "response_format and structured_outputs both set a grammar",
    ),
  ],
)
def test_what_is_refused(app, asked, message):
  status, body = asyncio.run(ask(app, "/v1/completions", {"model": "tiny", "prompt": "a"} | asked))
  assert status == 400
  assert message in json.loads(body)["error"]["message"]


def test_a_form_without_an_end_is_found_out(app):
  """What no finite text fits is known only on the way."""
  asked = {"model": "tiny", "prompt": "a"} | schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
  status, body = asyncio.run(ask(app, "/v1/completions", asked))
  assert status == 400
  assert "cannot be matched: no finite text fits" in json.loads(body)["error"]["message"]
  assert 'maxtext_requests_total{finish_reason="grammar_error"} 1.0' in asyncio.run(ask(app, "/metrics"))[1]
