"""`maxtext data show`: rows as the model sees them, harmless on a terminal and in a page."""

import json
import re
import sys

import jax
import numpy as np
import pytest

from maxtext import ConfigError, load_config
from maxtext.bench.dataloader import abstract_batch
from maxtext.cli.main import main
from maxtext.data.conversations import conversation_sequences
from maxtext.data.dataloader import make_dataloader
from maxtext.data.inspect import RowCounts, RowView, TokenRun, read_rows
from maxtext.data.inspect_format import as_html, as_text
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from tests import vocabularies
from tests.chat_templates import TEMPLATES, VOCAB_SIZE, make_tokenizer, open_tokenizer
from tests.corpora import write_corpus

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\x1b]0;x\x07\u202e\x9b31m\u2028&lt;\U000e0041"
SGR = re.compile(r"\x1b\[[0-9;]+m")


def talk(number):
  system = [{"role": "system", "content": f"is {HOSTILE}"}] if number % 2 else []
  return [
    *system,
    {"role": "user", "content": f"the one {number}?"},
    {"role": "assistant", "content": "the other"},
    {"role": "user", "content": "and <|im_end|> 【the⟧"},
    {"role": "assistant", "content": "the\n\nlast é👩‍👧", "weight": 0.25 if number % 3 else 1},
  ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = make_tokenizer(tmp_path_factory.mktemp("show"))
  for name in ("chatml", "qwen3"):
    (path / f"{name}.jinja").write_text(TEMPLATES[name])
  (path / "chat.jsonl").write_text("".join(json.dumps({"messages": talk(n)}) + "\n" for n in range(12)))
  (path / "text.jsonl").write_text(
    "".join(json.dumps({"text": f"the one and the other {n}"}) + "\n" for n in range(64))
  )
  return path


def keys(folder, **changes):
  return {
    "vocab_size": VOCAB_SIZE, "max_target_length": 256, "per_device_batch_size": 1, "dataset_type": "grain",
    "tokenizer_type": "huggingface", "tokenizer_path": str(folder), "grain_train_files": str(folder / "text.jsonl"),
    "grain_file_type": "jsonl", "enable_checkpointing": False, "enable_data_shuffling": False,
  } | changes  # fmt: skip


def sft_keys(folder, template="chatml", **changes):
  chat = {"grain_train_files": str(folder / "chat.jsonl"), "chat_template_path": str(folder / f"{template}.jinja")}
  return keys(folder, use_sft=True, generate_padding_batch_train=True, **chat) | changes


def view(given, count=100, tokenizer=None):
  """The rows of a run of two rows, and the batches that they were made of."""
  config = load_config(**given)
  options, batch = data_options(config), abstract_batch((2, config.max_target_length))
  if tokenizer is None and config.tokenizer_path:
    tokenizer = load_tokenizer(tokenizer_options(config))
  rows, batches = read_rows(options, batch, tokenizer, count), []
  for fed in make_dataloader(options, batch):
    batches.append(fed.batch)
    if 2 * len(batches) >= count:
      break
  return rows, [jax.tree.map(lambda *a: np.concatenate(a), *batches)][0]


def check_counts(rows, batch, segmented=True):
  """Every count is that of the batches of the dataloader."""
  counts = RowCounts.of(rows)
  assert counts.rows == len(batch.inputs)
  assert counts.trained == (np.asarray(batch.weights) > 0).sum()
  if segmented:
    assert counts.sequences == np.asarray(batch.segments).max(axis=1).sum()
    assert counts.padding == (np.asarray(batch.segments) == 0).sum()
  assert counts.tokens == batch.inputs.size - counts.padding + counts.sequences
  return counts


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("template", ["chatml", "qwen3"])
def test_rows_of_conversations_are_those_of_the_dataloader(folder, template, packing):
  rows, batch = view(sft_keys(folder, template, packing=packing))
  counts = check_counts(rows, batch)
  assert sum(tokens for tokens, _ in counts.roles.values()) == counts.tokens
  assert counts.roles["assistant"][1] == counts.trained
  shown = sorted("".join(run.text for run in sequence) for row in rows for sequence in row.sequences)
  tokenizer = open_tokenizer(folder, template)
  decode = tokenizer.vocabulary._conversations.decode
  expected = [one.tokens for n in range(12) for one in conversation_sequences(tokenizer, talk(n), {}, True)]
  assert shown == sorted(decode(tokens, skip_special_tokens=False) for tokens in expected)
  runs = [run for row in rows for sequence in row.sequences for run in sequence]
  assert {run.weight for run in runs} == {0.0, 0.25, 1.0}
  assert all(run.tokens == 1 for run in runs if run.special)
  literal = [run for run in runs if "<|im_end|> 【the⟧" in run.text]
  assert literal
  assert not any(run.special for run in literal)


def turns(sequence):
  """[role, text] of each turn, with the names of special tokens in it."""
  found = [["", ""]]
  for run in sequence:
    if run.role != found[-1][0]:
      found.append([run.role, ""])
    found[-1][1] += run.text
  return found[1:]


def test_a_role_is_that_of_the_message_which_adds_the_token(folder):
  rows, _ = view(sft_keys(folder))
  found = [turns(sequence) for row in rows for sequence in row.sequences]
  assert [
    ["user", "<|im_start|>user\nthe one 2?<|im_end|>\n"],
    ["assistant", "<|im_start|>assistant\nthe other<|im_end|>\n"],
    ["user", "<|im_start|>user\nand <|im_end|> 【the⟧<|im_end|>\n"],
    ["assistant", "<|im_start|>assistant\nthe\n\nlast é👩‍👧<|im_end|>"],
  ] in found
  assert sum(roles[0][0] == "system" for roles in found) == 6


@pytest.mark.parametrize("style", TEMPLATES)
def test_every_token_has_a_role(folder, style):
  tokenizer, messages = open_tokenizer(folder, style), talk(0)
  for message in messages[1::2]:
    message["reasoning_content"] = "is"
  for one in conversation_sequences(tokenizer, messages, {}, True, with_roles=True):
    assert len(one.roles) == len(one.tokens)
    assert one.roles[0] == "user"
    for begin, end in one.answers:
      assert set(one.roles[begin:end]) == {"assistant"}
    assert one.truncated(one.answers[0][1]).roles == one.roles[: one.answers[0][1]]
    assert set(one.roles) <= {"user", "assistant", "assistant+user"}
  assert not conversation_sequences(tokenizer, messages, {}, True)[0].roles, "nobody asked for them"


def test_turns_that_cannot_be_told_apart_have_all_their_roles(folder):
  """The template drops the reasoning that an earlier answer had, so its turn alone has other tokens."""
  messages = talk(0)
  messages[1]["reasoning_content"] = "is"
  *_, last = conversation_sequences(open_tokenizer(folder, "qwen3"), messages, {}, True, with_roles=True)
  assert list(dict.fromkeys(last.roles)) == ["user", "assistant+user", "assistant"]


def test_prompts_and_completions_are_roles(folder, tmp_path):
  file = tmp_path / "pairs.jsonl"
  file.write_text('{"prompt": "the one", "completion": " the other"}\n' * 4)
  columns = {"train_data_columns": ["prompt", "completion"], "use_chat_template": False}
  rows, _ = view(sft_keys(folder, grain_train_files=str(file), **columns), 1)
  found = turns(rows[0].sequences[0])
  assert found == [["prompt", "<s>the one"], ["completion", " the other</s>"]]


def test_rows_of_plain_text(folder):
  rows, batch = view(keys(folder), 2)
  assert not check_counts(rows, batch).roles
  first, *rest = rows[0].sequences[0]
  assert (first.text, first.weight, first.special) == ("<s>", 0.0, True)
  assert all(run.weight == 1 for run in rest)
  assert "".join(run.text for run in rest) == "the one and the other 0</s>"


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_spaces_survive_in_other_vocabularies(folder, tmp_path, kind):
  path = vocabularies.sentence_piece(tmp_path) if kind == "sentencepiece" else vocabularies.tiktoken(tmp_path)
  rows, _ = view(keys(folder, tokenizer_type=kind, tokenizer_path=str(path), vocab_size=600), 1)
  text = "".join(run.text for run in rows[0].sequences[0] if not run.special)
  assert text.removeprefix(" ") == "the one and the other 0"


def test_tokens_without_a_tokenizer_are_numbers(tmp_path):
  corpus = write_corpus(tmp_path / "corpus", [40, 40], long={3: 2000})
  given = {"dataset_type": "grain", "grain_train_files": str(corpus), "vocab_size": 1000, "max_target_length": 64}
  rows, batch = view(given, 8)
  check_counts(rows, batch)
  first = rows[0].sequences[0]
  tokens = [int(token) for token in "".join(run.text for run in first).split()]
  count = int((np.asarray(batch.segments)[0] == 1).sum())
  assert tokens == [*np.asarray(batch.inputs)[0, :1].tolist(), *np.asarray(batch.targets)[0, :count].tolist()]
  rows, batch = view({"dataset_type": "synthetic", "vocab_size": 64, "max_target_length": 16}, 2)
  assert check_counts(rows, batch, segmented=False).sequences == 2


def command(given, *more):
  return main(["data", "show", *(f"{key}={json.dumps(value)}" for key, value in given.items()), *more])


def test_the_command_shows_text_in_brackets_where_there_is_no_terminal(folder, capsys):
  assert command(sft_keys(folder), "--rows", "2") == 0
  out = capsys.readouterr().out
  assert "│ 【the other⟦<|im_end|>⟧】\n" in out
  assert "【×0.25 the\n" in out  # noqa: RUF001
  assert r"and <|im_end|> \u3010the\u27e7⟦<|im_end|>⟧" in out, "brackets of the data are no marks"
  assert r"</script>\x1b[2J\x1b]0;x\x07\u202e\x9b31m\u2028&lt;\U000e0041" in out
  assert not [c for c in out if c != "\n" and not c.isprintable() and c != "\u200d"]
  assert re.search(r"^2 rows, \d+ sequences, [\d,]+ tokens, of which .* train, padding in ", out, re.MULTILINE)
  assert re.search(r"^  assistant +\d+ tokens, \d+ \(\d+.\d%\) train$", out, re.MULTILINE)


def test_the_command_shows_colours_on_a_terminal_unless_told_not_to(folder, capsys, monkeypatch):
  monkeypatch.delenv("NO_COLOR", raising=False)
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
  assert command(sft_keys(folder), "--rows", "2") == 0
  out = capsys.readouterr().out
  assert "\x1b[32mthe other\x1b[0m\x1b[32;7m<|im_end|>\x1b[0m" in out
  assert "\x1b[36;2mthe one 0?\x1b[0m" in out
  plain = SGR.sub("", out)
  assert "\x1b" not in plain, "no escape sequence comes from data"
  assert not [c for c in plain if c != "\n" and not c.isprintable() and c != "\u200d"]
  assert all(line.count("\x1b[0m") * 2 == line.count("\x1b[") for line in out.splitlines()), "a colour ends its line"
  monkeypatch.setenv("NO_COLOR", "1")
  assert command(sft_keys(folder), "--rows", "1") == 0
  assert "\x1b" not in capsys.readouterr().out


def test_the_page_holds_text_and_no_markup_of_the_data(folder, tmp_path, capsys):
  file = tmp_path / "rows.html"
  assert command(sft_keys(folder), "--rows", "3", "--html", str(file)) == 0
  out, text = capsys.readouterr().out, file.read_text()
  assert f"wrote {file}" in out
  assert "【" not in out, "rows are in the page"
  assert "<script" not in text
  assert "</script" not in text
  assert "&lt;script&gt;alert(1)" in text
  assert not [c for c in text if c != "\n" and not c.isprintable() and c != "\u200d"]
  assert "default-src 'none'" in text


def test_names_of_special_tokens_are_harmless_too():
  rows = [RowView(((TokenRun("\x1b[2J\n</b>", 1, 1.0, special=True),),), 0)]
  assert list(as_text(rows, colours=False))[-1] == "│ 【⟦\\x1b[2J\\n</b>⟧】"
  assert "&lt;/b&gt;" in as_html(rows, "<i>")
  assert "<i>" not in as_html(rows, "<i>")


@pytest.mark.parametrize(
  ("changes", "more", "message"),
  [
    ({}, ["--rows", "0"], "--rows 0: at least 1."),
    ({}, ["--html", "/no/such/folder/x.html"], "--html /no/such/folder/x.html cannot be written: No such file"),
    ({"grain_train_files": "missing.jsonl"}, [], "missing.jsonl"),
    ({"tokenizer_path": "/no/tokenizer"}, [], "tokenizer_path=/no/tokenizer is no file and no folder."),
    ({"no_such_key": 1}, [], "no_such_key"),
  ],
)
def test_mistakes_are_named(folder, here, changes, more, message, capsys):
  assert command(keys(folder, **changes), *more) == 2
  assert message in capsys.readouterr().err


def test_a_tokenizer_that_the_data_does_not_need_may_be_missing(tmp_path, capsys):
  corpus = write_corpus(tmp_path / "corpus", [40, 40])
  given = {"dataset_type": "grain", "grain_train_files": str(corpus), "vocab_size": 1000, "max_target_length": 64}
  assert command(given | {"per_device_batch_size": 1}, "--rows", "1") == 0
  assert "tokens are shown by their ids: tokenizer_path is not set." in capsys.readouterr().out


def test_output_that_has_no_such_characters_gets_escapes(folder, monkeypatch, tmp_path):
  with open(tmp_path / "out", "w", encoding="ascii") as out:
    monkeypatch.setattr(sys, "stdout", out)
    assert command(sft_keys(folder), "--rows", "1") == 0
  assert r"\u3010the other" in (tmp_path / "out").read_text()


def test_wrong_conversations_are_errors(folder, tmp_path):
  file = tmp_path / "rows.jsonl"
  file.write_text('{"messages": [{"role": "x"}]}\n')
  with pytest.raises(ConfigError, match="'x' is not one of"):
    view(sft_keys(folder, grain_train_files=str(file)))
