"""Builds one frozen `MaxTextConfig` from files and `key=value` overrides.

Later layers win: base.yml, the user's own base.yml, the YAML that `custom_mesh_and_rule` names, the model's YAML, that
of the training method (`sft.yml`, `dpo.yml` or `rl.yml` with `use_sft`, `use_dpo` or `use_grpo`), a user's YAML (or a
built-in recipe), `M_<KEY>` variables of the environment that the caller passes, single values, then
`student_overrides`. Keys of the group `rl` count as written where it is.
`logical_axis_rules` of a user replace the rules of the same logical axes. With `override_logical_axis_rules=true` they
replace the whole table.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from maxtext.configs.checks import check
from maxtext.configs.derived import without_devices
from maxtext.configs.errors import ConfigError, ConfigWarning, did_you_mean
from maxtext.configs.renamed_keys import renamed_hint
from maxtext.configs.secrets import redact_value
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.configs.types.run import ModelName
from maxtext.configs.unsupported import no_effect_warning
from maxtext.configs.values import plain_value

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys

_HERE = Path(__file__).resolve().parent
_BASE = _HERE / "base.yml"
_MODELS = _HERE / "models"
_RECIPES = _HERE / "recipes"
_RULES = _HERE / "rules"
_METHODS = {"use_sft": _HERE / "sft.yml", "use_dpo": _HERE / "dpo.yml", "use_grpo": _HERE / "rl.yml"}
"""What a training method starts from, by the key that chooses it."""
RULE_KEYS = ("mesh_axes", "logical_axis_rules", "data_sharding", "input_data_sharding_logical_axes")


@dataclass(frozen=True)
class Resolved:
  """A configuration, with the origin of each value that a layer set.

  Attributes:
    config: the configuration.
    origins: {key: name of the layer that set it}.
    warning: names the keys that the user set and that have no effect; None if there are none.
    name: what to call it: the recipe, the stem of the user's file, or the model's name.
  """

  config: MaxTextConfig
  origins: Mapping[str, str]
  warning: str | None = None
  name: str = ""


@dataclass(frozen=True)
class _Layer:
  """One layer of the configuration.

  Attributes:
    name: its origin, for messages.
    values: its keys.
    is_base: whether it is below the rules and the model.
    written_by_user: whether the user wrote it, so that keys without effect are reported.
    is_whole_table: whether its `logical_axis_rules` replace the whole table.
  """

  name: str
  values: Mapping[str, Any] = field(default_factory=dict)
  is_base: bool = False
  written_by_user: bool = True
  is_whole_table: bool = False


def values_and_origins(config: MaxTextConfig, origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """{key: {"value", "from"}} for every key, with secrets redacted. A derived value that is not known is None."""
  derived = {key for key in DerivedValues.model_fields if getattr(config, key, None) is not None}
  return {
    key: {
      "value": redact_value(key, plain_value(getattr(config, key, None))),
      "from": "other keys" if key in derived else origins.get(key, "default"),
    }
    for key in type(config).model_fields
  }


def load_config(
  source: str | Path | None = None,
  *,
  environment: Mapping[str, str] | None = None,
  strict: bool = False,
  **values: "Unpack[ConfigKeys]",
) -> MaxTextConfig:
  """Builds a run's configuration.

  Keys that have no effect in this combination are named in one `ConfigWarning`.

  Args:
    source: a YAML file, the name of a built-in recipe, or the name of a model.
    environment: variables `M_<KEY>`, which win over every file.
    strict: whether a key without effect is an error.
    **values: single keys, which win over everything. `ConfigKeys` has their types.

  Raises:
    ConfigError: (a ValueError) a key is unknown, unsupported, of another type, or contradicts another.
  """
  resolved = resolve(source, environment, {**values}, strict=strict)
  if resolved.warning:
    warnings.warn(resolved.warning, ConfigWarning, stacklevel=2)
  return resolved.config


def resolve(
  source: str | Path | None = None,
  environment: Mapping[str, str] | None = None,
  values: Mapping[str, Any] | None = None,
  *,
  strict: bool = False,
  recorded: Collection[str] = (),
) -> Resolved:
  """As `load_config`, but also returns the origin of each value, and the warning instead of issuing it.

  Args:
    source: as in `load_config`.
    environment: as in `load_config`.
    values: single keys, which win over everything.
    strict: as in `load_config`.
    recorded: keys in `values` from the record of an earlier run, which are not warned about.
  """
  given = [
    *(_source_layers(source) if source is not None else []),
    _Layer("environment", _environment_layer(environment or {})),
    _Layer("command line", dict(values or {})),
  ]
  given = [_with_group(layer) for layer in given]
  given += _student_layers(given)
  user_values = {key: value for layer in given for key, value in layer.values.items()}
  _check_known_keys(user_values)
  name, rules = user_values.get("model_name", "default"), user_values.get("custom_mesh_and_rule", "")
  model = _model_layer(name)
  layers = [
    _Layer("base.yml", _read(_BASE), written_by_user=False),
    *(layer for layer in given if layer.is_base),
    _Layer(f"custom_mesh_and_rule={rules}", _rules_layer(rules), written_by_user=False, is_whole_table=True),
    _Layer(f"model {name}", model, written_by_user=False),
    *_method_layers(user_values),
  ]
  defaults = _merge_layers(layers)
  above = [layer for layer in given if not layer.is_base]
  layers += above
  config = _build(_merge_layers(layers))
  if not config.override_model_config:
    _check_model_overrides(config, _build(defaults), model.keys() & {key for layer in above for key in layer.values})
  check(config)
  written = {key: layer.written_by_user for layer in layers for key in layer.values}
  warning = no_effect_warning(config, {key for key, by_user in written.items() if by_user} - set(recorded))
  if warning and strict:
    raise ConfigError(warning)
  config = without_devices(config)
  origins = {key: layer.name for layer in layers for key in layer.values}
  return Resolved(config, origins, warning, _source_name(source) or config.model_name)


def default_layer_keys(values: Mapping[str, Any]) -> set[str]:
  """The keys that base.yml, the named model, custom rules and the training method may set, in layers below the user's.

  A file of custom rules is not opened, because the record of a run must be readable without it.
  """
  rules = RULE_KEYS if values.get("custom_mesh_and_rule") else ()
  methods = [key for layer in _method_layers(values) for key in layer.values]
  return {*_read(_BASE), *rules, *_model_layer(values.get("model_name", "default")), *methods}


def parse_assignments(words: Iterable[str]) -> dict[str, Any]:
  """Parses `key=value` arguments. Values are read as YAML, except unquoted values of text keys, which are taken as
  is."""
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
  """The names of all models."""
  return get_args(ModelName)


def recipe_names() -> tuple[str, ...]:
  """The names of all recipes."""
  return tuple(sorted(path.stem for path in _RECIPES.glob("*.yml")))


def canonical_model_name(name: str) -> str:
  """The shortest name of a model with the same keys; empty if it is this name, or if no model has this name."""
  models = _all_models()
  if name not in models:
    return ""
  shortest = min((other for other, keys in models.items() if keys == models[name]), key=len)
  return "" if shortest == name else shortest


@cache
def _all_models() -> dict[str, dict[str, Any]]:
  return {name: _model_layer(name) for name in model_names()}


def is_bundled(name: str) -> bool:
  """Whether this is the name of a recipe or of a model."""
  return name in model_names() or ("/" not in name and (_RECIPES / f"{name}.yml").exists())


def _source_layers(source: str | Path, below: tuple[Path, ...] = ()) -> list[_Layer]:
  """The layers of a file with its `base_config` files, of a recipe, or of a model's name."""
  name, path = str(source), Path(source)
  if path.suffix in (".yml", ".yaml"):
    return _file_layers(name, path if path.exists() else _bundled(path) or path, below)
  recipe = _RECIPES / f"{name}.yml"
  if recipe.exists():
    return _file_layers(name, recipe, below)
  if name in model_names():
    return [_Layer(name, {"model_name": name}, written_by_user=False)]
  close = did_you_mean(name, (*recipe_names(), *model_names()))
  raise ConfigError(f"'{name}' is no .yml file, no recipe ({', '.join(recipe_names())}) and no model's name.{close}")


