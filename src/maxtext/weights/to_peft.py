"""To PEFT: the LoRA adapters of a run as a folder of `adapter_config.json` and `adapter_model.safetensors`."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from maxtext.checkpoint.metadata import CorruptCheckpointError
from maxtext.checkpoint.stream import StreamReader
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.layers.dora import magnitude_path, norm
from maxtext.layers.lora import LoraMatmul, adapted_module, adapter_paths, is_adapter
from maxtext.models.execution.adapters import adapters
from maxtext.models.model import Model
from maxtext.storage.atomic import atomic_folder
from maxtext.weights.base import parameter_reader
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.peft_layout import CONFIG, PARTS, PREFIX, TENSORS, linear_layouts, of_outputs
from maxtext.weights.plain_weights import CheckpointWeights
from maxtext.weights.tensor_files import make_header, write_file
from maxtext.weights.tensor_layout import ParameterSlice, TensorLayout
from maxtext.weights.weights_at_rest import plain_model, rounding_at_rest

_LOG = logging.getLogger(__name__)
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def write_adapters(config: MaxTextConfig, model: Model, source: epath.Path, target: Path) -> Path:
  """Writes the adapters of a run's checkpoint as a PEFT folder, and returns it.

  Raises:
    ConfigError: the checkpoint has no adapters, or PEFT cannot express one of them.
  """
  lora = adapters(config)
  if lora is None:
    raise ConfigError(f"{source} was trained without LoRA (lora_rank=0): write its weights with maxtext convert to-hf.")
  if target.expanduser().exists():
    raise ConfigError(f"{target} is there already; name a folder that is not.")
  writer = _PeftWriter(config, model, source, lora)
  try:
    tensors = writer.tensors()
  except CorruptCheckpointError as damage:
    raise RunError(f"{source} is damaged: {damage}.") from None
  header = make_header({name: (array.shape, array.dtype) for name, array in tensors.items()})
  with atomic_folder(target.expanduser()) as folder:
    write_file(folder / TENSORS, [header, *(np.ascontiguousarray(a).view(np.uint8).data for a in tensors.values())])
    write_file(folder / CONFIG, [(json.dumps(writer.settings(), indent=2) + "\n").encode()])
  if mistaken := writer.taken_for_experts():
    _LOG.warning(
      f"maxtext: PEFT may take {mistaken[0]} for weights of routed experts, and leave it out with a warning: "
      "docs/lora.md says where. lora_input_adapters_path reads it."
    )
  return target


class _PeftWriter:
  """Adapters by the modules of PEFT: modules that are one tensor in Hugging Face's files, as queries and keys may be,
  become one of their ranks together."""

  def __init__(self, config: MaxTextConfig, model: Model, source: epath.Path, lora: LoraMatmul) -> None:
    self._config, self._model, self._lora = config, model, lora
    # PEFT has magnitudes, and a run their differences to those of its weights.
    self._reader = parameter_reader(config, model, source) if config.use_dora else StreamReader(source)
    self._structs = {path: model.struct(path) for path in (*model.params, *model.buffers) if is_adapter(path)}
    self._reader.check_shapes(self._structs)
    rounding = rounding_at_rest(self._reader)
    self._weights = CheckpointWeights(plain_model(model), self._reader, rounding) if config.use_dora else None
    self._layouts = linear_layouts(config, model)
    self._adapted = {
      name.removesuffix(".weight"): layout for name, layout in self._layouts.items() if self._count(layout)
    }
    self._refuse_lost()

  def tensors(self) -> dict[str, np.ndarray]:
    """All of them, by their names; raises `CorruptCheckpointError`."""
    found = {
      f"{PREFIX}{module}.{PARTS[part]}": tensor
      for module, layout in self._adapted.items()
      for part, tensor in self._read_module(layout).items()
    }
    self._reader.check(self._reader.take_sums())
    return found

  def settings(self) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    c, lora = self._config, self._lora
    ranks = {module: lora.rank * n for module, layout in self._adapted.items() if (n := self._count(layout)) > 1}
    path = c.load_parameters_path
    return {
      "peft_type": "LORA", "task_type": "CAUSAL_LM",
      "base_model_name_or_path": path if path and is_hugging_face(path) else None,
      "r": lora.rank, "lora_alpha": c.lora_alpha, "use_rslora": c.use_rslora, "use_dora": c.use_dora,
      "target_modules": _targets(list(self._adapted), self._layouts), "rank_pattern": ranks,
      "alpha_pattern": {m: lora.scale * (rank**0.5 if c.use_rslora else rank) for m, rank in ranks.items()},
      "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
      "fan_in_fan_out": any(not layout.weight.transposed for layout in self._adapted.values()),
    }  # fmt: skip

  def taken_for_experts(self) -> list[str]:
    """Modules whose names PEFT 0.21 takes, in some model types, for those of the routed experts beside them."""
    has_experts = any("expert" in axes for axes in self._model.logical_axes.values())
    return [module for module in self._adapted if has_experts and module.endswith(_NAMES_OF_EXPERTS)]

  def _read_module(self, layout: TensorLayout) -> dict[str, np.ndarray]:
    rank, downs, ups = self._lora.rank, list[np.ndarray](), list[np.ndarray]()
    outputs = of_outputs(self._model, layout, rank * self._count(layout))
    for slice_, out in zip(layout.slices, outputs.slices, strict=True):
      up = np.zeros(out.shape, np.float32)
      if self._is_adapted(slice_):
        a, b = (self._read(path, slice_) for path in adapter_paths(_module(slice_)))
        up[rank * len(downs) : rank * (len(downs) + 1)] = b
        downs.append(a.reshape(-1, rank).T)
      ups.append(up)
    found = {"A": np.concatenate(downs), "B": outputs.join(ups)}
    if self._config.use_dora:
      magnitudes = [self._magnitude(slice_)[None] for slice_ in layout.slices]
      found["magnitude"] = of_outputs(self._model, layout, 1).join(magnitudes)[:, 0]
    return found

  def _magnitude(self, slice_: ParameterSlice) -> np.ndarray:
    assert self._weights is not None, "only DoRA has magnitudes"
    of_weight = norm(self._weights.piece(slice_.path, slice_.index), range(self._model.contracted[slice_.path][1]))
    return of_weight + self._read(magnitude_path(_module(slice_)), slice_) if self._is_adapted(slice_) else of_weight

  def _read(self, path: str, slice_: ParameterSlice) -> np.ndarray:
    return self._reader.read(path, slice_.index, len(self._model.struct(path).shape))

  def _is_adapted(self, slice_: ParameterSlice) -> bool:
    return adapter_paths(_module(slice_))[0] in self._structs

  def _count(self, layout: TensorLayout) -> int:
    """How many of the parameters that a tensor holds have adapters."""
    return sum(map(self._is_adapted, layout.slices))

  def _refuse_lost(self) -> None:
    there = {_module(slice_) for layout in self._layouts.values() for slice_ in layout.slices}
    if lost := {adapted_module(path) for path in self._structs} - there:
      raise ConfigError(
        f"PEFT cannot express the adapters of {', '.join(sorted(lost))}, whose weights of several experts are stacked "
        "or are no linear layers there, so nothing is written: write merged weights with maxtext convert to-hf, or "
        "train with lora_targets that leave them out."
      )


def _module(slice_: ParameterSlice) -> str:
  return slice_.path.removesuffix("/weight")


def _targets(adapted: list[str], layouts: Mapping[str, TensorLayout]) -> list[str]:
  """Names of modules for PEFT: their last parts where these mean no other module, else whole."""
  last = {module.rpartition(".")[2] for module in adapted}
  meant = {name.removesuffix(".weight") for name in layouts if name.split(".")[-2] in last}
  return sorted(last if meant == set(adapted) else adapted)
