"""Scores of texts and tasks: sums of the model's log-probabilities, by hand; files, a run's folder and its report."""

import json
import math
import sys
from contextlib import contextmanager

import jax
import pytest

from maxtext import LLM, ConfigError, SamplingParams
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.configs.types import TokenizerType
from maxtext.data.held_out import NO_RULE
from maxtext.data.options import tokenizer_options
from maxtext.data.prepare import in_processes, prepare
from maxtext.data.raw_text import find_files
from maxtext.evaluation.scoring import Loglikelihood, Scorer
from maxtext.evaluation.tasks import TaskOptions, open_tasks
from maxtext.observe.evaluation_records import EVALUATIONS, EvaluationRecord, append_evaluations, read_evaluations
from maxtext.observe.report import write_report
from tests.inference_support import BYTES, random_model
from tests.short_run import words

CHOICES = [
  {"prompt": "Which hunts?", "choices": ["an owl", "it"], "answer": 0},
  {"prompt": "Which hunts?\n", "choices": ["owls", "ä lark"], "answer": 1, "id": "not read"},
  {"prompt": "", "choices": ["owls", "larks", " cats"], "answer": 2},
]
TEXTS = ["The owl hunts at night. " * 3, "ä", "Larks sing."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def llm(folder):
  """Bytes are its tokens; a context and a continuation have 32 together."""
  return LLM.of(random_model(folder, max_target_length=64, max_prefill_predict_length=32))


def write_lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def evaluate(scorer, *tasks, **options):
  return [record for task in open_tasks(tasks, TaskOptions(**options)) for record in task.evaluate(scorer)]


def score(llm, context, continuation):
  """The log-likelihood of bytes after a context of them, by the forward pass of training."""
  before = llm.tokenizer.encode(context).tolist() or [llm.tokenizer.bos]
  after = llm.tokenizer.encode(continuation).tolist()
  return float(llm.score([*before, *after])[-len(after) :].sum())


def test_multiple_choice_by_hand(llm, tmp_path):
  (record,) = evaluate(Scorer(llm), write_lines(tmp_path / "birds.jsonl", CHOICES))
  joined = [["Which hunts?", " an owl", " it"], ["Which hunts?", "\nowls", "\nä lark"], ["", "owls", "larks", " cats"]]
  found = [[score(llm, prompt, choice) for choice in choices] for prompt, *choices in joined]
  right = [row["answer"] for row in CHOICES]
  acc = [one.index(max(one)) == answer for one, answer in zip(found, right, strict=True)]
  by_character = [
    [value / len(choice) for value, choice in zip(one, row["choices"], strict=True)]
    for one, row in zip(found, CHOICES, strict=True)
  ]
  norm = [one.index(max(one)) == answer for one, answer in zip(by_character, right, strict=True)]
  assert record.metrics == {"acc": sum(acc) / 3, "acc_norm": sum(norm) / 3}
  mean = sum(acc) / 3
  assert record.stderr["acc"] == pytest.approx(math.sqrt(mean * (1 - mean) / 2))
  assert (record.task, record.samples) == ("birds", 3)


def test_a_score_is_of_the_continuation_alone_and_says_whether_it_is_greedy(llm):
  scorer = Scorer(llm)
  prompt = scorer.encode("Which hunts?")
  (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True))
  greedy, other = list(output.token_ids), [*output.token_ids[:3], (output.token_ids[3] + 1) % BYTES]
  own, changed = scorer.loglikelihoods([(prompt, greedy), (prompt, other)])
  assert (own.is_greedy, changed.is_greedy) == (True, False)
  assert own.value == pytest.approx(sum(output.logprobs), abs=1e-4)
  long = scorer.encode("Which of them hunts at night, when nobody sees it?")
  (cut,) = scorer.loglikelihoods([(long, greedy)])
  assert cut.value == pytest.approx(float(llm.score([*long, *greedy][-32:])[-4:].sum()), abs=1e-4)
  assert scorer.num_truncated == 1
  (spaces,) = scorer.loglikelihoods([scorer.encode_pair(" \n", "ab")])
  assert spaces.value == pytest.approx(score(llm, "", " \nab"), abs=1e-4), "white space alone is scored as a whole"
  with pytest.raises(ConfigError, match="continuation of 32 tokens"):
    list(scorer.loglikelihoods([(prompt, greedy * 8)]))


def test_exact_match(llm, tmp_path):
  scorer = Scorer(llm)
  (text,) = scorer.generate([scorer.encode("Say")], [SamplingParams(temperature=0, max_tokens=6)], "")
  rows = [
    {"prompt": "Say", "answer": f" {text.strip()}\n", "max_tokens": 6},
    {"prompt": "Say", "answer": ["no", text], "max_tokens": 6},
    {"prompt": "Say", "answer": text, "max_tokens": 5},
    {"prompt": "Say", "answer": text, "max_tokens": 6, "stop": [text[0]]},
  ]
  (record,) = evaluate(scorer, write_lines(tmp_path / "say.jsonl", rows))
  assert record.metrics == {"exact_match": 0.5}
  (record,) = evaluate(scorer, str(tmp_path / "say.jsonl"), limit=2)
  assert (record.metrics, record.stderr, record.samples) == ({"exact_match": 1.0}, {"exact_match": 0.0}, 2)


