"""From files and `key=value` to one frozen `MaxTextConfig`.

Later layers win: base.yml, the YAML that `custom_mesh_and_rule` names, the model's YAML, a user's YAML (or a built-in
recipe's name), `M_<KEY>` variables of the environment that the caller hands over, then single values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from maxtext.configs.checks import check
from maxtext.configs.errors import ConfigError, nearest
from maxtext.configs.refusals import plain
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.run import ModelName

_HERE = Path(__file__).parent
_MODELS = _HERE / "models"
_RECIPES = _HERE / "recipes"
_RULES = _HERE / "rules"
RULE_KEYS = ("mesh_axes", "logical_axis_rules", "data_sharding", "input_data_sharding_logical_axes")


@dataclass(frozen=True)
class Resolved:
  """A configuration, and for each key that is not at its default where its value came from."""

  config: MaxTextConfig
  origins: Mapping[str, str]


def values_and_origins(config: MaxTextConfig, origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """Every key with its value, as the user writes it, and where it came from."""
  return {
    key: {"value": plain(getattr(config, key)), "from": origins.get(key, "default")}
    for key in type(config).model_fields
  }


def load_config(
  source: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **values: Any
) -> MaxTextConfig:
  """Builds a run's configuration.

  Args:
    source: a YAML file, the name of a built-in recipe, or the name of a model.
    environment: variables `M_<KEY>`, which win over every file.
    **values: single keys, which win over everything.
  """
  return resolve(source, environment, values).config


def resolve(
  source: str | Path | None = None,
  environment: Mapping[str, str] | None = None,
  values: Mapping[str, Any] | None = None,
) -> Resolved:
  """The same, with where each value came from."""
  user_layers = {
    str(source): _user_layer(source) if source is not None else {},
    "environment": _environment_layer(environment or {}),
    "command line": dict(values or {}),
  }
  user = {key: value for layer in user_layers.values() for key, value in layer.items()}
  _refuse_unknown(user)
  base, name = _read(_HERE / "base.yml"), user.get("model_name", "default")
  rules, model = user.get("custom_mesh_and_rule", ""), _model_layer(name)
  below = {"base.yml": base, f"custom_mesh_and_rule={rules}": _rules_layer(rules), f"model {name}": model}
  ours = {key: value for layer in below.values() for key, value in layer.items()}
  config = _build(ours | user)
  if not config.override_model_config:
    _refuse_changed_model(config, _build(ours), model.keys() & user.keys())
  check(config)
  layers = below | user_layers
  return Resolved(config, {key: origin for origin, layer in layers.items() for key in layer})


def keys_below(values: Mapping[str, Any]) -> set[str]:
  """The keys that may be set before a user's are, where a user names this model and these rules.

  A file of rules is not opened: what a run recorded must be readable without it.
  """
  rules = RULE_KEYS if values.get("custom_mesh_and_rule") else ()
  return {*_read(_HERE / "base.yml"), *rules, *_model_layer(values.get("model_name", "default"))}


def parse_assignments(words: Iterable[str]) -> dict[str, Any]:
  """`key=value` words of a command line; values are read as YAML, but for text without quotes, which may be any."""
  values: dict[str, Any] = {}
  for word in words:
    key, equals, text = word.partition("=")
    if not equals or not key:
      raise ConfigError(f"'{word}' is not of the form key=value.")
    field = MaxTextConfig.model_fields.get(key)
    if not text or (field and field.annotation is str and text[0] not in "\"'"):
      values[key] = text
      continue
    try:
      values[key] = yaml.safe_load(text)
    except yaml.YAMLError:
      values[key] = text
  return values


@cache
def model_names() -> tuple[str, ...]:
  """Every model that has a name."""
  return get_args(ModelName)


def _user_layer(source: str | Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
  path = Path(source)
  if path.suffix in (".yml", ".yaml"):
    if path.resolve() in below:
      raise ConfigError(f"base_config in {path} leads back to itself.")
    layer = _read(path)
    if base := layer.pop("base_config", None):
      near = path.parent / str(base)
      layer = _user_layer(near if near.exists() else str(base), (*below, path.resolve())) | layer
    return layer
  name = str(source)
  recipe = _RECIPES / f"{name}.yml"
  if recipe.exists():
    return _user_layer(recipe, below)
  if name in model_names():
    return {"model_name": name}
  recipes = sorted(p.stem for p in _RECIPES.glob("*.yml"))
  hint = nearest(name, (*recipes, *model_names()))
  raise ConfigError(f"'{name}' is no .yml file, no recipe ({', '.join(recipes)}) and no model's name.{hint}")


def _environment_layer(environment: Mapping[str, str]) -> dict[str, Any]:
  words = []
  for variable, text in environment.items():
    if variable.startswith("M_"):
      key = variable.removeprefix("M_").lower()
      if key not in MaxTextConfig.model_fields:
        hint = nearest(key, MaxTextConfig.model_fields)
        if not hint:  # somebody else's variable
          continue
        raise ConfigError(f"{variable} in the environment names no key.{hint}")
      words.append(f"{key}={text}")
  return parse_assignments(words)


def _model_layer(name: str) -> dict[str, Any]:
  if name not in model_names():
    raise ConfigError(f"model_name={name} is not a known model.{nearest(str(name), model_names())}")
  return _read(_MODELS / f"{name}.yml")


def _rules_layer(rules: Any) -> dict[str, Any]:
  """What `custom_mesh_and_rule` names; a value that is neither file nor name is left to the key's type to refuse."""
  text = str(plain(rules))
  path = Path(text) if text.endswith((".yml", ".yaml")) else _RULES / f"{text}.yml"
  if path.parent == _RULES and not path.exists():
    return {}
  layer = _read(path)
  for key in layer:
    if key not in RULE_KEYS:
      raise ConfigError(f"{path}: '{key}' is none of {', '.join(RULE_KEYS)}.{nearest(key, RULE_KEYS)}")
  return layer