def _source_name(source: str | Path | None) -> str:
  """The name of a recipe or model, or the stem of a file; empty for base.yml, which describes no run of its own."""
  if source is None:
    return ""
  path = Path(source)
  name = path.stem if path.suffix in (".yml", ".yaml") else str(source)
  return "" if name == _BASE.stem else name


def _file_layers(name: str, path: Path, below: tuple[Path, ...]) -> list[_Layer]:
  real = path.resolve()
  if real == _BASE:
    return []
  if real.parent == _MODELS:
    return [_Layer(name, {"model_name": real.stem}, written_by_user=False)]
  if real in below:
    raise ConfigError(f"base_config in {path} leads back to itself.")
  values, layers = _read(path), []
  if base := values.pop("base_config", None):
    near = path.parent / str(base)
    layers = _source_layers(near if near.exists() else str(base), (*below, real))
  return [*layers, _Layer(name, values, path.name == _BASE.name, written_by_user=not real.is_relative_to(_HERE))]


def _bundled(path: Path) -> Path | None:
  """The file of this package that a relative or foreign path names: base.yml, maxtext/configs/models/NAME.yml."""
  parts = path.parts
  folders = [i for i, part in enumerate(parts[:-1]) if part in ("configs", "config")]
  if len(parts) > 1 and not folders:
    return None
  found = _HERE.joinpath(*parts[folders[-1] + 1 if folders else 0 :]).with_suffix(".yml")
  return found if found.exists() and ".." not in parts else None


