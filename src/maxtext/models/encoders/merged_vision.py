"""A vision encoder for images of any size, whose blocks of patches are merged: keys to a tower, rotary positions of
three components, names of weights, entries of `config.json`."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.patches import PatchMerger, PatchProjection
from maxtext.layers.rope import RotaryEmbedding
from maxtext.media.image_processors import FittedImages, PixelBudget
from maxtext.media.patches import Patches
from maxtext.media.processed import FeatureText
from maxtext.media.video import Sampling, Videos
from maxtext.models import standard
from maxtext.models.encoders import vision
from maxtext.models.encoders.vision import LAYER
from maxtext.models.hugging_face import Entries, Field, placeholders, rope_entries
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight, fused

_EPSILON = 1e-6  # of the norms


def tower(config: MaxTextConfig, early: list[int] | None = None) -> TowerSpec:
  """The encoder with the patch merger; `early` are its layers whose features also enter the first decoder layers."""
  c, norm, rope = config, LayerNormSpec(_EPSILON), vision.axial_rope(config)
  merger = PatchMerger(c.spatial_merge_size_for_vit**2, norm, "exact gelu")
  layer, ends = vision.layer(c, norm, rope=rope), [i + 1 for i in early or ()]
  layers = c.num_hidden_layers_for_vit
  if ends != sorted(set(ends)) or not all(0 < end <= layers for end in ends):
    raise ConfigError(
      f"deepstack_visual_indexes_for_vit={early} must be layers from 0 to {layers - 1} (num_hidden_layers_for_vit), in "
      f"ascending order."
    )
  cuts = sorted({0, *ends, layers})
  return TowerSpec(
    "vision",
    c.hidden_size_for_vit,
    c.num_position_embeddings_for_vit,
    PatchProjection(_patch(c)),
    tuple(Group((layer,), end - start) for start, end in pairwise(cuts)),
    merger,
    position_grid=_position_grid(c),
    deepstack=tuple(range(len(ends))),
    deepstack_projector=PatchMerger(merger.count, norm, "exact gelu", grouped_norm=True) if ends else None,
    projector_dropout=vision.projector_dropout(c),
  )


def _patch(c: MaxTextConfig) -> tuple[int, ...]:
  if c.out_hidden_size_for_vit != c.base_emb_dim:
    raise ConfigError(
      f"out_hidden_size_for_vit={c.out_hidden_size_for_vit} must be the width of the decoder, {c.base_emb_dim}."
    )
  return c.num_channels_for_vit, c.temporal_patch_size_for_vit, c.patch_size_for_vit, c.patch_size_for_vit


def _position_grid(c: MaxTextConfig) -> int:
  side = math.isqrt(c.num_position_embeddings_for_vit)
  if side**2 != c.num_position_embeddings_for_vit:
    raise ConfigError(
      f"num_position_embeddings_for_vit={c.num_position_embeddings_for_vit} must be a square number, such as 2304: the "
      f"table is a square grid."
    )
  return side


def rope(config: MaxTextConfig) -> RotaryEmbedding:
  """The decoder's RoPE, with three components of positions if the keys say so."""
  c, plain = config, standard.rope(config, config.head_dim)
  if not (c.use_multimodal and c.use_mrope):
    return plain
  if len(c.mrope_section) != 3 or sum(c.mrope_section) != plain.head_dim // 2:
    raise ConfigError(
      f"mrope_section={c.mrope_section} must be three numbers whose sum is {plain.head_dim // 2}, the number of rotary "
      f"frequencies."
    )
  return standard.rope(c, c.head_dim, mrope_sections=tuple(c.mrope_section), mrope_interleaved=True)


def read(entries: Entries) -> dict[str, Any]:
  """The RoPE base of the encoder, and sections of the decoder's."""
  theta = (entries.get("vision_config.rope_parameters") or {}).get("rope_theta")
  sections = rope_entries(entries).get("mrope_section")
  return ({} if theta is None else {"rope_theta_for_vit": int(theta)}) | (
    {"use_mrope": True, "mrope_section": list(sections)} if sections else {}
  )


read_placeholders = placeholders(
  image_placeholder="<|image_pad|>", video_placeholder="<|video_pad|>", audio_placeholder="<|audio_pad|>"
)


def mrope_entries(config: MaxTextConfig) -> dict[str, Any]:
  """What `rope_parameters` have beside those of text."""
  on = config.use_multimodal and config.use_mrope
  return {"mrope_section": config.mrope_section, "mrope_interleaved": True} if on else {}


