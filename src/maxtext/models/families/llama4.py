"""Llama 4: three layers of chunked attention, then one of full attention without RoPE (NoPE).

Each token has one routed expert, whose input is scaled by the sigmoid of the router logit, and a shared expert. With
interleave_moe_layer_step=n, every n-th layer has experts. Images are encoded in tiles.
"""

import math
from dataclasses import replace
from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.layers.attention import GQA, QueryKeyNorm, QueryTemperature
from maxtext.layers.rope import LongContextScaling
from maxtext.media.image_processors import TiledImages
from maxtext.models import standard
from maxtext.models.encoders import tiled_vision, vision
from maxtext.models.hugging_face import LEFT_OUT, READS, STANDARD, Entries, HuggingFace, Multimodal, absent, rope
from maxtext.models.mixture import expert_width, mixture
from maxtext.models.spec import DecoderSpec, ModelSpec, cycles, towers_of
from maxtext.models.weight_table import Table, Weight, fused, renamed


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  experts = mixture(c, {"score": "sigmoid", "normalize": False}, weigh_inputs=True)
  dense, cycle, step = standard.mlp(c), c.inhomogeneous_layer_cycle_interval, c.interleave_moe_layer_step
  layers = tuple(
    standard.block(
      c, _attention(c, use_nope=(i + 1) % c.nope_layer_interval == 0), dense if (i + 1) % step else experts
    )
    for i in range(math.lcm(cycle, c.nope_layer_interval, step))
  )
  decoder = standard.decoder(c, cycles(layers, c.base_num_decoder_layers))
  return ModelSpec.of(decoder, tiled_vision.tower(c)) if c.use_multimodal else decoder


def weights(spec: DecoderSpec) -> Table:
  """The weights in files of the text model, or of the one with images."""
  if not towers_of(spec):
    return WEIGHTS
  text = renamed(WEIGHTS, "", "language_model.")
  return text | tiled_vision.WEIGHTS


def processors(config: MaxTextConfig) -> dict[str, TiledImages]:
  """What makes inputs of the towers of images."""
  return {"image": tiled_vision.processor(config)}


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class of the text model, or of the one with images."""
  return _WITH_IMAGES if config.use_multimodal else HUGGING_FACE


def _attention(c: MaxTextConfig, use_nope: bool) -> GQA:
  chunk = c.chunk_attn_window_size
  if use_nope:
    temperature = QueryTemperature(chunk) if c.temperature_tuning else None
    return standard.attention(c, rope=None, qk_norm=None, temperature=temperature)
  # Long wavelengths are scaled and short ones are not, without interpolation between them.
  scaled = c.rope_type == RopeType.LLAMA3_1 and c.rope_use_scale
  scaling = LongContextScaling(c.rope_factor, c.original_max_position_embeddings, low=1.0, high=1.0) if scaled else None
  rotary = standard.rope(c, c.head_dim, scaling=scaling, interleaved=True)
  qk_norm = QueryKeyNorm(standard.norm(c, scaled=False), rotated=True) if c.use_qk_norm else None
  return standard.attention(c, rope=rotary, qk_norm=qk_norm, window=chunk, chunked=True)


_OURS, _THEIRS = f"{standard.LAYER}/feed_forward", "model.layers.{layer}.feed_forward"

WEIGHTS = standard.WEIGHTS | {
  f"{_OURS}/router/logits/weight": Weight(f"{_THEIRS}.router.weight", transposed=True),
  **fused(f"{_OURS}/experts", ("gate", "up"), f"{_THEIRS}.experts.gate_up_proj"),
  f"{_OURS}/experts/down/weight": Weight(f"{_THEIRS}.experts.down_proj"),
  **standard.shared_expert("feed_forward.shared_expert"),
  **{
    f"{_OURS}/{name}/weight": Weight(f"{_THEIRS}.{name}_proj.weight", transposed=True)
    for name in ("gate", "up", "down")
  },
}


def _read(entries: Entries) -> dict[str, Any]:
  """Dense layers, if there are any, have their own width; the last layer of each cycle has no RoPE."""
  rope_layers, width = entries.get("no_rope_layers") or [], entries["intermediate_size"]
  interval = entries["no_rope_layer_interval"]
  if rope_layers:  # 1 where a layer has RoPE
    interval = rope_layers.index(0) + 1 if 0 in rope_layers else len(rope_layers) + 1
  mixed = entries["interleave_moe_layer_step"] > 1
  return {
    "base_mlp_dim": entries["intermediate_size_mlp"] if mixed else width,
    "base_moe_mlp_dim": width,
    "nope_layer_interval": interval,
    "inhomogeneous_layer_cycle_interval": interval,
    "shared_experts": 1,
  }


def _layer_types(c: MaxTextConfig) -> list[str]:
  interval = c.nope_layer_interval
  return ["chunked_attention" if (i + 1) % interval else "full_attention" for i in range(c.base_num_decoder_layers)]


def _moe_layers(c: MaxTextConfig) -> list[int]:
  return [i for i in range(c.base_num_decoder_layers) if (i + 1) % c.interleave_moe_layer_step == 0]


HUGGING_FACE = HuggingFace(
  "Llama4ForCausalLM",
  "llama4_text",
  {
    **STANDARD,
    "intermediate_size": expert_width,
    "intermediate_size_mlp": lambda c: c.base_mlp_dim if c.interleave_moe_layer_step > 1 else LEFT_OUT,
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "use_qk_norm": "use_qk_norm",
    "attention_chunk_size": "chunk_attn_window_size",
    "attn_temperature_tuning": "temperature_tuning",
    "floor_scale": "chunk_attn_window_size",
    "no_rope_layers": lambda c: [int((i + 1) % c.nope_layer_interval > 0) for i in range(c.base_num_decoder_layers)],
    "rope_parameters": lambda c: rope(c, high=1.0),
  },
  (*READS, _read, vision.read_rope),
  absent=absent(no_rope_layer_interval=4, interleave_moe_layer_step=1, use_qk_norm=True, attn_temperature_tuning=True),
  expects={"attn_scale": lambda c: 0.1, "layer_types": _layer_types, "moe_layers": _moe_layers},
  prefixes={"language_model.": ""},
  ignored=(r"vision_model\..*", r"multi_modal_projector\..*"),
  towers=tiled_vision.FIELDS,
)
_WITH_IMAGES = replace(
  HUGGING_FACE, prefixes=None, ignored=(), multimodal=Multimodal("Llama4ForConditionalGeneration", "llama4")
)
