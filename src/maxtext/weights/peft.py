"""PEFT folders of LoRA adapters (`adapter_config.json` and `adapter_model.safetensors`), in and out, through each
family's weight table."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from maxtext.checkpoint.metadata import CorruptCheckpointError
from maxtext.checkpoint.stream import StreamReader
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.safe_paths import read_json_inside, resolve_inside
from maxtext.layers.lora import adapted_module, adapter_paths, is_adapter
from maxtext.models.build import abstract_model, weight_table
from maxtext.models.execution.adapters import adapters
from maxtext.models.model import Model
from maxtext.storage.atomic import atomic_folder
from maxtext.weights.config_json import hugging_face_class, our_name
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.tensor_files import StoredTensor, make_header, read_header, write_file
from maxtext.weights.tensor_layout import ParameterSlice, TensorLayout, tensor_layouts

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY, _PREFIX = "lora_input_adapters_path", "base_model.model."
_NAME = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight")
_MAX_RANK = 65536
# Entries of adapter_config.json that change what an adapter computes, with the values that leave it as it is here.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
  "use_dora": (False,), "lora_bias": (False,), "bias": ("none",), "modules_to_save": ([],), "use_qalora": (False,),
  "target_parameters": ([],), "layer_replication": ([],), "trainable_token_indices": ([], {}),
  "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"), "alora_invocation_tokens": ([],),
}  # fmt: skip


def adapter_keys(config: MaxTextConfig) -> dict[str, Any]:
  """The keys of the adapters in the folder of `lora_input_adapters_path`, for the model of a configuration.

  Modules of other ranks than the largest are padded, and other scales are multiplied into B.

  Raises:
    ConfigError: the folder is no LoRA of this model.
  """
  found = _Adapters.read(config.lora_input_adapters_path)
  rank = max(found.ranks.values())
  alpha = found.scale * (rank**0.5 if found.rslora else rank)
  modules = {
    slice_.path.removesuffix("/weight") for _, layout in _matched(config, found).values() for slice_ in layout.slices
  }
  targets = [f"^{module}$" for module in sorted(modules)]
  return {"lora_rank": rank, "lora_alpha": alpha, "use_rslora": found.rslora, "lora_targets": targets}


def load_adapters(config: MaxTextConfig, model: Model) -> dict[str, jax.Array]:
  """The adapters of `lora_input_adapters_path` on their devices. What the folder lacks, as some layers of a module, is
  as in a new run: A is random and B zero."""
  found, lora, rng = _Adapters.read(config.lora_input_adapters_path), adapters(config), np.random.default_rng(0)
  assert lora is not None
  structs = {path: model.struct(path) for path in (*model.params, *model.buffers) if is_adapter(path)}
  arrays = {}
  for path, struct in structs.items():
    stacked, contracted = model.contracted[path]
    std = np.prod(struct.shape[stacked : stacked + contracted]) ** -0.5
    fresh = path == adapter_paths(adapted_module(path))[0]
    arrays[path] = (rng.standard_normal(struct.shape) * std if fresh else np.zeros(struct.shape)).astype(np.float32)
  for module, (name, layout) in _matched(config, found).items():
    (a, b), rank = (t.read().astype(np.float32) for t in found.tensors[module]), found.ranks[module]
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
      raise ConfigError(f"{found.file}: {name} has numbers that are not finite: take another adapter.")
    if rank > lora.rank:
      raise ConfigError(f"lora_rank={lora.rank} is below the rank {rank} of {name} in {found.file}: leave it out.")
    pieces = _of_outputs(model, layout, rank).split(b * np.float32(found.scales[module] / lora.scale))
    for slice_, piece in zip(layout.slices, pieces, strict=True):
      of_a, of_b = adapter_paths(slice_.path.removesuffix("/weight"))
      if of_a not in arrays:
        raise ConfigError(f"lora_targets leaves out {adapted_module(of_a)}, which {found.file} has: leave it out.")
      arrays[of_a][slice_.index][..., :rank] = a.T.reshape(*arrays[of_a][slice_.index].shape[:-1], rank)
      arrays[of_b][slice_.index][:rank] = piece
  return {
    path: jax.make_array_from_callback(struct.shape, struct.sharding, arrays[path].__getitem__)
    for path, struct in structs.items()
  }


def write_adapters(config: MaxTextConfig, model: Model, source: epath.Path, target: Path) -> Path:
  """Writes the adapters of a run's checkpoint as a PEFT folder, and returns it.

  Adapters of modules that are one tensor in the file, as queries and keys may be, become one of their ranks together.

  Raises:
    ConfigError: the checkpoint has no adapters, or PEFT cannot express one of them.
  """
  lora = adapters(config)
  if lora is None:
    raise ConfigError(f"{source} was trained without LoRA (lora_rank=0): write its weights with maxtext convert to-hf.")
  if target.expanduser().exists():
    raise ConfigError(f"{target} is there already; name a folder that is not.")
  reader, layouts = StreamReader(source), _linear_layouts(config, model)
  structs = {path: model.struct(path) for path in (*model.params, *model.buffers) if is_adapter(path)}
  check_shapes(reader, structs)
  lost = {adapted_module(p) for p in structs} - {
    s.path.removesuffix("/weight") for t in layouts.values() for s in t.slices
  }
  if lost:
    raise ConfigError(
      f"PEFT cannot express the adapters of {', '.join(sorted(lost))}, whose weights of several experts are stacked "
      "or are no linear layers there, so nothing is written: write merged weights with maxtext convert to-hf, or train "
      "with lora_targets that leave them out."
    )
  tensors: dict[str, np.ndarray] = {}
  ranks, alphas, adapted = {}, {}, []
  for name, layout in layouts.items():
    paths = [adapter_paths(slice_.path.removesuffix("/weight")) for slice_ in layout.slices]
    count = sum(a in structs for a, _ in paths)
    if not count:
      continue
    rank, done, downs, ups = lora.rank * count, 0, [], []
    outputs = _of_outputs(model, layout, rank)
    for (of_a, of_b), slice_, out in zip(paths, layout.slices, outputs.slices, strict=True):
      up = np.zeros(out.shape, np.float32)
      if of_a in structs:
        a, b = (reader.read(path, slice_.index, len(structs[path].shape)) for path in (of_a, of_b))
        downs.append(a.reshape(-1, lora.rank).T)
        up[done : done + lora.rank] = b
        done += lora.rank
      ups.append(up)
    module = name.removesuffix(".weight")
    adapted.append(module)
    if count > 1:
      ranks[module], alphas[module] = rank, lora.scale * (rank**0.5 if config.use_rslora else rank)
    tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.concatenate(downs)
    tensors[f"{_PREFIX}{module}.lora_B.weight"] = outputs.join(ups)
  try:
    reader.check(reader.take_sums())
  except CorruptCheckpointError as damage:
    raise RunError(f"{source} is damaged: {damage}.") from None
  content = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": _base(config), "r": lora.rank,
    "lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora, "target_modules": _targets(adapted, layouts),
    "rank_pattern": ranks, "alpha_pattern": alphas, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
    "fan_in_fan_out": any(not layouts[f"{module}.weight"].weight.transposed for module in adapted),
  }  # fmt: skip
  header = make_header({name: (array.shape, array.dtype) for name, array in tensors.items()})
  with atomic_folder(target.expanduser()) as folder:
    write_file(folder / TENSORS, [header, *(np.ascontiguousarray(a).view(np.uint8).data for a in tensors.values())])
    write_file(folder / CONFIG, [(json.dumps(content, indent=2) + "\n").encode()])
  return target


def check_shapes(reader: StreamReader, structs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
  """Raises `ConfigError` where a checkpoint lacks a parameter, or has it in another shape."""
  for path, struct in structs.items():
    for stored, (wants, has) in reader.shapes(path, struct).items():
      if wants != has:
        there = "has none" if has is None else f"has {list(has)}"
        raise ConfigError(f"{reader.folder} {there} for {stored}, and this model has {list(wants)}.")


@dataclass(frozen=True)
class _Adapters:
  """The content of a PEFT folder, by the names of its modules.

  Attributes:
    file: of the tensors.
    scale: of modules without one of their own.
    tensors: A [rank, inputs] and B [outputs, rank].
  """

  file: Path
  rslora: bool
  scale: float
  scales: Mapping[str, float]
  ranks: Mapping[str, int]
  tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]

  @staticmethod
  def read(path: str) -> "_Adapters":
    """Reads and checks all but the values of tensors; raises `ConfigError`."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
      raise ConfigError(f"{_KEY}={path} has no {CONFIG}: give the folder that PEFT's save_pretrained wrote.")
    about, file = read_json_inside(folder, CONFIG), resolve_inside(folder, TENSORS)
    _check_plain(folder / CONFIG, about)
    if not file.is_file():
      raise ConfigError(f"{_KEY}={path} has no {TENSORS}; a pickle such as adapter_model.bin is never loaded.")
    try:
      pairs = _pairs(file, read_header(file))
    except RunError as error:
      raise ConfigError(f"{_KEY}: {error} Write the adapter again.") from None
    patterns = {name: _pattern(folder / CONFIG, about, name) for name in ("rank_pattern", "alpha_pattern")}
    rank, alpha = _rank(folder / CONFIG, about.get("r")), _alpha(folder / CONFIG, about.get("lora_alpha"))
    rslora, ranks, scales = about.get("use_rslora") is True, {}, {}
    for module, (a, b) in pairs.items():
      ranks[module] = own = _rank(folder / CONFIG, _look_up(patterns["rank_pattern"], module, rank))
      if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != own or b.shape[1] != own:
        raise ConfigError(
          f"{file} has A {list(a.shape)} and B {list(b.shape)} for {module}, and {CONFIG} says rank {own}: A must be "
          f"[{own}, inputs] and B [outputs, {own}]."
        )
      own_alpha = _alpha(folder / CONFIG, _look_up(patterns["alpha_pattern"], module, alpha))
      scales[module] = own_alpha / (own**0.5 if rslora else own)
    return _Adapters(file, rslora, alpha / (rank**0.5 if rslora else rank), scales, ranks, pairs)