def _merge_layers(layers: Collection[_Layer]) -> dict[str, Any]:
  """Merges layers: the last value of each key wins, and logical axis rules are merged by axis."""
  merged: dict[str, Any] = {}
  override = [layer.values[_OVERRIDE] for layer in layers if _OVERRIDE in layer.values]
  whole = bool(override) and _is_true(override[-1])
  for layer in layers:
    table = None if whole or layer.is_whole_table else merged.get(_TABLE)
    merged |= layer.values
    if table is not None and _TABLE in layer.values:
      merged[_TABLE] = _with_rules(table, layer.values[_TABLE])
  return merged


def _with_rules(table: Any, rules: Any) -> Any:
  """Replaces or adds logical axis rules. A malformed table is returned as it is; `Rules.parse` reports it."""
  if not isinstance(rules, list | tuple) or not all(isinstance(rule, list | tuple) and rule for rule in rules):
    return rules
  names = [name for name, *_ in table]
  changed = [[rule for rule in rules if rule[0] == name] or [old] for name, old in zip(names, table, strict=True)]
  return [*(rule for several in changed for rule in several), *(rule for rule in rules if rule[0] not in names)]


def _is_true(value: Any) -> bool:
  try:
    return TypeAdapter(bool).validate_python(value)
  except ValidationError:  # validation of the key reports it
    return False


_TABLE, _OVERRIDE = "logical_axis_rules", "override_logical_axis_rules"


def _environment_layer(environment: Mapping[str, str]) -> dict[str, Any]:
  words = []
  for variable, text in environment.items():
    if variable.startswith("M_"):
      key = variable.removeprefix("M_").lower()
      if key not in MaxTextConfig.model_fields:
        instead = renamed_hint(key, MaxTextConfig.model_fields)
        if not instead:  # a variable of another program
          continue
        raise ConfigError(f"{variable} in the environment names no key.{instead}")
      words.append(f"{key}={text}")
  return parse_assignments(words)


def _model_layer(name: str) -> dict[str, Any]:
  if name not in model_names():
    raise ConfigError(f"model_name={name} is not a known model.{did_you_mean(str(name), model_names())}")
  return _read(_MODELS / f"{name}.yml")


