"""The teacher of a distillation: its configuration, its tokenizer, and the weights that a student starts with."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.checkpoint.inspect import OF_THE_MODEL, STARTED_FROM, chosen, starting_keys
from maxtext.checkpoint.tokenizer import FOLDER as TOKENIZER
from maxtext.checkpoint.tokenizer import open_data_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import DatasetType, DataTypes, Distillation, Lora, MoEKernels, Quantization
from maxtext.configs.values import plain_value
from maxtext.data.options import data_options
from maxtext.data.teacher_outputs import TEACHER_TOKENS, SavedOutputs, TeacherOutputs
from maxtext.data.tokenizers import TextTokenizer
from maxtext.layers.lora import is_adapter
from maxtext.models.model import Params
from maxtext.training.state import TrainState
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.resolve import resolve_source

if TYPE_CHECKING:
  from maxtext.training.program import Program

TEACHER = "teacher_overrides"
"""The name of the frozen model, for the objective of a distillation."""
_NAMES_A_MODEL = {"model_name", "decoder_block"}
_KERNELS = {"attention", "use_ring_of_experts", "megablox", "sparse_matmul", "shard_exp_on_fsdp"}
_OF_BOTH = {*DataTypes.model_fields, *_KERNELS}
_OF_THE_TEACHER = {
  *OF_THE_MODEL, *STARTED_FROM, *_OF_BOTH, *MoEKernels.model_fields, *Quantization.model_fields, "init_weights_seed",
}  # fmt: skip
_OF_THE_STUDENT = {
  *STARTED_FROM,
  *Distillation.model_fields,
  *Lora.model_fields,
  *Quantization.model_fields,
  "trainable_parameters_mask",
} - {key for key in Distillation.model_fields if key.startswith("distill_beta")}


def teacher_config(config: MaxTextConfig) -> MaxTextConfig:
  """The run's own keys, with `teacher_overrides`.

  The model is the one that the overrides name, or that the folder of their `load_parameters_path` holds; only where
  they say neither it is the student's, with what they change.
  """
  given, path = config.teacher_overrides, config.teacher_overrides.get("load_parameters_path", "")
  if others := given.keys() - _OF_THE_TEACHER:
    raise ConfigError(f"teacher_overrides: {min(others)} is a key of both models: write it beside teacher_overrides.")
  run = {key: plain_value(value) for key, value in config}
  shared = {
    key: value for key, value in chosen(json.loads(json.dumps(run, default=str))).items() if key not in _OF_THE_STUDENT
  }
  own: dict[str, Any] = {}
  if path or given.keys() & _NAMES_A_MODEL:
    shared = {key: value for key, value in shared.items() if key not in OF_THE_MODEL}
  try:
    if path and not given.keys() & _NAMES_A_MODEL and not is_hugging_face(path):
      own = {key: value for key, value in starting_keys(path, {}).items() if key in OF_THE_MODEL}
    keys = own | shared | {key: run[key] for key in _OF_BOTH} | given
    return resolve_source(None, keys, recorded=keys.keys() - given.keys(), environment={}).config
  except ConfigError as error:
    raise ConfigError(f"teacher_overrides: {error}") from None


def saved_outputs(config: MaxTextConfig) -> TeacherOutputs | None:
  """The outputs in `offline_data_dir`, which a run reads instead of other training data; None without that key."""
  if not config.offline_data_dir:
    return None
  found = SavedOutputs.read(config.offline_data_dir)
  if found is None:
    raise ConfigError(
      f"offline_data_dir={config.offline_data_dir} has no saved outputs: `maxtext data teacher` writes them."
    )
  seed = config.data_shuffle_seed if config.enable_data_shuffling else None
  outputs = TeacherOutputs(config.offline_data_dir, found, config.num_epoch, seed)
  outputs.check(config.vocab_size, config.max_target_length, config.distill_temperature)
  return outputs


def tokenizer_folder(config: MaxTextConfig) -> str:
  """Where a run that names no tokenizer has one from: saved outputs, or the parameters that it starts from."""
  return f"{config.offline_data_dir}/{TOKENIZER}" if config.offline_data_dir else config.load_parameters_path


def check_teacher(program: "Program") -> None:
  """Raises where the teacher has no parameters, another tokenizer than the data of its student, or not the weights that
  the student is to start with."""
  config = program.config
  if config.offline_data_dir and TEACHER_TOKENS in program.batch.extra:
    _compare(config, config, f"offline_data_dir={config.offline_data_dir}", tokenizer_folder(config))
  if TEACHER not in program.frozen:
    return
  teacher = program.frozen_config(TEACHER)
  copied_weights(config, program.model.params | program.model.buffers, program.frozen[TEACHER])
  check_parameters(teacher)
  check_tokenizers(config, teacher)


def check_parameters(teacher: MaxTextConfig) -> None:
  """Raises where a teacher has none."""
  if not teacher.load_parameters_path and not teacher.load_full_state_path:
    raise ConfigError(
      "teacher_overrides names no parameters, and a teacher that was never trained teaches nothing: add "
      "load_parameters_path, the folder of a run or of weights."
    )


def check_tokenizers(config: MaxTextConfig, teacher: MaxTextConfig) -> None:
  """Raises where the teacher has another tokenizer than the student's data, or no row for some of its tokens."""
  path = teacher.load_parameters_path or teacher.load_full_state_path
  data = _compare(config, teacher, f"teacher_overrides: the teacher in {path}", path)
  known = config.vocab_size if data is None else data.vocab_size
  if teacher.vocab_size < known:
    raise ConfigError(
      f"teacher_overrides: the teacher has vocab_size={teacher.vocab_size}, and the data may have tokens up to {known}."
    )


