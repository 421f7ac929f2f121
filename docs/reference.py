"""Writes the pages of the reference from the sources: keys, models, recipes, commands, modules, and Python."""

import argparse
import ast
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import maxtext
from maxtext.cli.main import _parser
from maxtext.configs import explain, types
from maxtext.configs.readers import readers
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.section import Section
from maxtext.configs.values import default_of, plain_value
from maxtext.models.catalogue import catalogue

_PACKAGE = Path(maxtext.__file__).parent
_CONFIGS = _PACKAGE / "configs"
_ROOT = Path(__file__).parents[1]
_ALL = types.__name__
ROOT_PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")  # beside README.md


def write(folder: Path) -> None:
  """Makes the folder anew, with all pages."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for name, text in (*_key_pages(), *((name, "\n".join(make())) for name, make in _PAGES.items())):
    (folder / name).with_suffix(".rst" if name == "api" else ".md").write_text(f"{text}\n", encoding="utf-8")


def _quick_start() -> Iterator[str]:
  yield "# " + re.split(r"^## ", _read("README.md"), flags=re.MULTILINE)[1]


def _read(name: str) -> str:
  """A page of the repository's root, with links as they are from the generated pages."""
  text = (_ROOT / name).read_text(encoding="utf-8")
  return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda link: "](../" if link[1] else "](../../", text)


def _sections() -> Iterator[tuple[str, str, list[str]]]:
  """The page, the title and the keys of each section of the configuration."""
  found = (kind for kind in vars(types).values() if isinstance(kind, type) and issubclass(kind, Section))
  for kind in found:
    if kind.__module__ not in (Section.__module__, _ALL) and kind is not types.Debug:  # whose key is a group's name too
      yield kind.__module__.rpartition(".")[2], (kind.__doc__ or "").splitlines()[0].rstrip("."), [*kind.model_fields]
  yield "run", "Keys that are groups", list(MaxTextConfig.__annotations__)


def _key_pages() -> Iterator[tuple[str, str]]:
  """A page for each file of keys, a section for each section of the configuration."""
  read, pages = readers(), dict[str, list[str]]()
  for page, title, keys in _sections():
    lines = pages.setdefault(page, [f"# Keys: {page.replace('_', ' ')}"])
    lines += ["", f"## {title}"]
    for key in keys:
      lines += ["", f"### {key}", "", _escape(MaxTextConfig.model_fields[key].description or ""), ""]
      lines += [f"- **{label}** {_value(label, text)}" for label, text in explain.facts_of(key, read[key])]
  return ((f"keys-{page}", "\n".join(lines)) for page, lines in pages.items())


def _value(label: str, text: str) -> str:
  if label in ("type", "default"):
    return f"`{text}`"
  if label in ("values", "read by"):
    return ", ".join(f"`{part}`" for part in text.split(", "))
  if label in ("checked", "decides"):
    return re.sub(r"\w+", lambda word: _key_link(word[0]), text)
  return _escape(text)


def _key_link(word: str) -> str:
  return f"[{word}](keys-{_PAGE_OF_KEY[word]}.md#{word.lower()})" if word in _PAGE_OF_KEY else word


_PAGE_OF_KEY = {key: page for page, _, keys in _sections() for key in keys}


def _keys() -> Iterator[str]:
  yield "# All keys\n"
  yield f"The {len(_PAGE_OF_KEY)} keys, by name, with their defaults. `maxtext config explain KEY` and"
  yield "`maxtext config search WORD` say the same in a terminal; write values as `key=value`, or in a file of YAML.\n"
  yield "```{toctree}\n:hidden:\n"
  yield "\n".join(dict.fromkeys(f"keys-{page}" for page in _PAGE_OF_KEY.values()))
  yield "```\n"
  for key in sorted(_PAGE_OF_KEY):
    default, about = plain_value(default_of(key)), MaxTextConfig.model_fields[key].description or ""
    shown = f"`{default!r}`" if len(repr(default)) < 40 else "a table" if isinstance(default, list) else "a text"
    yield f"- {_key_link(key)} ({shown}): {_escape(about)}"