@pytest.mark.parametrize("length", [1, 31, 32, 62, 63, 100])
def test_windows_predict_each_token_once(llm, length):
  tokens = list(range(length))
  pairs = list(Scorer(llm).rolling(tokens))
  assert [token for _, continuation in pairs for token in continuation] == tokens
  assert pairs[0][0] == [llm.tokenizer.bos]
  document, begin = [llm.tokenizer.bos, *tokens], 1
  for context, continuation in pairs:
    assert context == document[begin - len(context) : begin]
    assert len(context) + len(continuation) <= 32
    begin += len(continuation)
  assert len(pairs) == math.ceil(length / 31)
  assert len(pairs) == 1 or len(pairs[-1][0]) + len(pairs[-1][1]) == 32


def test_perplexity_of_a_text_and_of_its_corpus(llm, folder, tmp_path):
  """By hand for what fits; and a prepared corpus has the numbers of its text."""
  source = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
  (record,) = evaluate(Scorer(llm), source)
  size = sum(len(text.encode()) for text in TEXTS)
  total = -record.metrics["bits_per_byte"] * size * math.log(2)
  assert record.metrics["perplexity"] == pytest.approx(math.exp(-total / size)), "a token is a byte"
  assert (record.metrics["tokens"], record.metrics["bytes"], record.samples) == (size, size, 3)
  short = write_lines(tmp_path / "short.jsonl", [{"t": text} for text in TEXTS[1:]])
  (by_hand,) = evaluate(Scorer(llm), short, column="t")
  expected = sum(score(llm, "", text) for text in TEXTS[1:])
  assert by_hand.metrics["perplexity"] == pytest.approx(math.exp(-expected / 13), rel=1e-4)
  keys = {"tokenizer_type": TokenizerType.HUGGINGFACE, "tokenizer_path": str(folder), "add_bos": True, "add_eos": True}
  options = tokenizer_options(llm.config.model_copy(update=keys))
  prepare(options, find_files([source]), str(tmp_path / "corpus"), in_processes(1), held_out=NO_RULE)
  (of_corpus,) = evaluate(Scorer(llm), str(tmp_path / "corpus"))
  assert (of_corpus.metrics, of_corpus.samples) == (record.metrics, 3)
  manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
  manifest["tokenizer"]["sha256"] = "another"
  (tmp_path / "corpus" / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(ConfigError, match="another tokenizer than the model's"):
    evaluate(Scorer(llm), str(tmp_path / "corpus"))


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "line 2: .*answer 2 is none of 2 choices"),
    ({"prompt": "a", "choices": ["b"], "answer": 0}, "line 2: choices"),
    ({"prompt": "a", "choices": ["b", ""], "answer": 0}, "line 2: choices.1"),
    ({"prompt": "a", "choices": ["b", "c"], "answer": "b"}, "line 2: answer"),
    ({"choices": ["b", "c"], "answer": 0}, "line 2: prompt"),
    ({"prompt": "a", "answer": "b"}, "line 2: choices"),
    ("no object", "line 2: "),
  ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
  path = write_lines(tmp_path / "wrong.jsonl", [CHOICES[0], row])
  with pytest.raises(ConfigError, match=message):
    open_tasks([path], TaskOptions())


@contextmanager
def damaged(llm):
  """Inside it no weight is a number."""
  model = llm.engine.model
  shardings = {path: struct.sharding for path, struct in (model.params | model.buffers).items()}
  params, buffers = jax.jit(model.init)(0)
  placed = {path: jax.device_put(array, shardings[path]) for path, array in (params | buffers).items()}
  llm.update_params(placed | {path: jax.device_put(placed[path] * math.nan, shardings[path]) for path in params}, 1)
  yield
  llm.update_params(placed, 2)


def test_weights_that_are_damaged(llm, tmp_path):
  """No score is made of NaN, which compares as neither more nor less than another."""
  text, choices = write_lines(tmp_path / "texts.jsonl", [{"text": "a owl"}]), write_lines(tmp_path / "c.jsonl", CHOICES)
  answers = write_lines(tmp_path / "answers.jsonl", [{"prompt": "Say", "answer": "a", "max_tokens": 2}])
  with damaged(llm):
    for path in (text, choices, answers):
      with pytest.raises(RunError, match="log-probabilities are NaN"):
        evaluate(Scorer(llm), path)


