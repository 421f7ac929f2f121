"""Pages say what is so: keys of commands exist, quoted messages and metrics are in the sources."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from maxtext.cli.main import _parser
from maxtext.configs.types import MaxTextConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRONG_ON_PURPOSE = {"stepps"}
METHODS = ("train", "sft", "dpo", "rl", "distill", "plan")


def commands(page):
  """The words of every `maxtext` command in the blocks of a page, without the output below it."""
  for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
    for line in re.sub(r" *\\\n\s*", " ", block).splitlines():
      if re.match(r"(\$ )?maxtext [a-z]", line) and "..." not in line:
        yield shlex.split(line.removeprefix("$ "), comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_keys_that_exist(page):
  (actions,) = [action for action in _parser()._actions if action.choices]
  for words in commands(page):
    assert words[0] in actions.choices, words
    keys = [found[1] for word in words if (found := re.match(r"(\w+)=", word))] if words[0] in METHODS else []
    assert set(keys) - set(MaxTextConfig.model_fields) - WRONG_ON_PURPOSE == set(), words


@cache
def texts():
  """Every text of the sources; what is filled in is a mark."""
  found = []
  for path in (ROOT / "src").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.JoinedStr):
        found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(node.value)
  return found


def rows(page):
  cells = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
  assert len(cells) >= 10
  return cells


@pytest.mark.parametrize("row", rows("troubleshooting.md"))
def test_a_quoted_message_is_one_that_is_printed(row):
  pattern = re.compile(".*".join(map(re.escape, row.strip("`").split("..."))), re.DOTALL)
  assert any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("row", rows("metrics.md"))
def test_a_metric_of_the_page_is_one_that_is_written(row):
  for name in re.findall(r"`(\w+)`", row):
    assert any(re.fullmatch(rf"{name}|\0?_?{name.removeprefix('eval_')}(_max)?", text) for text in texts()), name