def _compare(config: MaxTextConfig, other: MaxTextConfig, whose: str, path: str) -> TextTokenizer | None:
  """The tokenizer of the data, if it is known; raises where another one is kept at `path`."""
  data, without = data_options(config), replace(data_options(other), kind=DatasetType.SYNTHETIC)
  with open_data_tokenizer(data, config.load_parameters_path) as ours, open_data_tokenizer(without, path) as theirs:
    if ours is not None and theirs is not None and (found := _difference(ours, theirs)):
      raise ConfigError(f"{whose} has another tokenizer than the data: {found}.")
    return ours


def start_from_teacher(program: "Program", state: TrainState, teacher: Params) -> TrainState:
  """A first state with the weights that `distill_weights_copy_map` names, and in `learn_to_init_mode` with those that
  follow from the first maps."""
  student = state.params | state.buffers
  params = _copy_weights(copied_weights(program.config, student, teacher), student, teacher)
  if program.mapped is not None:
    params |= jax.jit(program.mapped.first_weights)(params, teacher)
  return program.start_from(
    state, {name: params[name] for name in state.params}, {name: params[name] for name in state.buffers}
  )


class WeightSource(NamedTuple):
  """Where a weight of the student comes from.

  Attributes:
    path: of the other weight.
    layers: of its stacked layers, those that are taken; None for all.
  """

  path: str
  layers: tuple[int, ...] | None

  def of(self, weights: Mapping[str, jax.Array]) -> jax.Array:
    """The value, from the weights that it is among."""
    return weights[self.path] if self.layers is None else weights[self.path][jnp.array(self.layers)]


def copied_weights(
  config: MaxTextConfig, student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> dict[str, WeightSource]:
  """What `distill_weights_copy_map` says of each weight, by the student's path."""
  return weight_sources("distill_weights_copy_map", config.distill_weights_copy_map, student, teacher, "teacher")


def weight_sources(
  key: str, given: Mapping[str, Any], student: Mapping[str, Any], others: Mapping[str, Any], whose: str
) -> dict[str, WeightSource]:
  """What a key says of each weight, by the student's path. A path stands for all below it.

  Raises:
    ConfigError: a path names nothing, or the shapes differ.
  """
  found: dict[str, WeightSource] = {}
  for target, value in given.items():
    source, layers = _source(key, whose, target, value)
    below = [name for name in student if name == target or name.startswith(f"{target}/")]
    names = [name for name in below if not is_adapter(name)]
    if not names:
      raise ConfigError(f"{key}: the student has no weight '{target}'. It has {_some(student)}.")
    for name in names:
      path = source + name.removeprefix(target)
      if path not in others:
        raise ConfigError(f"{key}: the {whose} has no weight '{path}'. It has {_some(others)}.")
      size = others[path].shape[0] if others[path].shape else 0
      if layers is not None and not all(0 <= layer < size for layer in layers):
        raise ConfigError(f"{key}: '{path}' of the {whose} has {size} layers, from 0 on.")
      shape = others[path].shape if layers is None else (len(layers), *others[path].shape[1:])
      if student[name].shape != shape:
        raise ConfigError(
          f"{key}: '{name}' of the student is {list(student[name].shape)}, and '{path}' of the {whose} is "
          f"{list(shape)}."
        )
      found[name] = WeightSource(path, layers)
  return found


def _copy_weights(found: Mapping[str, WeightSource], student: Params, teacher: Params) -> Params:
  """The student's parameters, with those that are copied."""
  if not found:
    return student

  def copy(teacher: Params) -> Params:
    return {name: source.of(teacher).astype(student[name].dtype) for name, source in found.items()}

  shardings = {name: student[name].sharding for name in found}
  sources = {path: teacher[path] for path, _ in found.values()}
  return student | jax.jit(copy, out_shardings=shardings)(sources)


def _source(key: str, whose: str, target: str, value: Any) -> tuple[str, tuple[int, ...] | None]:
  if isinstance(value, str):
    return value, None
  if (
    isinstance(value, list)
    and len(value) == 2
    and isinstance(value[0], str)
    and isinstance(value[1], list)
    and value[1]
    and all(isinstance(layer, int) for layer in value[1])
  ):
    return value[0], tuple(value[1])
  raise ConfigError(f"{key}: {{{target}: {value}}} must name a path of the {whose}, or [PATH, [LAYER, ...]].")


def _some(weights: Mapping[str, Any]) -> str:
  names = sorted({"/".join(name.split("/")[:5]) for name in weights})
  return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _difference(student: TextTokenizer, teacher: TextTokenizer) -> str | None:
  """The first difference, for a person; None where there is none."""
  if student.sha256 == teacher.sha256:
    return None
  for token in range(min(student.vocab_size, teacher.vocab_size)):
    ours, theirs = student.vocabulary.name(token), teacher.vocabulary.name(token)
    if ours != theirs:
      return f"token {token} is {ours!r} there, and {theirs!r} for the teacher"
  if student.vocab_size != teacher.vocab_size:
    return f"it has {student.vocab_size:,} tokens there, and {teacher.vocab_size:,} for the teacher"
  return None
