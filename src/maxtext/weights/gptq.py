"""GPTQ for weights at rest: plain weights, of which those that are rounded come with values chosen by calibration."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from maxtext.kernels.gptq import gptq
from maxtext.layers.input_moments import InputMoments, sums_path
from maxtext.layers.quantized_weight import WeightRounding
from maxtext.mesh.memory import device_memory, host_memory
from maxtext.models.build import build_model
from maxtext.models.model import Model, Params
from maxtext.weights.load import load_weights
from maxtext.weights.plain_weights import Index, PlainWeights
from maxtext.weights.quantized import Codes

_LOG = logging.getLogger(__name__)
_ROWS, _LENGTH = 128, 2048  # of a calibration text, at most
_SHARE = 0.2  # of the memory, for sums of one pass over the text: a scan over layers has them twice


def calibration_tokens(config: MaxTextConfig, path: Path) -> np.ndarray:
  """Rows of tokens [N,S] from the beginning of a text file, each with the token that begins a document, if there is
  one."""
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"The calibration text {path} cannot be read: {error}.") from None
  length = min(_LENGTH, config.max_target_length)
  tokenizer = load_tokenizer(tokenizer_options(config))
  first = [tokenizer.bos] if tokenizer.add_bos else []
  own = length - len(first)
  tokens = replace(tokenizer, add_bos=False, add_eos=False).encode(text[: _ROWS * length * 16])
  if len(tokens) < own:
    raise ConfigError(
      f"The calibration text {path} has {len(tokens):,} tokens; GPTQ takes rows of {length:,}, best {_ROWS} of them."
    )
  rows = tokens[: min(_ROWS, len(tokens) // own) * own].reshape(-1, own)
  return np.concatenate([np.tile(np.array(first, rows.dtype), (len(rows), 1)), rows], 1).astype(np.int32)


class GptqWeights:
  """Plain weights whose `codes` are found by GPTQ.

  The inputs that it weighs are those of the plain model, which has to fit one device, on a calibration text. It passes
  over the text as often as it takes for the sums of a pass to fit into a fifth of the memory.

  Args:
    config: of the plain model, with `load_parameters_path`.
    source: the same weights, piece by piece.
    model: the abstract plain model that the pieces are of.
    rounded: paths of the weights that are chosen; others are rounded to nearest.
    tokens: [N,S].
  """

  def __init__(
    self, config: MaxTextConfig, source: PlainWeights, model: Model, rounded: Sequence[str], tokens: np.ndarray
  ) -> None:
    self._config, self._source, self._model, self._tokens = config, source, model, tokens
    self._modules = [path.removesuffix("/weight") for path in rounded]
    self._sums: dict[str, np.ndarray] = {}
    self.identity = hashlib.sha256(tokens.tobytes()).hexdigest()
    self.indices, self.piece, self.skip, self.check = source.indices, source.piece, source.skip, source.check

  def codes(self, path: str, index: Index, rounding: WeightRounding) -> Codes | None:
    """The piece in the format, as GPTQ rounds it."""
    if path.removesuffix("/weight") not in self._modules:
      return None
    sums, weight = self._sums_of(path.removesuffix("/weight"))[index], self._source.piece(path, index)
    rows, lead = sums.shape[-1], sums.shape[:-2]
    weights = weight.reshape(-1, rows, weight.size // (prod(lead) * rows))
    found = [
      gptq(one, own, rounding.stored, rounding.block)
      for one, own in zip(weights, sums.reshape(-1, rows, rows), strict=True)
    ]
    arrays = {leaf: np.stack([np.asarray(one[leaf]) for one in found]) for leaf in found[0]}
    arrays = {leaf: array.reshape(*lead, *array.shape[1:]) for leaf, array in arrays.items()}
    return Codes(rounding, arrays["weight"], arrays["weight_scale"], arrays.get("weight_global_scale"))

  def _sums_of(self, module: str) -> np.ndarray:
    """The sums of a module; of earlier ones they are forgotten."""
    if module not in self._sums:
      self._sums = {}
      self._sums = self._pass(self._next(module))
      if unseen := [name for name, sums in self._sums.items() if not sums.any()]:
        _LOG.warning(f"no token of the calibration text reaches {', '.join(unseen)}: rounded to nearest.")
    return self._sums[module]

  def _next(self, first: str) -> list[str]:
    """As many modules, from this one on, as fit."""
    memory = device_memory(jax.devices()[0]) or host_memory()
    wanted, room = [first], _SHARE * memory - self._bytes(first)
    if room < 0:
      raise ConfigError(
        f"GPTQ sums products of the inputs of {first} in {self._bytes(first) / 1e9:.3g} GB, more than a fifth of the "
        f"{memory / 1e9:.3g} GB there are: leave it out by weight_format_targets, or quantize without calibration."
      )
    for module in self._modules[self._modules.index(first) + 1 :]:
      if (room := room - self._bytes(module)) < 0:
        break
      wanted.append(module)
    return wanted

  def _bytes(self, module: str) -> int:
    stacked, contracted = self._model.contracted[f"{module}/weight"]
    shape = self._model.struct(f"{module}/weight").shape
    return 4 * prod(shape[:stacked]) * prod(shape[stacked : stacked + contracted]) ** 2

  def _pass(self, modules: list[str]) -> dict[str, np.ndarray]:
    """Runs the model on all tokens; returns the sums of these modules."""
    measured = (InputMoments(modules=frozenset(modules)),)
    model = Model.of(self._plain.spec, self._plain.execution.replace(matmul=measured))
    paths = {sums_path(module): module for module in modules}
    positions = jnp.arange(self._tokens.shape[1], dtype=jnp.int32)[None]

    @partial(jax.jit, donate_argnums=1)
    def add(params: Params, sums: Params, tokens: jax.Array) -> Params:
      decoder = model.bind(params | sums)
      decoder.logits(decoder.hidden(tokens, positions)[0])
      found = model.buffers_of(decoder)
      return {path: found[path] for path in sums}

    sums = model.initial_buffers({path: model.struct(path) for path in paths})
    for row in self._tokens:
      sums = add(self._params, sums, row[None])
    found = {module: np.asarray(sums[path]) for path, module in paths.items()}
    for module, array in found.items():
      if not np.isfinite(array).all():
        raise RunError(f"The inputs of {module} on the calibration text are not finite: is the model?")
    return found

  @cached_property
  def _plain(self) -> Model:
    config = self._config
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
    return build_model(config, mesh)

  @cached_property
  def _params(self) -> Params:
    return load_weights(self._config, self._plain, self._plain.params | self._plain.buffers)