def test_a_perplexity_that_no_float_holds(llm, tmp_path, monkeypatch):
  monkeypatch.setattr(Scorer, "loglikelihoods", lambda self, pairs, what: (Loglikelihood(-1e4, False) for _ in pairs))
  (record,) = evaluate(Scorer(llm), write_lines(tmp_path / "a.jsonl", [{"text": "a"}]))
  assert record.metrics == {"perplexity": math.inf, "bits_per_byte": 1e4 / math.log(2), "tokens": 1, "bytes": 1}


def test_files_of_other_programs(tmp_path):
  """A byte order mark, a value that is the name of a field, and manifests that are none."""
  (tmp_path / "marked.jsonl").write_text(json.dumps(CHOICES[0]), encoding="utf-8-sig")
  write_lines(tmp_path / "named.jsonl", [{"prompt": "a", "answer": "b", "kind": "choices"}])
  marked, named = open_tasks([str(tmp_path / "marked.jsonl"), str(tmp_path / "named.jsonl")], TaskOptions())
  assert (len(marked.samples[0].choices), named.samples[0].answers) == (2, ["b"])
  for content in ("[]", "[" * 9999):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
      evaluate(None, str(tmp_path))


def test_words_that_are_no_task(tmp_path, capsys):
  (tmp_path / "empty.txt").touch()
  for word, message in (("no/such.jsonl", "no such file"), (str(tmp_path / "empty.txt"), "has no text")):
    with pytest.raises(ConfigError, match=message):
      open_tasks([word], TaskOptions())
  path = write_lines(tmp_path / "texts.jsonl", [{"text": "a"}])
  with pytest.raises(ConfigError, match="--num-fewshot is for tasks of lm-eval"):
    open_tasks([path], TaskOptions(num_fewshot=2))
  for flags, message in ((["--tasks", path, "--limit", "0"], "--limit 0"), (["--tasks", ","], "--tasks names none")):
    assert main(["eval", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_lm_eval_is_an_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "maxtext.evaluation.harness", raising=False)
  with pytest.raises(ConfigError, match=r"lm_eval: pip install 'maxtext\[eval\]'"):
    open_tasks(["hellaswag"], TaskOptions())


def test_a_run_keeps_what_is_found_and_shows_it(here, folder, llm, capsys):
  del llm  # which wrote the tokenizer
  assert main(["train", *words(run_name="owl", vocab_size=BYTES, enable_checkpointing=True)]) == 0
  write_lines(here / "birds.jsonl", CHOICES)
  (here / "night.txt").write_text("The owl hunts at night.")
  arguments = ["eval", "runs/owl", "tokenizer_type=huggingface", f"tokenizer_path={folder}", "add_bos=false"]
  capsys.readouterr()
  assert main([*arguments, "--tasks", "birds.jsonl,night.txt"]) == 0
  table = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert table[0] == ["task", "metric", "value", "stderr", "samples"]
  assert [row[:2] for row in table[1:4]] == [["birds", "acc"], ["birds", "acc_norm"], ["night", "perplexity"]]
  kept = read_evaluations(here / "runs" / "owl")
  assert [(record.task, record.step) for record in kept] == [("birds", 2), ("night", 2)]
  assert main([*arguments, "--tasks", "night.txt", "--json"]) == 0
  (again,) = json.loads(capsys.readouterr().out)
  assert again["metrics"] == kept[1].metrics
  (here / "damaged.txt").write_bytes(b"\xff")
  assert main([*arguments, "--tasks", "birds.jsonl,damaged.txt"]) == 2
  printed = capsys.readouterr()
  assert ("acc_norm" in printed.out, "damaged.txt is not UTF-8" in printed.err) == (True, True)
  assert [record.task for record in read_evaluations(here / "runs" / "owl")][3:] == ["birds"], "what was done is kept"
  page = write_report([here / "runs" / "owl"], here / "report.html").read_text()
  assert "<h2>Evaluations</h2>" in page
  assert page.count("bits_per_byte") == 1, "the last of two evaluations of a step"


def test_a_report_of_hostile_records(tmp_path):
  (tmp_path / "run.json").write_text("{}")
  lines = ["", "[1]", "{", '{"task": 1}', "[" * 9999, '{"task": "empty", "metrics": []}']
  numbers = '{"n": NaN, "i": -Infinity, "h": 1' + "0" * 999 + "}"
  lines.append('{"task": "odd", "step": "x", "samples": null, "metrics": ' + numbers + "}")
  (tmp_path / EVALUATIONS).write_text("\n".join(lines) + "\n")
  append_evaluations(tmp_path, [EvaluationRecord("<script>x</script>", {"<b>": 0.25}, {"<b>": 0.125}, 7, 12)])
  found = read_evaluations(tmp_path)
  assert [(record.task, dict(record.metrics)) for record in found[:2]] == [("empty", {}), ("odd", {})]
  page = write_report([tmp_path], tmp_path / "report.html").read_text()
  assert "&lt;script&gt;x&lt;/script&gt;" in page
  assert "<script>x" not in page
  assert "<b>" not in page
