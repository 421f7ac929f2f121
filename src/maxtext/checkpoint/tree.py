"""Names for the arrays of any pytree, and the nested form in which they are stored.

A name is the path of keys joined by '/'. Parameters have canonical paths, so a name knows neither mesh nor loop.
"""

from collections.abc import Mapping
from typing import Any

import jax

from maxtext.layers.parameter_paths import join, split


def named(tree: Any) -> dict[str, Any]:
  """Every leaf under its name."""
  found = {join(*map(_word, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  assert len(found) == len(jax.tree.leaves(tree)), "two leaves have one name"
  return found


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
  """A tree of the same structure with those leaves."""
  names, structure = list(named(tree)), jax.tree.structure(tree)
  return jax.tree.unflatten(structure, [leaves[name] for name in names])


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The dictionaries of dictionaries that the names describe."""
  root: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *folders, last = split(name)
    inner = root
    for folder in folders:
      inner = inner.setdefault(folder, {})
    assert last not in inner, f"{name} is both an array and a folder"
    inner[last] = leaf
  return root


def _word(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  raise AssertionError(f"{key!r} has no name")