def image_processor(config: MaxTextConfig, least: float, most: int) -> FittedImages:
  """What makes inputs of images, of `least` to `most` tokens."""
  patches = _patches(config)
  return FittedImages(patches, _budget(patches, least, most), FeatureText("<|image_pad|>"))


def video_processor(config: MaxTextConfig, stamped: bool) -> Videos:
  """What makes inputs of two frames a second: with stamps of time between frames, or without."""
  patches = _patches(config)
  if not stamped:
    sampling = Sampling(multiple=patches.frames)
    return Videos(patches, _budget(patches, 128, 768), sampling, FeatureText("<|video_pad|>"))
  text = FeatureText("<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
  budget = _budget(patches, 4, 24_576, frames=patches.frames)
  return Videos(patches, budget, Sampling(to_end=True), text, "<{seconds:.1f} seconds>")


def _patches(c: MaxTextConfig) -> Patches:
  return Patches(c.patch_size_for_vit, merge=c.spatial_merge_size_for_vit, frames=c.temporal_patch_size_for_vit)


def _budget(patches: Patches, least: float, most: int, frames: int = 0) -> PixelBudget:
  side = patches.size * patches.merge
  return PixelBudget(side, round(least * side**2), most * side**2, frames)


@dataclass(frozen=True)
class Names:
  """How files name the encoder and the parts of a merger."""

  prefix: str
  norm: str
  up: str
  out: str


def weights(spec: TowerSpec, names: Names) -> dict[str, Weight]:
  """The names of all weights of the tower."""
  tower, layer = "towers/vision", f"{names.prefix}.blocks.{{layer}}"
  assert isinstance(spec.front_end, PatchProjection)
  patch = f"{names.prefix}.patch_embed.proj"
  mergers = {"projector": "merger"} | {f"deepstack/{i}": f"merger_list.{i}" for i, _ in enumerate(spec.deepstack)}
  found = {
    f"{tower}/front_end/weight": Weight(f"{patch}.weight", transposed=True, inputs=spec.front_end.shape),
    f"{tower}/front_end/bias": Weight(f"{patch}.bias"),
    f"{tower}/positions/table": Weight(f"{names.prefix}.pos_embed.weight", table=True),
    **fused(f"{LAYER}/mixer", _QKV, f"{layer}.attn.qkv.weight", transposed=True),
    **fused(f"{LAYER}/mixer", _QKV, f"{layer}.attn.qkv.bias", "bias"),
    **vision.linear_weights({f"{LAYER}/{ours}": f"{layer}.{theirs}" for ours, theirs in _LINEAR.items()}),
    **vision.norm_weights({f"{LAYER}/{ours}": f"{layer}.{theirs}" for ours, theirs in _NORMS.items()}),
  }
  for ours, theirs in mergers.items():
    merger = f"{names.prefix}.{theirs}"
    found |= vision.norm_weights({f"{tower}/{ours}/norm": f"{merger}.{names.norm}"})
    found |= vision.linear_weights(
      {f"{tower}/{ours}/up": f"{merger}.{names.up}", f"{tower}/{ours}/out": f"{merger}.{names.out}"}
    )
  return found


_QKV = ("query", "key", "value")
_LINEAR = {"mixer/out": "attn.proj", "feed_forward/up": "mlp.linear_fc1", "feed_forward/down": "mlp.linear_fc2"}
_NORMS = {"mixer_norm": "norm1", "feed_forward_norm": "norm2"}

FIELDS: dict[str, Field] = {
  **vision.FIELDS,
  "vision_config.depth": "num_hidden_layers_for_vit",
  "vision_config.num_heads": "num_attention_heads_for_vit",
  "vision_config.in_channels": "num_channels_for_vit",
  "vision_config.spatial_merge_size": "spatial_merge_size_for_vit",
  "vision_config.temporal_patch_size": "temporal_patch_size_for_vit",
  "vision_config.num_position_embeddings": "num_position_embeddings_for_vit",
  "vision_config.out_hidden_size": "out_hidden_size_for_vit",
  "vision_config.rope_parameters": lambda c: {"rope_type": "axial", "rope_theta": float(c.rope_theta_for_vit)},
  "vision_config.hidden_act": lambda c: "gelu_pytorch_tanh",
}
