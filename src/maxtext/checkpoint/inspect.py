"""A checkpoint described for a person, from its metadata alone: no JAX, no device, no array is read."""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from maxtext.checkpoint.best import best_step, scores_in
from maxtext.checkpoint.location import FOLDER, locate, steps_in
from maxtext.checkpoint.metadata import Base, CheckpointMetadata, CorruptCheckpointError
from maxtext.configs import types
from maxtext.configs.errors import RunError
from maxtext.configs.loader import RULE_KEYS, default_layer_keys
from maxtext.configs.secrets import SECRET_KEYS
from maxtext.configs.types import DerivedValues
from maxtext.configs.values import default_of, plain_value


def describe(path: str) -> str:
  """Step, schema and every array with its shape, dtype and size."""
  folder = locate(path)
  metadata = read_metadata(folder)
  layers = "each layer apart" if metadata.stacked is None else f"layers stacked on dimension {metadata.stacked}"
  total = sum(array.bytes for array in metadata.arrays.values())
  width = max(map(len, metadata.arrays))
  return "\n".join(
    [
      f"{folder}",
      f"step {metadata.step}, schema {metadata.schema}, {layers}",
      f"{len(metadata.arrays)} arrays, {total:,} bytes",
      *(
        f"  {name:<{width}}  {array.dtype}{list(array.shape)}  {array.bytes:,}"
        for name, array in sorted(metadata.arrays.items())
      ),
      *_describe_base(metadata.base),
      *_describe_steps(folder.parent),
    ]
  )


def _describe_base(base: Base | None) -> list[str]:
  """Where the frozen weights of a run of adapters are, if they are elsewhere."""
  if base is None:
    return []
  size = sum(array.bytes for array in base.arrays.values())
  return [f"base: {base.path}", f"  {len(base.arrays)} arrays, {size:,} bytes, fingerprint {base.fingerprint}"]


def _describe_steps(folder: epath.Path) -> list[str]:
  """The steps of a run with what their evaluations found, if there were any."""
  scores = scores_in(folder) if folder.name == FOLDER else {}
  best = best_step(scores)
  texts = {
    step: f" ({score.criterion.metric.replace('_', ' ')} {score.value:.4f}{', the best' if step == best else ''})"
    for step, score in scores.items()
  }
  steps = ", ".join(f"{step}{texts.get(step, '')}" for step in steps_in(folder)) if scores else ""
  return [f"steps: {steps}"] if steps else []


