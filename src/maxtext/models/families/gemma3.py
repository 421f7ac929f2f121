"""Gemma 3: five local layers per global layer, each kind with its own RoPE; queries and keys are normed. Images are
encoded by SigLIP and pooled, and the tokens of an image see each other both ways."""

import math
from dataclasses import replace
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.patches import PooledProjector
from maxtext.media.image_processors import SquareImages
from maxtext.media.patches import Patches
from maxtext.media.processed import FeatureText
from maxtext.models import standard
from maxtext.models.encoders import siglip, vision
from maxtext.models.hugging_face import (
  CAPPED,
  CAPPED_READS,
  TIED_HEAD,
  Entries,
  HuggingFace,
  Multimodal,
  absent,
  layer_types,
  placeholders,
  rope,
  rope_entries,
)
from maxtext.models.spec import DecoderSpec, ModelSpec, TowerSpec, cycles, towers_of
from maxtext.models.weight_table import Table, Weight, renamed

# query_pre_attn_scalar of the models where it is not head_dim; there is no key for it.
_QUERY_SCALAR = {"gemma3-27b": 168}


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, offset=1.0)
  common = {
    "scale": _query_scalar(c) ** -0.5,
    "qk_norm": QueryKeyNorm(norm) if c.use_qk_norm else None,
  }
  rotary = standard.rope(c, c.head_dim, theta=_local_theta(c), scaling=None)
  local = standard.block(c, standard.attention(c, window=c.sliding_window_size, rope=rotary, **common), norm=norm)
  full = standard.block(c, standard.attention(c, **common), norm=norm)
  groups = cycles((local,) * 5 + (full,), c.base_num_decoder_layers)
  decoder = standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))
  return ModelSpec.of(decoder, _vision(c)) if c.use_multimodal else decoder


def weights(spec: DecoderSpec) -> Table:
  """The weights in files of the text model, or of the one with images."""
  if not (towers := towers_of(spec)):
    return WEIGHTS
  text = renamed(WEIGHTS, "", "language_model.")
  return text | siglip.weights(towers[0], "vision_tower.vision_model") | _PROJECTOR


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class of the text model, or of the one with images."""
  return _WITH_IMAGES if config.use_multimodal else HUGGING_FACE


def processors(config: MaxTextConfig) -> dict[str, SquareImages]:
  """What makes inputs of the towers of images."""
  text = FeatureText("<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n")
  c, side = config, vision.patches_per_side(config) * config.patch_size_for_vit
  return {"image": SquareImages(Patches(c.patch_size_for_vit), side, _tokens_per_image(c), text)}


def _vision(c: MaxTextConfig) -> TowerSpec:
  side = vision.patches_per_side(c)
  tokens = math.isqrt(_tokens_per_image(c))
  if tokens**2 != _tokens_per_image(c) or side % tokens:
    raise ConfigError(
      f"vision_output_length={c.vision_output_length}: an image has {side} x {side} patches, which are pooled to a "
      f"square number of tokens whose root divides {side}, such as 256."
    )
  projector = PooledProjector(side, tokens, RMSNormSpec(siglip.EPSILON, offset=1.0))
  return siglip.tower(c, projector, bidirectional_features=True)


def _tokens_per_image(c: MaxTextConfig) -> int:
  return 256 if c.vision_output_length < 0 else c.vision_output_length


def _query_scalar(c: MaxTextConfig) -> int:
  return _QUERY_SCALAR.get(c.model_name, c.head_dim)


def _local_theta(c: MaxTextConfig) -> float:
  return c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale


def _read(entries: Entries) -> dict[str, Any]:
  """Sets model_name for an unusual query scalar, and reads the RoPE base of local layers from old and new formats."""
  scalar, by_layer_type = entries["query_pre_attn_scalar"], "rope_parameters" in entries
  names = [name for name, value in _QUERY_SCALAR.items() if value == scalar and entries["head_dim"] != scalar]
  local_theta = (
    rope_entries(entries, "sliding_attention")["rope_theta"]
    if by_layer_type
    else entries.get("rope_local_base_freq", 10000)
  )
  named = {"model_name": names[0], "override_model_config": True} if names else {}
  return named | {"use_qk_norm": True, "local_rope_max_timescale": local_theta}


def _read_tokens_per_image(entries: Entries) -> dict[str, Any]:
  return {"vision_output_length": entries["mm_tokens_per_image"]} if "mm_tokens_per_image" in entries else {}


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
_PROJECTOR = {
  "towers/vision/projector/norm/scale": Weight("multi_modal_projector.mm_soft_emb_norm.weight"),
  "towers/vision/projector/out/weight": Weight("multi_modal_projector.mm_input_projection_weight"),
}
HUGGING_FACE = HuggingFace(
  "Gemma3ForCausalLM",
  "gemma3_text",
  {
    **CAPPED,
    "query_pre_attn_scalar": _query_scalar,
    "rope_parameters": lambda c: {
      "sliding_attention": rope(c, theta=_local_theta(c), scaled=False),
      "full_attention": rope(c),
    },
  },
  (*CAPPED_READS, _read, _read_tokens_per_image, placeholders(image_placeholder="<start_of_image>")),
  absent=absent(
    tie_word_embeddings=True, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256, rope_theta=1000000
  ),
  expects={
    "layer_types": layer_types("sliding_attention", lambda c: 6),
    "sliding_window_pattern": lambda c: 6,
    "use_bidirectional_attention": lambda c: False,
  },
  prefixes={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
  ignored=(*TIED_HEAD, r"vision_tower\..*", r"multi_modal_projector\..*"),
  towers={**siglip.FIELDS, "mm_tokens_per_image": _tokens_per_image},
)
_WITH_IMAGES = replace(
  HUGGING_FACE,
  prefixes={
    "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    **siglip.prefixes("vision_tower"),
    **siglip.prefixes("model.vision_tower"),
  },
  ignored=(r"(language_model\.)?lm_head\.weight",),
  multimodal=Multimodal("Gemma3ForConditionalGeneration", "gemma3"),
)