def _matched(config: MaxTextConfig, found: _Adapters) -> dict[str, tuple[str, TensorLayout]]:
  """For each module of the folder, the name and the layout of its weight in the model's own files."""
  everything = config.model_copy(update={"lora_rank": 1, "lora_targets": [""]})
  layouts, about = _linear_layouts(config, model := abstract_model(everything)), hugging_face_class(config)
  matched = {}
  for module, (a, b) in found.tensors.items():
    name = our_name(f"{module}.weight", about)
    layout = layouts.get(name)
    if layout is None or any(
      adapter_paths(slice_.path.removesuffix("/weight"))[0] not in model.params for slice_ in layout.slices
    ):
      raise ConfigError(
        f"{found.file} has an adapter of {module}, and decoder_block={config.decoder_block.value} has no linear layer "
        "of that name in its layers: give the adapter's own base model, or train it without that module."
      )
    shape = layout.shape if layout.weight.transposed else layout.shape[::-1]
    if (b.shape[0], a.shape[1]) != shape:
      raise ConfigError(
        f"{found.file} has A {list(a.shape)} and B {list(b.shape)} for {module}, whose weight is {list(shape)} in this "
        "model: give the adapter's own base model."
      )
    matched[module] = name, layout
  return matched


def _linear_layouts(config: MaxTextConfig, model: Model) -> dict[str, TensorLayout]:
  """The tensors that are the weight of one linear layer each."""
  return {
    name: layout
    for name, layout in tensor_layouts(model, weight_table(config, model.spec)).items()
    if name.endswith(".weight")
    and "{expert}" not in layout.weight.name
    and all(_is_matrix(model, s) for s in layout.slices)
  }


