"""From PEFT: a folder of LoRA adapters (`adapter_config.json` and `adapter_model.safetensors`), through each family's
weight table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.safe_paths import read_json_inside, resolve_inside
from maxtext.layers.dora import magnitude_path, norm
from maxtext.layers.lora import adapted_module, adapter_paths, is_adapter
from maxtext.layers.quantized_weight import QuantizedFormat, WeightRounding, array_paths
from maxtext.models.build import abstract_model
from maxtext.models.execution.adapters import adapters
from maxtext.models.model import Model
from maxtext.weights.config_json import hugging_face_class, our_name
from maxtext.weights.peft_layout import CONFIG, PARTS, PREFIX, TENSORS, linear_layouts, of_outputs
from maxtext.weights.tensor_files import StoredTensor, read_header
from maxtext.weights.tensor_layout import TensorLayout
from maxtext.weights.weights_at_rest import plain_model

_KEY = "lora_input_adapters_path"
_NAME = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_(A|B|magnitude_vector)(?:\.default)?(?:\.weight)?")
_MAX_RANK = 65536
# Entries of adapter_config.json that change what an adapter computes, with the values that leave it as it is here.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
  "use_dora": (False, True), "lora_bias": (False,), "bias": ("none",), "modules_to_save": ([],), "use_qalora": (False,),
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
    slice_.path.removesuffix("/weight")
    for _, layout in _Target.of(config).match(found).values()
    for slice_ in layout.slices
  }
  targets = [f"^{module}$" for module in sorted(modules)]
  return {
    "lora_rank": rank, "lora_alpha": alpha, "use_rslora": found.rslora, "use_dora": found.dora, "lora_targets": targets,
  }  # fmt: skip


def load_adapters(config: MaxTextConfig, model: Model, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """The adapters of `lora_input_adapters_path` on their devices, beside the weights of their base. What the folder
  lacks, as some layers of a module, is as in a new run: A is random, and B zero."""
  found = _Adapters.read(config.lora_input_adapters_path)
  structs = {path: model.struct(path) for path in (*model.params, *model.buffers) if is_adapter(path)}
  arrays = _new_adapters(model, structs)
  plain, format_ = plain_model(model), model.execution.weight_format
  for module, (name, layout) in _Target.of(config).match(found).items():
    _read_module(config, plain, found, module, name, layout, arrays)
  loaded: dict[str, jax.Array] = {
    path: jax.make_array_from_callback(struct.shape, struct.sharding, arrays[path].__getitem__)
    for path, struct in structs.items()
  }
  rounding = format_.rounding if isinstance(format_, QuantizedFormat) else None
  for module in {adapted_module(path) for path in structs} if found.dora else ():
    path, weight = magnitude_path(module), f"{module}/weight"
    differ = partial(_differences, model=plain, path=weight, rounding=rounding)
    stored = {leaf: weights[name] for leaf, name in array_paths(weight).items() if name in weights}
    loaded[path] = jax.jit(differ, out_shardings=structs[path].sharding)(loaded[path], stored)
  return loaded


class PeftReader:
  """Reads PEFT folders of one model, one after the other, as a server loads them.

  Attributes:
    modules: paths of the modules of the decoder's layers that an adapter may adapt, with the shapes of their weights
      and the numbers of dimensions that layers are stacked over and that a matmul contracts.
  """

  def __init__(self, config: MaxTextConfig) -> None:
    self._target = _Target.of(config)
    model = self._target.model
    paths = {s.path for layout in self._target.layouts.values() for s in layout.slices if s.path.startswith("groups/")}
    adapted = {path.removesuffix("/weight"): path for path in sorted(paths)}
    self.modules = {
      module: (model.struct(path).shape, *model.contracted[path])
      for module, path in adapted.items()
      if adapter_paths(module)[0] in model.params
    }

  def rank(self, path: str, option: str) -> int:
    """The largest rank in a folder, which messages call `option`; raises `ConfigError` if it is not of this model."""
    found = _Adapters.read(path, option)
    self._target.match(found)
    return max(found.ranks.values())

  def read(self, path: str, option: str, rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [R, inputs, rank] and B [R, rank, outputs] of each module in a folder, with the scale in B.

    Raises:
      ConfigError: the folder is not of this model, has a higher rank, or adapts what is not in `modules`.
    """
    found = _Adapters.read(path, option)
    matched = self._target.match(found)
    if found.dora:
      raise ConfigError(
        f"{option}={path} is DoRA, which cannot be served beside other adapters: serve it alone, with "
        "lora_input_adapters_path, or its merged weights."
      )
    if (highest := max(found.ranks.values())) > rank:
      raise ConfigError(f"{option}={path} has rank {highest}, which is above max_lora_rank={rank}.")
    modules = {s.path.removesuffix("/weight") for _, layout in matched.values() for s in layout.slices}
    if others := sorted(modules - self.modules.keys()):
      raise ConfigError(f"{option}={path} has an adapter of {others[0]}, which is not served: train it without that.")
    arrays = {}
    for module in modules:
      (of_a, of_b), (shape, stacked, contracted) = adapter_paths(module), self.modules[module]
      arrays[of_a] = np.zeros((*shape[: stacked + contracted], rank), np.float32)
      arrays[of_b] = np.zeros((*shape[:stacked], rank, *shape[stacked + contracted :]), np.float32)
    unscaled = {"lora_rank": rank, "lora_alpha": float(rank), "use_rslora": False, "use_dora": False}
    config = self._target.config.model_copy(update=unscaled)
    for module, (name, layout) in matched.items():
      _read_module(config, self._target.model, found, module, name, layout, arrays)
    return {module: (arrays[of_a], arrays[of_b]) for module in modules for of_a, of_b in [adapter_paths(module)]}


