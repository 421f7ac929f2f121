"""The documentation site: `sphinx-build -W docs build/site` makes it, and nothing is fetched to build it or to read it.

Pages are plain Markdown, which GitHub shows too. The navigation is the lists of links of `index.md`; the reference is
made from the sources (`reference.py`) in `docs/generated/`.
"""

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import reference

project = "MaxText"
version = release = installed_version("maxtext")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
highlight_language = "none"
default_role = "code"  # docstrings are written as Markdown
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
copybutton_prompt_text = "$ "
html_theme = "furo"
html_title = f"MaxText {release}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False


def setup(app: Sphinx) -> None:
  """Writes the reference before pages are read, and gives the first page its navigation."""
  app.connect("builder-inited", lambda app: reference.write(Path(app.srcdir) / "generated"))
  app.connect("source-read", _link_root_pages)
  app.connect("source-read", _add_navigation)


def _link_root_pages(_: Sphinx, page: str, source: list[str]) -> None:
  """Pages of the repository's root are generated pages here."""
  here = "" if page.startswith("generated/") else "generated/"
  for name in reference.ROOT_PAGES:
    source[0] = re.sub(rf"\]\((\.\./)+{name}\.md", f"]({here}{name}.md", source[0])


def _add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
  if page != "index":
    return
  titles = re.split(r"^## (.+)$", source[0], flags=re.MULTILINE)[1:]
  parts = {
    title: re.findall(r"\]\(([\w-]+)\.md\)", text) for title, text in zip(titles[::2], titles[1::2], strict=True)
  }
  parts["Getting started"].insert(0, "generated/quick-start")
  parts["Reference"] = [*(f"generated/{name}" for name in reference.PAGES), *parts["Reference"]]
  parts["The project"] = [f"generated/{name}" for name in reference.ROOT_PAGES]
  for heading, pages in parts.items():
    source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])
