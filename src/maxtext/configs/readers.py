"""Finds which files read a key, from the syntax trees of the package's sources; nothing is imported or run.

A read is an attribute access on a configuration, or `getattr` with a name that the file contains: as a literal, in a
table that it loops over, as an f-string, or as the fields of a section. A configuration is a variable annotated
`MaxTextConfig`, one copied or assigned from such a variable, or an unannotated one called `config`. A value in an error
message does not count as read. In the loader, literal keys of mappings count too.
"""

import ast
import re
from collections import ChainMap
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from maxtext.configs import types
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.configs.types.section import Section
from maxtext.configs.values import default_of

_PACKAGE = Path(__file__).parents[1]
_LOADER = "configs/loader.py"
# Files that describe or check values, and do not use them.
_NO_READERS = tuple(f"configs/{name}" for name in ("checks.py", "conditions.py", "unsupported.py", "types/"))
_ANY = r"\w+"
_CONFIG_NAMES = ("config", "_config")
_KEYS = frozenset(MaxTextConfig.model_fields)
# A loop over all keys, or over all derived values, does not count as reading them.
_SECTIONS = {
  name: frozenset(section.model_fields)
  for name, section in vars(types).items()
  if isinstance(section, type) and issubclass(section, Section) and section not in (MaxTextConfig, DerivedValues)
}


def readers_of(key: str) -> list[str]:
  """The sorted files of the package that read a key. Only files that may read it are parsed."""
  sections = [name for name, keys in _SECTIONS.items() if key in keys]
  return [name for name, text in _sources().items() if _may_read(text, key, sections) and key in _reads(name)]


def _may_read(text: str, key: str, sections: Iterable[str]) -> bool:
  """A quick text search: whether a source may read a key by its name, by its section or by an f-string."""
  if key in text and re.search(rf"[.\"']{key}\b", text):
    return True
  if ".model_fields" in text and any(name in text for name in sections):
    return True
  return "getattr(" in text and re.search(r"getattr\([\w.]+, f[\"']", text) is not None


def readers() -> dict[str, list[str]]:
  """{key: files that read it}, for every key."""
  return {key: [name for name in _sources() if key in _reads(name)] for key in MaxTextConfig.model_fields}


def reads_of(source: str, mappings: bool = False) -> set[str]:
  """The keys that a source reads; with `mappings`, literal keys of any mapping too."""
  found = _Reads(ast.parse(source), mappings)
  return found.attributes | found.computed


@cache
def function_reads(name: str) -> dict[str, set[str]]:
  """{function: keys that it reads as attributes} for the top-level functions of a file."""
  tree = ast.parse((_PACKAGE / name).read_text())
  functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
  return {function.name: _Reads(ast.Module([function], [])).attributes for function in functions}


@cache
def _sources() -> dict[str, str]:
  paths = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
  return {name: paths[name].read_text() for name in sorted(paths) if not name.startswith(_NO_READERS)}


@cache
def _reads(name: str) -> set[str]:
  return reads_of(_sources()[name], mappings=name == _LOADER)


