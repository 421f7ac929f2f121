"""What vision encoders share: layers from the keys, names of their weights, entries of `vision_config`."""

from collections.abc import Mapping
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.rope import RotaryEmbedding
from maxtext.models.hugging_face import Entries, Field
from maxtext.models.weight_table import Weight


def patches_per_side(config: MaxTextConfig, key: str = "image_size_for_vit") -> int:
  """Patches along a side of a square image, whose side in pixels is the key's value."""
  size, patch = getattr(config, key), config.patch_size_for_vit
  if not isinstance(size, int) or size < 1 or size % patch:
    raise ConfigError(f"{key}={size} must be the side of a square image and a multiple of patch_size_for_vit={patch}.")
  return size // patch


def head_dim(config: MaxTextConfig) -> int:
  """Width of an attention head."""
  heads, width = config.num_attention_heads_for_vit, config.hidden_size_for_vit
  if width % heads:
    raise ConfigError(f"num_attention_heads_for_vit={heads} does not divide hidden_size_for_vit={width}.")
  return width // heads


def projector_dropout(config: MaxTextConfig) -> float:
  """Share of the values of features that is zeroed in training."""
  return config.projector_dropout_for_vit if config.enable_dropout else 0.0


def axial_rope(config: MaxTextConfig, **changes: Any) -> RotaryEmbedding:
  """RoPE by the two axes of an image, each for half of a head."""
  c, width = config, head_dim(config)
  if width % 4:
    raise ConfigError(
      f"hidden_size_for_vit={c.hidden_size_for_vit} gives heads of width {width}, half of which rotates by each axis "
      f"of an image: it must be a multiple of 4."
    )
  return RotaryEmbedding(width, c.rope_theta_for_vit, mrope_sections=(width // 4,) * 2, axial=True, **changes)


def layer(config: MaxTextConfig, norm: LayerNormSpec, activation: str = "gelu", **attention_changes: Any) -> Block:
  """Bidirectional attention and a plain feed-forward layer, with biases."""
  heads = config.num_attention_heads_for_vit
  values: dict[str, Any] = {"rope": None, "bias": True, "out_bias": True, "causal": False}
  attention = GQA(heads, heads, head_dim(config), **(values | attention_changes))
  return Block(attention, MLP(config.intermediate_size_for_vit, activation, gated=False, bias=True), norm)


def linear_weights(names: Mapping[str, str], bias: bool = True) -> dict[str, Weight]:
  """Weights, and biases if they have them, of linear layers, {path of ours: name of theirs}."""
  found = dict[str, Weight]()
  for ours, theirs in names.items():
    found[f"{ours}/weight"] = Weight(f"{theirs}.weight", transposed=True)
    if bias:
      found[f"{ours}/bias"] = Weight(f"{theirs}.bias")
  return found


def norm_weights(names: Mapping[str, str]) -> dict[str, Weight]:
  """Scales and biases of norms, {path of ours: name of theirs}."""
  found = dict[str, Weight]()
  for ours, theirs in names.items():
    found[f"{ours}/scale"] = Weight(f"{theirs}.weight")
    found[f"{ours}/bias"] = Weight(f"{theirs}.bias")
  return found


def read_rope(entries: Entries) -> dict[str, Any]:
  """The RoPE base, which `vision_config` has had in two places."""
  own = entries.get("vision_config.rope_parameters") or {}
  theta = own.get("rope_theta", entries.get("vision_config.rope_theta"))
  return {} if theta is None else {"rope_theta_for_vit": int(theta)}


LAYER = "towers/vision/groups/*/layers/*"
FIELDS: dict[str, Field] = {
  "vision_config.hidden_size": "hidden_size_for_vit",
  "vision_config.intermediate_size": "intermediate_size_for_vit",
  "vision_config.patch_size": "patch_size_for_vit",
}
"""Entries of every encoder."""
COUNTS: dict[str, Field] = {
  "vision_config.num_hidden_layers": "num_hidden_layers_for_vit",
  "vision_config.num_attention_heads": "num_attention_heads_for_vit",
  "vision_config.num_channels": "num_channels_for_vit",
}
"""Entries of most encoders."""