def _is_matrix(model: Model, slice_: ParameterSlice) -> bool:
  stacked, contracted = model.contracted[slice_.path]
  return slice_.path.endswith("/weight") and contracted > 0 and stacked == len(slice_.index) and len(slice_.rows) == 1


def _of_outputs(model: Model, layout: TensorLayout, rank: int) -> TensorLayout:
  """The layout of B [outputs, rank] beside a weight: the weight's, with the rank in place of the inputs."""
  slices = [replace(s, shape=(rank, *s.shape[model.contracted[s.path][1] :]), rows=(rank,)) for s in layout.slices]
  return TensorLayout(replace(layout.weight, transposed=True), layout.blocks, slices)


def _targets(adapted: list[str], layouts: Mapping[str, TensorLayout]) -> list[str]:
  """Names of modules for PEFT: their last parts where these mean no other module, else whole."""
  last = {module.rpartition(".")[2] for module in adapted}
  meant = {name.removesuffix(".weight") for name in layouts if name.split(".")[-2] in last}
  return sorted(last if meant == set(adapted) else adapted)


def _base(config: MaxTextConfig) -> str | None:
  path = config.load_parameters_path
  return path if path and is_hugging_face(path) else None


def _check_plain(file: Path, about: Mapping[str, Any]) -> None:
  kind = about.get("peft_type")
  if kind != "LORA":
    raise ConfigError(f"{file} has peft_type={str(kind)[:80]}, and only LORA is read here.")
  for name, plain in _PLAIN.items():
    if (value := about.get(name)) is not None and not any(
      value == other and type(value) is type(other) for other in plain
    ):
      raise ConfigError(
        f"{file} has {name}={str(value)[:80]}, and only adapters of linear layers are read here, without it: merge it "
        "with PEFT (merge_and_unload), and convert the merged folder."
      )