class _Reads(ast.NodeVisitor):
  """Walks a module and collects the keys that are read, as attributes and by computed names.

  For each scope it tracks which names are configurations, and the expressions that a name's value comes from.
  """

  def __init__(self, tree: ast.Module, mappings: bool = False) -> None:
    self.attributes, self.computed = set[str](), set[str]()
    self._mappings = mappings
    self._configs: ChainMap[str, bool] = ChainMap()
    self._values: ChainMap[str, list[ast.expr]] = ChainMap()
    self._fields = {*_CONFIG_NAMES, *_annotated_fields(tree)}
    for statement in tree.body:  # tables may be defined after the functions that use them
      self._bind_statement(statement)
    self.visit(tree)

  def visit_Attribute(self, node: ast.Attribute) -> None:
    if isinstance(node.ctx, ast.Load) and node.attr in _KEYS and self._is_config(node.value):
      self.attributes.add(node.attr)
    self.generic_visit(node)

  def visit_Call(self, node: ast.Call) -> None:
    function, arguments = node.func, node.args
    if _last_name(function).endswith("Error"):
      return
    if isinstance(function, ast.Name) and function.id == "getattr" and self._is_config(arguments[0]):
      self.computed |= self._strings(arguments[1]) & _KEYS
    if self._mappings and isinstance(function, ast.Attribute) and function.attr in ("get", "pop") and arguments:
      self.computed |= self._strings(arguments[0]) & _KEYS
    self.generic_visit(node)

  def visit_Subscript(self, node: ast.Subscript) -> None:
    if self._mappings and isinstance(node.ctx, ast.Load):
      self.computed |= self._strings(node.slice) & _KEYS
    self.generic_visit(node)

  def visit_Assign(self, node: ast.Assign) -> None:
    self.generic_visit(node)
    self._bind_statement(node)

  def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
    self.generic_visit(node)
    self._bind_statement(node)

  def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
    self.generic_visit(node)
    self._bind(node.target, node.value)

  def visit_For(self, node: ast.For) -> None:
    self._bind_items(node.target, node.iter)
    self.generic_visit(node)

  def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    self._in_scope(node, node.args)

  visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

  def visit_Lambda(self, node: ast.Lambda) -> None:
    self._in_scope(node, node.args)

  def visit_ClassDef(self, node: ast.ClassDef) -> None:
    self._in_scope(node, None)

  def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
    self._in_scope(node, None, node.generators)

  visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815

  def _in_scope(
    self, node: ast.AST, arguments: ast.arguments | None, generators: Iterable[ast.comprehension] = ()
  ) -> None:
    self._configs, self._values = self._configs.new_child(), self._values.new_child()
    if arguments is not None:
      for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        name, annotation = argument.arg, argument.annotation
        self._configs[name] = name in ("config", "c") if annotation is None else _says_config(annotation)
        self._values[name] = [annotation] if annotation is not None and _is_literal(annotation) else []
    for generator in generators:
      self._bind_items(generator.target, generator.iter)
    self.generic_visit(node)
    self._configs, self._values = self._configs.parents, self._values.parents

  def _bind_statement(self, node: ast.stmt) -> None:
    if isinstance(node, ast.Assign):
      for target in node.targets:
        self._bind(target, node.value)
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      self._configs[node.target.id] = _says_config(node.annotation)
      self._values[node.target.id] = [] if node.value is None else [node.value]

  def _bind(self, target: ast.expr, value: ast.expr) -> None:
    """Records the names that an assignment binds."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
      for name, item in zip(target.elts, value.elts, strict=True):
        self._bind(name, item)
    elif isinstance(target, ast.Name):
      self._configs[target.id] = target.id == "config" or self._is_config(value)
      self._values[target.id] = [*self._values.maps[0].get(target.id, []), value]
    else:
      self._bind_items(target, value)

  def _bind_items(self, target: ast.expr, values: ast.expr) -> None:
    """Records names that are bound to the items of an expression."""
    for name in ast.walk(target):
      if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
        self._configs[name.id] = name.id == "config"
        self._values[name.id] = [*self._values.maps[0].get(name.id, []), values]

  def _is_config(self, node: ast.expr) -> bool:
    match node:
      case ast.Name(id=name):
        return self._configs.get(name, name == "config")
      case ast.Attribute(attr=name):
        return name in self._fields
      case ast.Call(func=ast.Attribute(value=copied, attr="model_copy")):
        return self._is_config(copied)
      case ast.Call(func=ast.Name(id="cast"), args=[annotation, _]):
        return _says_config(annotation)
      case ast.NamedExpr(value=value):
        return self._is_config(value)
      case ast.IfExp(body=body, orelse=other):
        return self._is_config(body) or self._is_config(other)
      case ast.BoolOp(values=values):
        return any(map(self._is_config, values))
    return False

  def _strings(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> set[str]:
    """The strings in an expression and in the values of its names; an f-string gives the keys that it matches."""
    match node:
      case ast.Constant(value=str(value)):
        return {value}
      case ast.JoinedStr(values=parts):
        pattern = "".join(map(self._pattern, parts))
        return {key for key in _KEYS if re.fullmatch(pattern, key)} if pattern != _ANY else set()
      case ast.GeneratorExp(elt=item, generators=parts) | ast.ListComp(elt=item, generators=parts):
        own = {name.id for part in parts for name in ast.walk(part.target) if isinstance(name, ast.Name)}
        found = {text for value in (item, *(p.iter for p in parts)) for text in self._strings(value, seen | own)}
        kinds = {_default_kind(condition) for part in parts for condition in part.ifs} - {""}
        return {text for text in found if not kinds or (text in _KEYS and type(default_of(text)).__name__ in kinds)}
      case ast.BinOp(left=left, op=ast.Sub()):
        return self._strings(left, seen)
      case ast.Attribute(value=section, attr="model_fields"):
        names = [_last_name(part) for part in ast.walk(section) if isinstance(part, ast.expr)]
        return {key for name in names for key in _SECTIONS.get(name, ())}
      case ast.Name(id=name):
        values = [] if name in seen else self._values.get(name, [])
        return {key for value in values for key in self._strings(value, seen | {name})}
    return {key for child in ast.iter_child_nodes(node) for key in self._strings(child, seen)}

  def _pattern(self, part: ast.expr) -> str:
    match part:
      case ast.Constant(value=str(text)):
        return re.escape(text)
      case ast.FormattedValue(value=ast.Name(id=name)) if any(map(_is_literal, self._values.get(name, []))):
        return f"({'|'.join(sorted(self._strings(self._values[name][0])))})"
    return _ANY


def _says_config(annotation: ast.expr) -> bool:
  """Whether an annotation is `MaxTextConfig`, or a union with it."""
  if isinstance(annotation, ast.BinOp):
    return _says_config(annotation.left) or _says_config(annotation.right)
  return _last_name(annotation) == MaxTextConfig.__name__


def _is_literal(annotation: ast.expr) -> bool:
  return isinstance(annotation, ast.Subscript) and _last_name(annotation.value) == "Literal"


def _default_kind(condition: ast.expr) -> str:
  """The type in `isinstance(default_of(key), type)`; empty for any other condition."""
  match condition:
    case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Call(func=ast.Name(id="default_of")), kind]):
      return _last_name(kind)
  return ""


def _annotated_fields(tree: ast.Module) -> set[str]:
  """The names of class attributes annotated as configurations."""
  fields = [node for group in ast.walk(tree) if isinstance(group, ast.ClassDef) for node in group.body]
  annotated = [node for node in fields if isinstance(node, ast.AnnAssign) and _says_config(node.annotation)]
  return {_last_name(node.target) for node in annotated}


def _last_name(node: ast.expr) -> str:
  match node:
    case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
      return name
  return ""