def _student_layers(given: Collection[_Layer]) -> list[_Layer]:
  """What the last layer with `student_overrides` says of the student."""
  found = [layer.values["student_overrides"] for layer in given if "student_overrides" in layer.values]
  if not found or not isinstance(found[-1], Mapping):  # validation of the key reports it
    return []
  return [_Layer("student_overrides", {str(key): value for key, value in found[-1].items()})]


def _with_group(layer: _Layer) -> _Layer:
  """The layer with the keys of its group `rl` as keys of their own, of which none may have another value."""
  group = layer.values.get("rl")
  if not isinstance(group, Mapping):  # validation of the key reports it
    return layer
  for key in group.keys() & layer.values.keys():
    if str(group[key]) != str(layer.values[key]):
      raise ConfigError(f"rl: {key} contradicts {key} beside it: leave one of them out.")
  return replace(layer, values={**{str(key): value for key, value in group.items()}, **layer.values})


def _method_layers(values: Mapping[str, Any]) -> list[_Layer]:
  paths = [path for key, path in _METHODS.items() if _is_true(values.get(key, False))]
  keys = [(path.name, {key: value for key, value in _read(path).items() if key != "base_config"}) for path in paths]
  return [_Layer(name, values, written_by_user=False) for name, values in keys]


def _rules_layer(rules: Any) -> dict[str, Any]:
  """The layer that `custom_mesh_and_rule` names. An unknown name gives {}; validation of the key reports it."""
  text = str(plain_value(rules))
  path = Path(text) if text.endswith((".yml", ".yaml")) else _RULES / f"{text}.yml"
  if path.parent == _RULES and not path.exists():
    return {}
  layer = _read(path)
  for key in layer:
    if key not in RULE_KEYS:
      raise ConfigError(f"{path}: '{key}' is none of {', '.join(RULE_KEYS)}.{did_you_mean(key, RULE_KEYS)}")
  return layer


class _StrictLoader(yaml.SafeLoader):
  """A YAML loader that rejects duplicate keys."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    if twice := [key for key in keys if keys.count(key) > 1]:
      raise yaml.MarkedYAMLError(problem=f"'{twice[0]}' stands twice", problem_mark=node.start_mark)
    return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
  try:
    content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader) or {}
  except OSError as error:
    raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
  except (yaml.YAMLError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}.") from None
  if not isinstance(content, Mapping):
    raise ConfigError(f"{path} must hold 'key: value' lines at its top level.")
  return {str(key): value for key, value in content.items()}


def _yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
  """The problem and its line number, without the line's text, which may hold a secret."""
  if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
    return f"{error.problem or error.context}, line {error.problem_mark.line + 1}"
  return error.reason if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())


def _check_known_keys(values: Mapping[str, Any]) -> None:
  known = MaxTextConfig.model_fields
  if "base_config" in values:
    raise ConfigError(f"base_config={values['base_config']} belongs in a YAML file; name the file itself instead.")
  for key in values:
    if key not in known:
      raise ConfigError(f"'{key}' is not a key.{renamed_hint(key, known)}")


def _build(values: Mapping[str, Any]) -> MaxTextConfig:
  try:
    return MaxTextConfig(**values)
  except ValidationError as error:
    raise ConfigError(_format_validation_error(error)) from None


def _check_model_overrides(config: MaxTextConfig, named: MaxTextConfig, keys: Iterable[str]) -> None:
  for key in sorted(keys):
    value, expected = getattr(config, key), getattr(named, key)
    if value != expected:
      raise ConfigError(
        f"{key}={value} contradicts model_name={config.model_name}, which has {key}={expected}. "
        f"Add override_model_config=true to change the model."
      )


def _format_validation_error(error: ValidationError) -> str:
  """One line per wrong key: the key, the value, what was expected."""
  problems: dict[str, str] = {}
  for e in error.errors():
    key = str(e["loc"][0])
    value, wanted = redact_value(key, e["input"]), e["msg"].lower()
    if e["type"] == "list_type" and isinstance(e["input"], str):
      wanted += f", such as [{value}]"
    problems[key] = f"{problems[key]}, or {wanted}" if key in problems else f"{key}={value}: {wanted}"
  return "\n".join(f"{problem}." for problem in problems.values())
