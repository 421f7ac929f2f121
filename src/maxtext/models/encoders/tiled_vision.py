"""A vision encoder whose inputs are tiles of images: keys to a tower, names of its weights, entries of
`vision_config`."""

import math

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.patches import LinearProjector, PatchProjection, PixelShuffle
from maxtext.media.image_processors import TiledImages
from maxtext.media.patches import Patches
from maxtext.models.encoders import vision
from maxtext.models.encoders.vision import LAYER
from maxtext.models.hugging_face import Field
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight

_EPSILON = 1e-5  # of the norms


def tower(config: MaxTextConfig) -> TowerSpec:
  """The encoder of one tile, with the projector."""
  c, norm, side = config, LayerNormSpec(_EPSILON), vision.patches_per_side(config, "tile_size_for_vit")
  rope = vision.axial_rope(c, interleaved=True)
  return TowerSpec(
    "vision",
    c.hidden_size_for_vit,
    side**2 + 1,
    PatchProjection((c.num_channels_for_vit, c.patch_size_for_vit, c.patch_size_for_vit), bias=False),
    (Group((vision.layer(c, norm, "exact gelu", rope=rope),), c.num_hidden_layers_for_vit),),
    LinearProjector(),
    final_norm=norm,
    learned_positions=True,
    class_token=True,
    first_norm=norm,
    rotary_grid=side,
    adapter=_adapter(c, side),
    projector_dropout=vision.projector_dropout(c),
  )


def processor(config: MaxTextConfig) -> TiledImages:
  """What makes inputs of the tower: up to 16 tiles of an image, and the whole image."""
  c = config
  side = vision.patches_per_side(c, "tile_size_for_vit")
  return TiledImages(
    Patches(c.patch_size_for_vit, bfloat16=True),
    c.tile_size_for_vit,
    max_tiles=16,
    features_each=round(side * c.pixel_shuffle_ratio_for_vit) ** 2,
    token="<|patch|>",
    start="<|image_start|>",
    end="<|image_end|>",
    column_end="<|tile_x_separator|>",
    row_end="<|tile_y_separator|>",
    whole="<|image|>",
  )


def _adapter(c: MaxTextConfig, side: int) -> PixelShuffle:
  ratio, given, hidden = c.pixel_shuffle_ratio_for_vit, c.projector_input_dim_for_vit, c.projector_output_dim_for_vit
  block = round(1 / ratio) if ratio > 0 else 0
  if not block or not math.isclose(block * ratio, 1.0) or side % block:
    raise ConfigError(
      f"pixel_shuffle_ratio_for_vit={ratio} must be 1 over a number that divides the {side} patches of a tile's side "
      f"(tile_size_for_vit over patch_size_for_vit), such as 0.5."
    )
  if not given == hidden == c.vision_output_dim_for_vit:
    raise ConfigError(
      f"projector_input_dim_for_vit={given}, projector_output_dim_for_vit={hidden} and "
      f"vision_output_dim_for_vit={c.vision_output_dim_for_vit} are widths of consecutive layers: they must be equal."
    )
  if c.intermediate_size_for_vit != c.hidden_size_for_vit * block**2:
    raise ConfigError(
      f"intermediate_size_for_vit={c.intermediate_size_for_vit} is also the width of {block} x {block} patches here: "
      f"it must be {c.hidden_size_for_vit * block**2}."
    )
  return PixelShuffle(side, block, given, hidden, "exact gelu")


_LINEAR = {
  "mixer/query": "self_attn.q_proj",
  "mixer/key": "self_attn.k_proj",
  "mixer/value": "self_attn.v_proj",
  "mixer/out": "self_attn.o_proj",
  "feed_forward/up": "mlp.fc1",
  "feed_forward/down": "mlp.fc2",
}
_NORMS = {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_TOWER, _THEIRS = "towers/vision", "vision_model.model.layers.{layer}"

WEIGHTS = {
  f"{_TOWER}/front_end/weight": Weight("vision_model.patch_embedding.linear.weight", transposed=True),
  f"{_TOWER}/class_token": Weight("vision_model.class_embedding"),
  f"{_TOWER}/positions/table": Weight("vision_model.positional_embedding_vlm", table=True),
  **vision.linear_weights({f"{LAYER}/{ours}": f"{_THEIRS}.{theirs}" for ours, theirs in _LINEAR.items()}),
  **vision.norm_weights({f"{LAYER}/{ours}": f"{_THEIRS}.{theirs}" for ours, theirs in _NORMS.items()}),
  **vision.norm_weights({f"{_TOWER}/first_norm": "vision_model.layernorm_pre"}),
  **vision.norm_weights({f"{_TOWER}/final_norm": "vision_model.layernorm_post"}),
  f"{_TOWER}/adapter/up/weight": Weight("vision_model.vision_adapter.mlp.fc1.weight", transposed=True),
  f"{_TOWER}/adapter/down/weight": Weight("vision_model.vision_adapter.mlp.fc2.weight", transposed=True),
  f"{_TOWER}/projector/out/weight": Weight("multi_modal_projector.linear_1.weight", transposed=True),
}
FIELDS: dict[str, Field] = {
  **vision.FIELDS,
  **vision.COUNTS,
  "vision_config.model_type": lambda c: "llama4_vision_model",
  "vision_config.image_size": "tile_size_for_vit",
  "vision_config.pixel_shuffle_ratio": "pixel_shuffle_ratio_for_vit",
  "vision_config.projector_input_dim": "projector_input_dim_for_vit",
  "vision_config.projector_output_dim": "projector_output_dim_for_vit",
  "vision_config.vision_output_dim": "vision_output_dim_for_vit",
  "vision_config.rope_parameters": lambda c: {"rope_type": "default", "rope_theta": float(c.rope_theta_for_vit)},
  "vision_config.hidden_act": lambda c: "gelu",
  "vision_config.norm_eps": lambda c: _EPSILON,
  "vision_config.projector_dropout": lambda c: 0.0,
  "vision_config.multi_modal_projector_bias": lambda c: False,
}