def _pairs(file: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
  parts: dict[str, dict[str, StoredTensor]] = {}
  for name, tensor in tensors.items():
    match = _NAME.fullmatch(name)
    if match is None or not (tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16"):
      raise ConfigError(f"{file} has {name[:200]} of {tensor.dtype}, which is neither A nor B of a linear layer.")
    if match[2] in parts.setdefault(match[1], {}):
      raise ConfigError(f"{file} has two tensors for {name[:200]}.")
    parts[match[1]][match[2]] = tensor
  if half := sorted(module for module, both in parts.items() if len(both) == 1):
    missing = "B" if "A" in parts[half[0]] else "A"
    raise ConfigError(f"{file} has no {_PREFIX}{half[0]}.lora_{missing}.weight: write the adapter again.")
  if not parts:
    raise ConfigError(f"{file} has no adapters.")
  return {module: (both["A"], both["B"]) for module, both in parts.items()}


def _rank(file: Path, value: Any) -> int:
  if type(value) is not int or not 0 < value <= _MAX_RANK:
    raise ConfigError(f"{file} has r={str(value)[:80]}: it must be a whole number from 1 to {_MAX_RANK}.")
  return value


def _alpha(file: Path, value: Any) -> float:
  if type(value) not in (int, float) or not 0 < value <= 1e9:
    raise ConfigError(f"{file} has lora_alpha={str(value)[:80]}: it must be a number above 0.")
  return float(value)


def _pattern(file: Path, about: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Entries of single modules, whose names PEFT takes for patterns."""
  entries = about.get(name) or {}
  if not isinstance(entries, dict) or not all(re.fullmatch(r"\^?[\w.]+", key) for key in entries):
    raise ConfigError(f"{file} has {name}={str(entries)[:80]}: it must be a table of names of modules.")
  return {key.removeprefix("^"): value for key, value in entries.items()}


def _look_up(entries: Mapping[str, Any], module: str, otherwise: Any) -> Any:
  return next((value for key, value in entries.items() if f".{module}".endswith(f".{key}")), otherwise)
