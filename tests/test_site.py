"""The documentation site: it builds without a warning, has every key, and a reader's browser fetches nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext.cli.main import _parser
from maxtext.configs.loader import model_names, recipe_names
from maxtext.configs.types import MaxTextConfig

ROOT = Path(__file__).parents[1]
BUILD = ("-m", "sphinx", "-W", "--keep-going", "-q")


def checkout(folder):
  """The files that pages are made of and link to; pages that are made from the sources are written beside them."""
  shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("generated"))
  for path in ROOT.iterdir():
    if path.name != "docs" and not path.name.startswith("."):
      (folder / path.name).symlink_to(path)
  return folder / "docs"


def build(folder, *flags):
  docs = folder / "docs"
  command = [sys.executable, *BUILD, *flags, str(docs), str(folder / "site")]
  return subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """{page: its HTML}."""
  folder = tmp_path_factory.mktemp("checkout")
  checkout(folder)
  done = build(folder)
  assert (done.returncode, done.stderr) == (0, "")
  return {path.relative_to(folder / "site").as_posix(): path.read_text() for path in (folder / "site").rglob("*.html")}


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site):
  pages = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
  assert pages <= site.keys()
  for page in pages - {"index.html"}:
    assert f'href="{page}"' in site["index.html"]


@pytest.mark.slow
def test_the_reference_has_everything_that_has_a_name(site):
  keys = set().union(*(re.findall(r"<h3>(\w+)<", text) for page, text in site.items() if "/keys-" in page))
  assert set(MaxTextConfig.model_fields) - keys == set()
  for page, names in {"models": model_names(), "recipes": recipe_names()}.items():
    assert set(names) - set(re.findall(r"<h2>([^<]+)<", site[f"generated/{page}.html"])) == set()
  (actions,) = [action for action in _parser()._actions if action.choices]
  for command in actions.choices:
    assert re.search(rf"<h2>maxtext {command}<", site["generated/commands.html"])
  assert "maxtext.train" in site["generated/api.html"]


@pytest.mark.slow
def test_a_browser_fetches_nothing(site):
  for page, text in site.items():
    fetched = re.findall(r'<(?:script|img|source|iframe)[^>]*\bsrc="([^"]*)|<link[^>]*\bhref="([^"]*)', text)
    assert [url for urls in fetched for url in urls if re.match(r"(https?:)?//", url)] == [], page


@pytest.mark.slow
def test_a_dead_link_ends_the_build(tmp_path):
  docs = tmp_path / "docs"
  docs.mkdir()
  (docs / "conf.py").write_text('extensions = ["myst_parser"]\nmyst_heading_anchors = 4\n')
  (docs / "index.md").write_text("# A page\n\n[nowhere](absent.md) and [no section](#absent)\n")
  done = build(tmp_path)
  assert done.returncode == 1
  assert done.stderr.count("xref_missing") == 2