class _StrictLoader(yaml.SafeLoader):
  """YAML in which a key is a word and stands once."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    if twice := [key for key in keys if keys.count(key) > 1]:
      raise yaml.YAMLError(f"'{twice[0]}' stands twice{node.start_mark}")
    return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
  try:
    content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader) or {}
  except OSError as error:
    raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
  except (yaml.YAMLError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
  if not isinstance(content, Mapping):
    raise ConfigError(f"{path} must hold 'key: value' lines at its top level.")
  return {str(key): value for key, value in content.items()}


def _refuse_unknown(values: Mapping[str, Any]) -> None:
  known = MaxTextConfig.model_fields
  if "base_config" in values:
    raise ConfigError(f"base_config={values['base_config']} belongs in a YAML file; name the file itself instead.")
  for key in values:
    if key not in known:
      raise ConfigError(f"'{key}' is not a key.{nearest(key, known)}")


def _build(values: Mapping[str, Any]) -> MaxTextConfig:
  try:
    return MaxTextConfig(**values)
  except ValidationError as error:
    raise ConfigError(_readable(error)) from None


def _refuse_changed_model(config: MaxTextConfig, named: MaxTextConfig, keys: Iterable[str]) -> None:
  for key in sorted(keys):
    asked, has = getattr(config, key), getattr(named, key)
    if asked != has:
      raise ConfigError(
        f"{key}={asked} contradicts model_name={config.model_name}, which has {key}={has}. "
        f"Add override_model_config=true to change the model."
      )


def _readable(error: ValidationError) -> str:
  """One line per wrong key: the key, the value, what was expected."""
  problems: dict[str, str] = {}
  for e in error.errors():
    key = str(e["loc"][0])
    message = f"{key}={e['input']}: {e['msg'].lower()}"
    problems[key] = f"{problems[key]}, or {e['msg'].lower()}" if key in problems else message
  return "\n".join(f"{problem}." for problem in problems.values())
