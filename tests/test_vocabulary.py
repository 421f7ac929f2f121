"""The field's names stay: class names are unique, and the terms that people search for lead to a page and to code."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, DOCS = ROOT / "src" / "maxtext", ROOT / "docs"
ROW = re.compile(
  r"^\| (?P<term>[^|]+?) \| \[[^]]+\]\((?P<page>[\w-]+\.md)(?:#(?P<anchor>[\w-]+))?\) \| `(?P<code>[^`]+)` \|$"
)
TERMS = [match for line in (DOCS / "glossary.md").read_text().splitlines() if (match := ROW.match(line))]
LINK = re.compile(r"\[[^]\n]+\]\((?!https?:)(?P<page>[\w./-]*?\.md)?(?:#(?P<anchor>[\w-]+))?\)")


def anchors(page: Path) -> dict[str, str]:
  """Each heading's anchor as GitHub makes it, with the text of its section."""
  parts = re.split(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
  slug = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in parts[1::2]]
  return {name: f"{title}\n{text}" for name, title, text in zip(slug, parts[1::2], parts[2::2], strict=True)}


def test_class_names_are_unique():
  names = Counter(
    node.name
    for path in PACKAGE.rglob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
  )
  assert [name for name, count in names.items() if count > 1] == []


def test_the_glossary_has_the_fields_terms():
  rows = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")][2:]
  assert len(TERMS) == len(rows) >= 40


@pytest.mark.parametrize("row", TERMS, ids=lambda row: row["term"])
def test_a_term_leads_to_a_section_and_to_code(row):
  """The words themselves are in the section, so that a search of the pages finds it, and in the file or folder."""
  page = DOCS / row["page"]
  text = anchors(page)[row["anchor"]] if row["anchor"] else page.read_text()
  code = PACKAGE / row["code"]
  files = code.rglob("*.py") if code.is_dir() else [code]
  source = "\n".join(f"{file.name}\n{file.read_text()}" for file in files)
  words = [_loose(word) for word in re.split(r" \(|\)|, ", row["term"]) if word]
  assert any(re.search(word, _plain(text)) for word in words), "the section never says it"
  assert any(re.search(word, _plain(source)) for word in words), "the code never says it"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_between_pages_are_alive(page):
  dead = []
  for link in LINK.finditer(page.read_text()):
    target = page if link["page"] is None else page.parent / link["page"]
    if not target.exists() or (link["anchor"] and link["anchor"] not in anchors(target)):
      dead.append(link[0])
  assert dead == []


def _plain(text: str) -> str:
  return re.sub(r"[\s_\-]+", " ", text.lower())


def _loose(term: str) -> str:
  return re.escape(_plain(term)).removesuffix("s")