def chosen_keys(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """The keys that make the run's configuration again, but for those that are given."""
  return _below(path, given, chosen(_recorded(path)))


def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
  """Those of a run's values that are not at their default, or that its model would set to another.

  The name of its rules is not among them, since the rules are: a run outlives their file. Neither are
  `student_overrides` and `rl`, whose values are, nor secrets, which are not written down, nor what follows from other
  keys.
  """
  defaults = {key: json.loads(json.dumps(plain_value(default_of(key)), default=str)) for key in values}
  below = default_layer_keys(values)
  left_out = {"custom_mesh_and_rule", "student_overrides", "rl", *SECRET_KEYS, *DerivedValues.model_fields}
  kept = {key for key, value in values.items() if value != defaults[key] or key in below}
  chosen = {key: value for key, value in values.items() if key in kept - left_out}
  return chosen | ({"override_logical_axis_rules": True} if values.get("custom_mesh_and_rule") else {})


def served_keys(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """The keys with which a trained run answers: those given, and its own but for the machine that it was trained on."""
  recorded = _recorded(path)
  own = {key: value for key, value in chosen(recorded).items() if not is_of_the_training(key)}
  if recorded.get("use_grpo"):  # they are of rollouts, and not of what is served
    own = {key: value for key, value in own.items() if not key.startswith("decode_sampling_")}
  return _below(path, given, own | {"load_parameters_path": path})


def starting_keys(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """The keys with which another run starts from a trained one: the model, its parameters and its tokenizer."""
  from maxtext.checkpoint.tokenizer import find_tokenizer, kind_of

  recorded = chosen(_recorded(path))
  own = {key: value for key, value in recorded.items() if key in OF_THE_MODEL} | {"load_parameters_path": path}
  if (folder := find_tokenizer(path)) is not None and (kind := kind_of(folder)) is not None:
    ends = {key: recorded[key] for key in ("add_bos", "add_eos") if key in recorded and "tokenizer_path" not in given}
    own |= {"tokenizer_path": str(folder), "tokenizer_type": kind.value} | ends
  return own | dict(given)


def evaluated_keys(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """The keys with which a trained run is evaluated: those given, and its own but for the machine that trained it.
  Its data, with the tokenizer that reads it, and the parameters that it started from stay those of the training."""
  hidden = {*(RULE_KEYS if "custom_mesh_and_rule" in given else ())}
  own = {
    key: value
    for key, value in chosen(_recorded(path)).items()
    if key not in hidden and (key in STARTED_FROM or not is_of_the_training(key))
  }
  return own | dict(given)


def _recorded(path: str) -> dict[str, Any]:
  return {key: entry["value"] for key, entry in read_metadata(locate(path)).config.items()}


def _below(path: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
  """The run's own keys hide neither rules that are given by name nor the tokenizer that is kept with it."""
  from maxtext.checkpoint.tokenizer import KEPT_KEYS, find_tokenizer  # brings NumPy, which a description needs not

  hidden = {*(RULE_KEYS if "custom_mesh_and_rule" in given else ()), *(KEPT_KEYS if find_tokenizer(path) else ())}
  return {key: value for key, value in own.items() if key not in hidden} | dict(given)


def is_of_the_training(key: str) -> bool:
  """Whether a key says how a run was trained, on which machine, and nothing of its model."""
  return key.startswith(_OF_THE_TRAINING) or key in _OF_RL


OF_THE_MODEL = frozenset(
  key
  for section in (
    types.ModelArchitecture, types.Engram, types.MTP, types.Logits, types.Attention, types.MlaAttention, types.MoBa,
    types.AttentionIndexer, types.Llama4Attention, types.MoEGeneral, types.DeepSeekMoE, types.Qwen3Next,
    types.ManifoldConstrainedHyperConnections, types.PositionalEmbedding, types.Rope, types.YarnRope, types.DataTypes,
    types.Lora, types.WeightsAtRest,
  )
  for key in section.model_fields
) | {
  "model_name", "override_model_config", "vocab_size", "inhomogeneous_layer_cycle_interval", "weight_sparsity_n",
  "weight_sparsity_m", "weight_sparsity_update_step", "weight_sparsity_start_step",
}  # fmt: skip
STARTED_FROM = ("load_parameters_path", "load_full_state_path", "source_checkpoint_layout", "lora_input_adapters_path")

_OF_RL = {"use_grpo"}.union(
  *(section.model_fields for section in (
    types.RL, types.RLMethod, types.RLEnvironment, types.RLDataset, types.RLEvaluation, types.RLHardware, types.VLLM,
    types.Reward, types.SpecialTokens,
  ))
)  # fmt: skip
_OF_THE_TRAINING = (
  "load_", "source_checkpoint_layout", "lora_input_adapters_path", "ici_", "dcn_", "num_slices", "shard_exp_on_fsdp",
  "use_ring_of_experts",
  "context_parallel_", "pipeline_", "num_pipeline_", "num_layers_per_pipeline_stage", "hardware",
  "gradient_accumulation_steps", "student_", "teacher_", "distill_", "learn_to_init_mode", "lti_",
  "offline_data_dir",
)  # fmt: skip


def read_metadata(folder: epath.Path) -> CheckpointMetadata:
  """The metadata of a checkpoint; a corrupt one ends the command."""
  try:
    return CheckpointMetadata.read(folder)
  except CorruptCheckpointError as damage:
    raise RunError(f"{folder} is damaged: {damage}.") from None
