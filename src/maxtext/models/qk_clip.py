"""QK-clip: scales down the query and key weights of heads whose attention logits exceeded the threshold."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from maxtext.layers.parameter_paths import LayerPath, mtp_path
from maxtext.models.model import Model, Params


def apply_qk_clip(model: Model, threshold: float, params: Params, buffers: Params) -> tuple[Params, Params]:
  """Returns the clipped parameters, and the buffers unchanged. The buffers hold the largest logit of each head."""
  params = dict(params)
  for path, mixer in _mixers(model):
    largest = buffers.get(f"{path}/largest_logit")
    if largest is None:
      continue
    gamma = jnp.minimum(1.0, threshold / jnp.maximum(largest, threshold))
    weights = {name.removeprefix(f"{path}/"): value for name, value in params.items() if name.startswith(f"{path}/")}
    params |= {f"{path}/{name}": value for name, value in mixer.clip_weights(weights, gamma).items()}
  return params, buffers


def _mixers(model: Model) -> Iterator[tuple[str, Any]]:
  spec = model.spec
  for g, group in enumerate(spec.groups):
    for place, layer in enumerate(group.cycle):
      yield str(LayerPath(g, place, "mixer")), layer.mixer
  if spec.mtp is not None:
    for i in range(spec.mtp.count):
      yield mtp_path(i, "mixer"), spec.mtp.layer.mixer
