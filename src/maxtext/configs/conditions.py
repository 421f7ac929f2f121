"""Conditions on a configuration, each of which declares the keys that it reads.

The table of unsupported options uses them, so that `maxtext config explain` can list the keys that a key affects.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxtext.configs.types import MaxTextConfig, RematPolicy
from maxtext.configs.values import in_bucket, remat_policies


@dataclass(frozen=True)
class Condition:
  """A predicate on a configuration.

  Attributes:
    keys: the keys it depends on.
    test: whether it holds, from the values of these keys and no others.
  """

  keys: tuple[str, ...]
  test: Callable[[Mapping[str, Any]], bool]

  def __call__(self, config: MaxTextConfig) -> bool:
    return self.test({key: getattr(config, key) for key in self.keys})


def is_set(key: str) -> Condition:
  """The value is true, or a text or list that is not empty."""
  return Condition((key,), lambda values: bool(values[key]))


def is_unset(key: str) -> Condition:
  """The value is false, or empty."""
  return negate(is_set(key))


def is_one_of(key: str, *choices: Any) -> Condition:
  """The value is among these."""
  return Condition((key,), lambda values: values[key] in choices)


def is_none_of(key: str, *choices: Any) -> Condition:
  """The value is not among these."""
  return negate(is_one_of(key, *choices))


def is_above(key: str, bound: float) -> Condition:
  """The value is a larger number."""
  return Condition((key,), lambda values: values[key] > bound)


def includes(key: str, *choices: Any) -> Condition:
  """The value is a list with one of these."""
  return Condition((key,), lambda values: any(choice in values[key] for choice in choices))


def is_in_bucket(key: str) -> Condition:
  """The value is a path in an object store."""
  return Condition((key,), lambda values: in_bucket(values[key]))


def is_parallel_over(axis: str) -> Condition:
  """The mesh may have more than one device along this axis, on either network."""
  return any_of(*(is_none_of(f"{network}_{axis}_parallelism", 1) for network in ("ici", "dcn")))


def names_remat_policy(policy: RematPolicy) -> Condition:
  """remat_policy names this policy, alone or among others."""
  return Condition(("remat_policy",), lambda values: policy in remat_policies(values["remat_policy"]))


def any_of(*conditions: Condition) -> Condition:
  """At least one of these holds."""
  return Condition(_keys(conditions), lambda values: any(condition.test(values) for condition in conditions))


def all_of(*conditions: Condition) -> Condition:
  """Each of these holds."""
  return Condition(_keys(conditions), lambda values: all(condition.test(values) for condition in conditions))


def negate(condition: Condition) -> Condition:
  """This does not hold."""
  return Condition(condition.keys, lambda values: not condition.test(values))


def _keys(conditions: tuple[Condition, ...]) -> tuple[str, ...]:
  return tuple(dict.fromkeys(key for condition in conditions for key in condition.keys))
