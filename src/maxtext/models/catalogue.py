"""The catalogue of named models, from their configurations alone. No array is allocated."""

import dataclasses
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.configs.loader import canonical_model_name, load_config, model_names
from maxtext.models.build import abstract_model, weight_table
from maxtext.models.flops import active_share
from maxtext.models.spec import DecoderSpec, Group, TowerSpec, towers_of
from maxtext.models.weight_table import find


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the catalogue.

  Attributes:
    parameters: number of all parameters; `active_parameters`: number of those that one token uses.
    context: maximum number of positions.
    converts: whether every weight has a name in Hugging Face files.
    same_as: a model with identical keys that this name is an alias of; empty if there is none.
  """

  name: str
  family: str
  parameters: int
  active_parameters: int
  context: int
  converts: bool
  same_as: str


def catalogue() -> list[Entry]:
  """The entries of all named models."""
  return [entry(name) for name in model_names()]


def entry(name: str) -> Entry:
  """The entry of one named model."""
  config = _configuration(name)
  model = abstract_model(config)
  table = weight_table(config, model.spec)
  return Entry(
    name,
    config.decoder_block.value,
    model.size,
    sum(int(model.struct(name).size * active_share(model, name)) for name in model.weight_names),
    config.trainable_position_size if config.trainable_position_size > 0 else config.max_position_embeddings,
    all(find(table, path) for path in model.weight_names),
    canonical_model_name(name),
  )


def picture(name: str) -> str:
  """The layers of a named model, recipe or configuration file, from tokens to logits, as text."""
  config = _configuration(name)
  model, about = abstract_model(config), entry(name)
  active = "" if about.active_parameters == about.parameters else f", {about.active_parameters:,} for each token"
  lines = [f"{name} ({about.family}): {about.parameters:,} parameters{active}, {about.context:,} positions"]
  lines += [f"the same as {about.same_as}, under another name"] if about.same_as else []
  return "\n".join([*lines, "", *_layers(model.spec)])


def _configuration(name: str) -> MaxTextConfig:
  """A model's configuration gets synthetic data; a recipe or file has its own data keys."""
  return load_config(name, dataset_type="synthetic") if name in model_names() else load_config(name)


def _layers(spec: DecoderSpec) -> list[str]:
  scale = "" if spec.embedding_scale == 1.0 else f", times {spec.embedding_scale:g}"
  positions = "" if spec.learned_positions is None else f", plus {spec.learned_positions} learned positions"
  lines = [line for tower in towers_of(spec) for line in _tower(tower, spec.width)]
  lines += [f"embedding   {spec.vocab} x {spec.width}{scale}{positions}"]
  first = 0
  for group in spec.groups:
    lines += _group(group, first)
    first += group.repeats * len(group.cycle)
  cap = "" if spec.logit_cap is None else f", capped at {spec.logit_cap:g}"
  head = "the embedding's table" if spec.tied else f"{spec.width} x {spec.vocab}"
  return [*lines, f"final norm  {_describe(spec.final_norm)}", f"head        {head}{cap}"]


def _tower(tower: TowerSpec, width: int) -> list[str]:
  lines, first = [f"tower       {tower.name}, {tower.width} wide, from {_describe(tower.front_end)}"], 0
  for group in tower.groups:
    lines += _group(group, first)
    first += group.repeats * len(group.cycle)
  return [*lines, f"projector   {_describe(tower.projector)} to {width}", ""]


def _group(group: Group, first: int) -> list[str]:
  last = first + group.repeats * len(group.cycle) - 1
  lines = [f"layers {first}..{last}" + ("" if group.repeats == 1 else f", {group.repeats} rounds of")]
  for block, same in groupby(group.cycle):
    count = len(list(same))
    lines.append(f"  {count} x")
    lines += [f"    {field.name:<24} {_describe(getattr(block, field.name))}" for field in _changed_fields(block)]
  return lines


def _describe(part: Any) -> str:
  """A part of a spec as text: its class, and the fields that are not at their defaults."""
  if not dataclasses.is_dataclass(part):
    return f"{part:g}" if isinstance(part, float) else str(part)
  fields = (f"{f.name}={_describe(getattr(part, f.name))}" for f in _changed_fields(part))
  return f"{type(part).__name__}({', '.join(fields)})"


def _changed_fields(part: Any) -> Iterable[dataclasses.Field]:
  return (f for f in dataclasses.fields(part) if getattr(part, f.name) != f.default)