def _new_adapters(model: Model, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
  """The values of a new run, but for magnitudes: those are NaN until they are known."""
  rng, arrays = np.random.default_rng(0), {}
  for path, struct in structs.items():
    module, (stacked, contracted) = adapted_module(path), model.contracted[path]
    std = np.prod(struct.shape[stacked : stacked + contracted]) ** -0.5
    fresh, fill = path == adapter_paths(module)[0], np.nan if path == magnitude_path(module) else 0.0
    array = rng.standard_normal(struct.shape) * std if fresh else np.full(struct.shape, fill)
    arrays[path] = array.astype(np.float32)
  return arrays


def _read_module(
  config: MaxTextConfig,
  model: Model,
  found: "_Adapters",
  module: str,
  name: str,
  layout: TensorLayout,
  arrays: Mapping[str, np.ndarray],
) -> None:
  """Puts the tensors of one module of a folder into the arrays of the parameters that its weight holds."""
  lora, rank = adapters(config), found.ranks[module]
  assert lora is not None
  try:
    tensors = [tensor.copy().astype(np.float32) for tensor in found.tensors[module]]
  except (OSError, RunError) as error:
    raise ConfigError(f"{found.file} cannot be read: {error}") from None
  if not all(np.isfinite(tensor).all() for tensor in tensors):
    raise ConfigError(f"{found.file}: {name} has numbers that are not finite: take another adapter.")
  if rank > lora.rank:
    raise ConfigError(f"lora_rank={lora.rank} is below the rank {rank} of {name} in {found.file}: leave it out.")
  a, b, *magnitude = tensors
  pieces = of_outputs(model, layout, rank).split(b * np.float32(found.scales[module] / lora.scale))
  magnitudes = [of_outputs(model, layout, 1).split(m[:, None]) for m in magnitude]
  for number, slice_ in enumerate(layout.slices):
    of_a, of_b = adapter_paths(slice_.path.removesuffix("/weight"))
    if of_a not in arrays:
      raise ConfigError(f"lora_targets leaves out {adapted_module(of_a)}, which {found.file} has: leave it out.")
    arrays[of_a][slice_.index][..., :rank] = a.T.reshape(*arrays[of_a][slice_.index].shape[:-1], rank)
    arrays[of_b][slice_.index][:rank] = pieces[number]
    for m in magnitudes:
      arrays[magnitude_path(adapted_module(of_a))][slice_.index] = m[number][0]


def _differences(
  magnitude: jax.Array, stored: Mapping[str, jax.Array], model: Model, path: str, rounding: WeightRounding | None
) -> jax.Array:
  """Of magnitudes to those of their weights, multiplied out if they are at rest in few bits; 0 where the folder has
  none."""
  stacked, contracted = model.contracted[path]
  weight, inputs = stored["weight"], range(stacked, stacked + contracted)
  if rounding is not None and len(stored) > 1:
    weight = rounding.decode(stored, model.struct(path).shape, stacked, jnp.float32)
  return jnp.where(jnp.isnan(magnitude), 0.0, magnitude - norm(weight, inputs))


@dataclass(frozen=True)
class _Adapters:
  """The content of a PEFT folder, by the names of its modules.

  Attributes:
    file: of the tensors.
    scale: of modules without one of their own.
    tensors: A [rank, inputs] and B [outputs, rank], and with DoRA the magnitudes [outputs].
  """

  file: Path
  rslora: bool
  dora: bool
  scale: float
  scales: Mapping[str, float]
  ranks: Mapping[str, int]
  tensors: Mapping[str, tuple[StoredTensor, ...]]

  @staticmethod
  def read(path: str, option: str = _KEY) -> "_Adapters":
    """Reads and checks all but the values of tensors; raises `ConfigError`, whose message names the option."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
      raise ConfigError(f"{option}={path} has no {CONFIG}: give the folder that PEFT's save_pretrained wrote.")
    about, file = read_json_inside(folder, CONFIG), resolve_inside(folder, TENSORS)
    _check_plain(folder / CONFIG, about)
    dora = about.get("use_dora") is True
    if not file.is_file():
      raise ConfigError(f"{option}={path} has no {TENSORS}; a pickle such as adapter_model.bin is never loaded.")
    try:
      parts = _parts(file, read_header(file), dora)
    except RunError as error:
      raise ConfigError(f"{option}: {error} Write the adapter again.") from None
    patterns = {name: _pattern(folder / CONFIG, about, name) for name in ("rank_pattern", "alpha_pattern")}
    rank, alpha = _rank(folder / CONFIG, about.get("r")), _alpha(folder / CONFIG, about.get("lora_alpha"))
    rslora, ranks, scales = about.get("use_rslora") is True, {}, {}
    for module, (a, b, *_) in parts.items():
      ranks[module] = own = _rank(folder / CONFIG, _look_up(patterns["rank_pattern"], module, rank))
      if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != own or b.shape[1] != own:
        raise ConfigError(
          f"{file} has A {list(a.shape)} and B {list(b.shape)} for {module}, and {CONFIG} says rank {own}: A must be "
          f"[{own}, inputs] and B [outputs, {own}]."
        )
      own_alpha = _alpha(folder / CONFIG, _look_up(patterns["alpha_pattern"], module, alpha))
      scales[module] = own_alpha / (own**0.5 if rslora else own)
    return _Adapters(file, rslora, dora, alpha / (rank**0.5 if rslora else rank), scales, ranks, parts)


@dataclass(frozen=True)
class _Target:
  """The model that adapters are read for.

  Attributes:
    model: abstract, with an adapter beside every weight that may have one.
    layouts: tensors that are the weight of one linear layer each, by their names in the model's own files.
  """

  config: MaxTextConfig
  model: Model
  layouts: Mapping[str, TensorLayout]

  @staticmethod
  def of(config: MaxTextConfig) -> "_Target":
    model = abstract_model(config.model_copy(update={"lora_rank": 1, "lora_targets": [""], "use_dora": False}))
    return _Target(config, model, linear_layouts(config, model))

  def match(self, found: _Adapters) -> dict[str, tuple[str, TensorLayout]]:
    """For each module of a folder, the name and the layout of its weight in the model's own files."""
    matched, about = {}, hugging_face_class(self.config)
    for module, (a, b, *magnitude) in found.tensors.items():
      name = our_name(f"{module}.weight", about)
      layout = self.layouts.get(name)
      if layout is None or any(
        adapter_paths(slice_.path.removesuffix("/weight"))[0] not in self.model.params for slice_ in layout.slices
      ):
        raise ConfigError(
          f"{found.file} has an adapter of {module}, and decoder_block={self.config.decoder_block.value} has no linear "
          "layer of that name in its layers: give the adapter's own base model, or train it without that module."
        )
      shape = layout.shape if layout.weight.transposed else layout.shape[::-1]
      if (b.shape[0], a.shape[1]) != shape or any(m.shape != shape[:1] for m in magnitude):
        shapes = ", ".join(
          f"{part} {list(tensor.shape)}" for part, tensor in zip(PARTS, (a, b, *magnitude), strict=False)
        )
        raise ConfigError(
          f"{found.file} has {shapes} for {module}, whose weight is {list(shape)} in this model: give the adapter's "
          "own base model."
        )
      matched[module] = name, layout
    return matched


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


def _parts(file: Path, tensors: Mapping[str, StoredTensor], dora: bool) -> dict[str, tuple[StoredTensor, ...]]:
  """The tensors of each module, in the order of `PARTS`."""
  wanted = [part for part in PARTS if dora or part != "magnitude"]
  parts: dict[str, dict[str, StoredTensor]] = {}
  for name, tensor in tensors.items():
    match = _NAME.fullmatch(name)
    part = match and match[2].removesuffix("_vector")
    if match is None or part not in wanted or not (tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16"):
      kinds = "neither A nor B" if len(wanted) == 2 else "neither A, B nor magnitudes"
      raise ConfigError(f"{file} has {name[:200]} of {tensor.dtype}, which is {kinds} of a linear layer.")
    if part in parts.setdefault(match[1], {}):
      raise ConfigError(f"{file} has two tensors for {name[:200]}.")
    parts[match[1]][part] = tensor
  for module, own in sorted(parts.items()):
    if missing := [part for part in wanted if part not in own]:
      raise ConfigError(f"{file} has no {PREFIX}{module}.{PARTS[missing[0]]}: write the adapter again.")
  if not parts:
    raise ConfigError(f"{file} has no adapters.")
  return {module: tuple(own[part] for part in wanted) for module, own in parts.items()}


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