def _models() -> Iterator[str]:
  yield "# Models\n"
  yield "What `maxtext models` lists. `maxtext models NAME` draws the layers of one, `maxtext train NAME` trains it.\n"
  yield "| name | family | parameters | active | positions | Hugging Face | |"
  yield "| --- | --- | ---: | ---: | ---: | --- | --- |"
  for found in catalogue():
    alias = f"the same as `{found.same_as}`" if found.same_as else ""
    converts = "both ways" if found.converts else ""
    sizes = f"{found.parameters:,} | {found.active_parameters:,} | {found.context:,}"
    yield f"| `{found.name}` | {found.family} | {sizes} | {converts} | {alias} |"
  yield ""
  yield from _files((_CONFIGS / "models").glob("*.yml"))


def _recipes() -> Iterator[str]:
  yield "# Recipes\n"
  yield "Files that `maxtext train NAME` starts from, as `maxtext train FILE.yml` from a file of your own.\n"
  yield from _files([*(_CONFIGS / "recipes").glob("*.yml"), *(_CONFIGS / f"{name}.yml" for name in _METHODS)])


_METHODS = ("sft", "dpo", "rl", "distill", "inference", "tpu_smoke_test")


def _files(paths: Iterable[Path]) -> Iterator[str]:
  for path in sorted(paths):
    yield f"## {path.stem}\n\n```yaml\n{path.read_text(encoding='utf-8').strip()}\n```\n"


def _commands() -> Iterator[str]:
  yield "# Commands\n"
  yield "What `maxtext COMMAND --help` prints."
  yield from _command(_parser(), 1)


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
  if level > 1:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    yield f"\n{'#' * level} {parser.prog}\n\n```\n{parser.format_help().strip()}\n```"
  for action in parser._actions:
    if isinstance(action, argparse._SubParsersAction):
      for command in action.choices.values():
        yield from _command(command, level + 1)


def _modules() -> Iterator[str]:
  yield "# Modules\n"
  yield "Every file of `src/maxtext/`, with what it offers to others, by its docstrings. What may import what is in"
  yield "[architecture](../architecture.md)."
  paths = sorted(path for path in _PACKAGE.rglob("*.py") if path.name != "__main__.py")
  for package, files in groupby(paths, key=lambda path: path.parent):
    yield f"\n## {(package.relative_to(_PACKAGE.parent)).as_posix()}/"
    for path in files:
      tree = ast.parse(path.read_text(encoding="utf-8"))
      if about := _first_line(tree):
        yield f"\n**{path.name}** {about}\n"
      for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and _first_line(node):
          yield f"- `{node.name}` {_first_line(node)}"


def _first_line(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
  return _escape(re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0].replace("\n", " "))


def _api() -> Iterator[str]:
  yield "Python\n======\n\nWhat ``import maxtext`` offers. Examples are in :doc:`../extending`.\n"
  for name in maxtext.__all__:
    value = getattr(maxtext, name)
    if name in ("MaxTextConfig", "ConfigKeys"):  # their signatures would be all keys
      yield f".. class:: maxtext.{name}\n\n   {inspect.getdoc(value)} See :doc:`keys`.\n".replace("\n\n   \n", "\n")
    elif inspect.isclass(value):
      yield f".. autoclass:: maxtext.{name}\n   :members:\n"
    elif callable(value):
      yield f".. autofunction:: maxtext.{name}\n"


def _escape(text: str) -> str:
  """Markdown of a text in which only backticks mean something."""
  parts = text.split("`")
  return "`".join(re.sub(r"([*_<>\[\]|{}])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts))


_PAGES = {
  "quick-start": _quick_start,
  "keys": _keys,
  "models": _models,
  "recipes": _recipes,
  "commands": _commands,
  "api": _api,
  "modules": _modules,
  **{name: lambda name=name: iter([_read(f"{name}.md")]) for name in ROOT_PAGES},
}
PAGES = tuple(name for name in _PAGES if name not in ("quick-start", *ROOT_PAGES))
