"""A vision encoder for images of any size, whose patches are pooled: keys to a tower, names of its weights, entries of
`vision_config`."""

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import GQA, QueryKeyNorm
from maxtext.layers.block import Block
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.patches import LinearProjector, PatchPooling, PatchProjection
from maxtext.media.image_processors import FeatureBudget, FittedImages
from maxtext.media.patches import Patches
from maxtext.media.processed import FeatureText, MediaProcessor
from maxtext.media.video import Sampling, Videos
from maxtext.models.encoders import vision
from maxtext.models.encoders.vision import LAYER
from maxtext.models.hugging_face import Field
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight

_EPSILON = 1e-6  # of the norms
_BLACK, _WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_TOKENS, _FRAME_TOKENS = 280, 70  # of an image, and of a frame of a video
_FRAMES = 32  # of a video
_STAMP = "{minute:02d}:{second:02d} "


def tower(config: MaxTextConfig) -> TowerSpec:
  """The encoder with the projector."""
  c, norm, heads = config, RMSNormSpec(_EPSILON, scale_in_float32=True), config.num_attention_heads_for_vit
  plain, pooled = RMSNormSpec(_EPSILON, scaled=False), c.spatial_merge_size_for_vit**2
  attention = GQA(
    heads,
    heads,
    vision.head_dim(c),
    vision.axial_rope(c, apart=True),
    scale=1.0,
    qk_norm=QueryKeyNorm(norm),
    value_norm=plain,
    causal=False,
  )
  layer = Block(attention, MLP(c.intermediate_size_for_vit, "gelu"), norm, norm, norm)
  return TowerSpec(
    "vision",
    c.hidden_size_for_vit,
    _tokens_per_image(c) * pooled,
    PatchProjection((c.patch_size_for_vit, c.patch_size_for_vit, c.num_channels_for_vit), bias=False, centred=True),
    (Group((layer,), c.num_hidden_layers_for_vit),),
    LinearProjector(plain),
    axis_positions=c.num_position_embeddings_for_vit,
    adapter=PatchPooling(pooled, c.hidden_size_for_vit),
    bidirectional_features=True,
    projector_dropout=vision.projector_dropout(c),
  )


def processors(config: MaxTextConfig) -> dict[str, MediaProcessor]:
  """What makes inputs of the tower: images as large as their tokens allow, and frames with stamps of time."""
  c, side = config, config.patch_size_for_vit * config.spatial_merge_size_for_vit
  patches = Patches(c.patch_size_for_vit, _BLACK, _WHITE, merge=c.spatial_merge_size_for_vit, channels_last=True)
  start, end = "<|image>", "<image|>"
  images = FittedImages(patches, FeatureBudget(side, _tokens_per_image(c)), FeatureText("<|image|>", start, end))
  frames = FeatureBudget(side, min(_FRAME_TOKENS, _tokens_per_image(c)))
  text = FeatureText("<|video|>", start, end)
  return {"image": images, "video": Videos(patches, frames, Sampling(_FRAMES), text, _STAMP, between=" ")}


def _tokens_per_image(c: MaxTextConfig) -> int:
  return _TOKENS if c.vision_output_length < 0 else c.vision_output_length


_LINEAR = {
  "mixer/query": "self_attn.q_proj",
  "mixer/key": "self_attn.k_proj",
  "mixer/value": "self_attn.v_proj",
  "mixer/out": "self_attn.o_proj",
  "feed_forward/gate": "mlp.gate_proj",
  "feed_forward/up": "mlp.up_proj",
  "feed_forward/down": "mlp.down_proj",
}
_NORMS = {
  "mixer/query_norm": "self_attn.q_norm",
  "mixer/key_norm": "self_attn.k_norm",
  "mixer_norm": "input_layernorm",
  "mixer_post_norm": "post_attention_layernorm",
  "feed_forward_norm": "pre_feedforward_layernorm",
  "feed_forward_post_norm": "post_feedforward_layernorm",
}
_TOWER, _PREFIX = "towers/vision", "model.vision_tower"
_THEIRS = f"{_PREFIX}.encoder.layers.{{layer}}"

WEIGHTS = {
  f"{_TOWER}/front_end/weight": Weight(f"{_PREFIX}.patch_embedder.input_proj.weight", transposed=True),
  f"{_TOWER}/axes/table": Weight(f"{_PREFIX}.patch_embedder.position_embedding_table", table=True),
  **vision.linear_weights({f"{LAYER}/{o}": f"{_THEIRS}.{t}.linear" for o, t in _LINEAR.items()}, bias=False),
  **{f"{LAYER}/{ours}/scale": Weight(f"{_THEIRS}.{theirs}.weight") for ours, theirs in _NORMS.items()},
  f"{_TOWER}/adapter/mean": Weight(f"{_PREFIX}.std_bias"),
  f"{_TOWER}/adapter/scale": Weight(f"{_PREFIX}.std_scale"),
  f"{_TOWER}/projector/out/weight": Weight("model.embed_vision.embedding_projection.weight", transposed=True),
}
FIELDS: dict[str, Field] = {
  **vision.FIELDS,
  **{name: key for name, key in vision.COUNTS.items() if name != "vision_config.num_channels"},
  "vision_config.model_type": lambda c: "gemma4_vision",
  "vision_config.num_key_value_heads": lambda c: c.num_attention_heads_for_vit,
  "vision_config.head_dim": lambda c: c.hidden_size_for_vit // c.num_attention_heads_for_vit,
  "vision_config.pooling_kernel_size": "spatial_merge_size_for_vit",
  "vision_config.position_embedding_size": "num_position_embeddings_for_vit",
  "vision_config.rope_parameters": lambda c: {"rope_type": "axial", "rope_theta": float(c.rope_theta_for_vit)},
  "vision_config.hidden_activation": lambda c: "gelu_pytorch_tanh",
  "vision_config.rms_norm_eps": lambda c: _EPSILON,
  "vision_config.standardize": lambda c: True,
  "vision_config.use_clipped_linears": lambda c: False,
}
