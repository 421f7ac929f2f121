"""The loss of a trained model on evaluation data, outside a training run: `maxtext.evaluate`."""

import os
from typing import TYPE_CHECKING, Any, Unpack

import jax
import numpy as np

from maxtext.checkpoint.inspect import evaluated_keys, read_metadata
from maxtext.checkpoint.location import folder_of, locate, steps_in
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import DatasetType
from maxtext.data.batch import BatchSource
from maxtext.data.iterable import Batches
from maxtext.distributed.multihost import check_joined, join
from maxtext.mesh.devices import make_mesh
from maxtext.training.arguments import check_arguments
from maxtext.training.compilation_cache import compilation_cache
from maxtext.training.objectives.base import Objective
from maxtext.training.program import Program
from maxtext.training.state import TrainState
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_keys, resolve_source

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys


def evaluate(
  run: str | os.PathLike[str] | MaxTextConfig,
  *,
  objective: Objective | None = None,
  data: BatchSource | Batches | None = None,
  strict: bool = False,
  **keys: "Unpack[ConfigKeys]",
) -> dict[str, float]:
  """The metrics of a trained model over its evaluation data, as the evaluations of a run measure them.

  It runs on all devices that JAX finds, and writes nothing.

  Args:
    run: a run folder, its checkpoints, one step, parameters, or a Hugging Face folder of safetensors; or a
      configuration, which means the latest checkpoint of its `run_name`, or else its `load_parameters_path`.
    objective: the loss; None is the configured one.
    data: evaluation batches for the objective; None reads the configured evaluation data.
    strict: makes keys without an effect an error instead of a warning.
    **keys: configuration keys that win over those of the run, such as `grain_eval_files=...` or `eval_steps=10`. The
      run's own keys hold but for those of the machine that trained it. A configuration takes none.

  Returns:
    `loss`, per target token or per pair, the objective's other metrics, and `tokens`, the number of targets.

  Raises:
    ConfigError: (a ValueError) there is no checkpoint, or the keys or the evaluation data are invalid.
    RunError: the checkpoint is damaged, or the evaluation data has no batch.
  """
  # With the key that evaluates, those of evaluation have an effect and are checked, whatever the run did.
  evaluates = {"eval_interval": 1} if data is None else {}
  config, path = _config_and_path(run, dict(keys), evaluates, strict)
  check_arguments(config, objective, None, data)
  if config.use_dpo:  # the reference model is read again, and nothing is written
    if path == config.load_parameters_path:
      raise ConfigError(
        f"use_dpo=true: {path} is both the model to evaluate and its reference: give the folder of a run."
      )
    config = config.model_copy(update={"precompute_ref_log_probs": False})
  with compilation_cache(config):
    join(config)
    check_joined(config)
    at_rest = bool(config.weight_format) and not config.lora_rank  # with adapters they always are
    program = Program.of(config, make_mesh(config), objective, None, data, serving=at_rest)
    own = path != config.load_parameters_path and "lora_input_adapters_path" not in keys  # adapters that it trained
    adapters = "" if own else config.lora_input_adapters_path
    found = program.evaluate(_load_state(program, path, adapters), program.init_frozen(measured=True))
  assert found is not None, "only a signal stops an evaluation, and none is asked for"
  return found


def _config_and_path(
  run: str | os.PathLike[str] | MaxTextConfig, given: dict[str, Any], evaluates: dict[str, Any], strict: bool
) -> tuple[MaxTextConfig, str]:
  """The configuration, and the path of the parameters."""
  if isinstance(run, MaxTextConfig):
    if given:
      raise ConfigError(f"{', '.join(given)}: a configuration is complete; give these keys to load_config.")
    if evaluates and run.eval_steps == -1 and run.dataset_type == DatasetType.SYNTHETIC:
      raise ConfigError("eval_steps=-1: an evaluation of synthetic data never ends; set eval_steps.")
    folder = folder_of(run.base_output_directory, run.run_name) if run.run_name else None
    if folder is not None and steps_in(folder):
      return run, str(folder)
    if run.load_parameters_path:
      return run, run.load_parameters_path
    raise ConfigError(
      f"run_name={run.run_name or None} has no checkpoint{f' in {folder}' if folder else ''}, and load_parameters_path "
      f"is not set: there is nothing to evaluate."
    )
  path = os.fspath(run)
  if is_hugging_face(path):
    config = resolve_source(path, evaluates | given, strict).config
    return config, config.load_parameters_path
  own = evaluates | evaluated_keys(path, given)
  return resolve_keys(own, strict, recorded=own.keys() - given.keys()).config, path


def _load_state(program: Program, path: str, adapters: str) -> TrainState:
  """A state of those parameters, without an optimizer's."""
  hugging_face = is_hugging_face(path)
  layout = "safetensors" if hugging_face else "orbax"
  config = program.config.model_copy(
    update={"load_parameters_path": path, "source_checkpoint_layout": layout, "lora_input_adapters_path": adapters}
  )
  found = load_weights(config, program.model, program.state.params | program.state.buffers)
  if not program.state.params.keys() | program.state.buffers.keys() <= found.keys():
    initial = program.init()  # what layers keep beside weights is in no Hugging Face file
    found = initial.params | initial.buffers | found
  params, buffers = ({name: found[name] for name in part} for part in (program.state.params, program.state.buffers))
  step = np.int32(0 if hugging_face else read_metadata(locate(path)).step)
  return TrainState(jax.device_put(step, program.state.step.sharding), params, buffers, None)
