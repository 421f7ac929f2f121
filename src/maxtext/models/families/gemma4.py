"""Gemma 4: five local layers per global layer. Global layers have wider and fewer heads, and use keys as values.

Norms scale by their weight in float32. Queries, keys and values are normed, attention logits are not scaled, and each
layer has a learned scale on its output. In models with experts, a dense layer runs in parallel with them. Images of any
size are encoded; their tokens see each other both ways in local layers.
"""

from dataclasses import replace
from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import GQA, QueryKeyNorm
from maxtext.layers.dense_and_experts import DenseAndExperts
from maxtext.layers.experts import MoE
from maxtext.media.processed import MediaProcessor
from maxtext.models import standard
from maxtext.models.encoders import pooled_vision, vision
from maxtext.models.hugging_face import (
  CAPPED,
  TIED_HEAD,
  Entries,
  HuggingFace,
  Multimodal,
  absent,
  activation_keys,
  capped_keys,
  layer_types,
  rope,
  rope_entries,
)
from maxtext.models.mixture import expert_width, mixture
from maxtext.models.spec import DecoderSpec, ModelSpec, cycles, towers_of
from maxtext.models.weight_table import Table, Weight, fused, renamed


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm, dense = standard.norm(c, scale_in_float32=True), standard.mlp(c)
  feed_forward = DenseAndExperts(dense, _experts(c), norm) if c.num_experts > 1 else dense
  changes = {"norm": norm, "output_scale": True, "feed_forward_norms_itself": c.num_experts > 1}
  layers = tuple(
    standard.block(c, mixer, feed_forward, **changes) for mixer in (*[_local_attention(c)] * 5, _global_attention(c))
  )
  groups = cycles(layers, c.base_num_decoder_layers)
  decoder = standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))
  return ModelSpec.of(decoder, pooled_vision.tower(c)) if c.use_multimodal else decoder


def weights(spec: DecoderSpec) -> Table:
  """The weights in files of the text model, or of the one with images."""
  if not towers_of(spec):
    return WEIGHTS
  return renamed(WEIGHTS, "model.", "model.language_model.") | pooled_vision.WEIGHTS


def processors(config: MaxTextConfig) -> dict[str, MediaProcessor]:
  """What makes inputs of the tower."""
  return pooled_vision.processors(config)


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class of the text model, or of the one with images."""
  return _WITH_IMAGES if config.use_multimodal else HUGGING_FACE


def _experts(c: MaxTextConfig) -> MoE:
  router = {"normalize": True, "input_norm": c.normalization_layer_epsilon, "expert_scale": True}
  return mixture(c, router, shared=None)


def _local_attention(c: MaxTextConfig) -> GQA:
  rotary = standard.rope(c, c.head_dim, theta=_local_theta(c), share=c.local_rope_proportion)
  return standard.attention(c, window=c.sliding_window_size, rope=rotary, shared_values=False, **_common(c))


def _global_attention(c: MaxTextConfig) -> GQA:
  head_dim, kv_heads = c.global_head_dim or c.head_dim, c.global_num_kv_heads or c.base_num_kv_heads
  rotary = standard.rope(c, head_dim, theta=_global_theta(c), share=c.global_rope_proportion)
  return standard.attention(c, head_dim=head_dim, kv_heads=kv_heads, rope=rotary, sees_spans=False, **_common(c))


def _local_theta(c: MaxTextConfig) -> float:
  return c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale


def _global_theta(c: MaxTextConfig) -> float:
  return c.global_rope_max_timescale if c.global_rope_max_timescale > 0 else c.rope_max_timescale


def _common(c: MaxTextConfig) -> dict:
  qk_norm = standard.norm(c, scale_in_float32=True, scaled=c.qk_norm_with_scale)
  return {
    "scale": 1.0,
    "qk_norm": QueryKeyNorm(qk_norm) if c.use_qk_norm else None,
    "value_norm": standard.norm(c, scale_in_float32=True, scaled=c.v_norm_with_scale),
  }


_OURS, _THEIRS = standard.LAYER, "model.layers.{layer}"
_NORMS = {
  "dense_norm": "pre_feedforward_layernorm",
  "dense_post_norm": "post_feedforward_layernorm_1",
  "experts_norm": "pre_feedforward_layernorm_2",
  "experts_post_norm": "post_feedforward_layernorm_2",
}

WEIGHTS = (
  standard.WEIGHTS
  | standard.SANDWICH
  | {
    f"{_OURS}/output_scale": Weight(f"{_THEIRS}.layer_scalar"),
    **{f"{_OURS}/feed_forward/{ours}/scale": Weight(f"{_THEIRS}.{name}.weight") for ours, name in _NORMS.items()},
    **{
      f"{_OURS}/feed_forward/dense/{name}/weight": Weight(f"{_THEIRS}.mlp.{name}_proj.weight", transposed=True)
      for name in ("gate", "up", "down")
    },
    f"{_OURS}/feed_forward/experts/router/logits/weight": Weight(f"{_THEIRS}.router.proj.weight", transposed=True),
    f"{_OURS}/feed_forward/experts/router/input_scale": Weight(f"{_THEIRS}.router.scale"),
    f"{_OURS}/feed_forward/experts/router/expert_scale": Weight(f"{_THEIRS}.router.per_expert_scale"),
    **fused(
      f"{_OURS}/feed_forward/experts/experts", ("gate", "up"), f"{_THEIRS}.experts.gate_up_proj", transposed=True
    ),
    f"{_OURS}/feed_forward/experts/experts/down/weight": Weight(f"{_THEIRS}.experts.down_proj", transposed=True),
  }
)


def _read(entries: Entries) -> dict[str, Any]:
  """Keys of RoPE, of global layers and of experts. Global sizes are separate entries, or in `per_layer_config`."""
  local, full = rope_entries(entries, "sliding_attention"), rope_entries(entries)
  layer: Entries = next(iter((entries.get("per_layer_config") or {}).values()), {})
  heads = (
    entries.get("num_global_key_value_heads") or layer.get("num_key_value_heads") or entries["num_key_value_heads"]
  )
  keys = {
    "rope_max_timescale": full.get("rope_theta", 1000000),
    "global_rope_max_timescale": full.get("rope_theta", 1000000),
    "local_rope_max_timescale": local.get("rope_theta", 10000),
    "global_rope_proportion": full.get("partial_rotary_factor", 0.25),
    "global_head_dim": entries.get("global_head_dim") or layer.get("head_dim") or entries["head_dim"],
    "global_num_kv_heads": heads,
  }
  if not entries.get("enable_moe_block"):
    return keys
  return keys | {
    "num_experts": entries["num_experts"],
    "num_experts_per_tok": entries["top_k_experts"],
    "base_moe_mlp_dim": entries["moe_intermediate_size"],
  }


_ALWAYS = {
  "normalize_embedding_logits": True,
  "use_post_attn_norm": True,
  "use_post_ffw_norm": True,
  "use_qk_norm": True,
  "v_norm_with_scale": False,
}
HUGGING_FACE = HuggingFace(
  "Gemma4ForCausalLM",
  "gemma4_text",
  {
    **CAPPED,
    "global_head_dim": lambda c: c.global_head_dim or c.head_dim,
    "num_global_key_value_heads": lambda c: c.global_num_kv_heads or c.base_num_kv_heads,
    "attention_k_eq_v": "share_kv_projections",
    "hidden_size_per_layer_input": lambda c: 0,
    "enable_moe_block": lambda c: c.num_experts > 1,
    "num_experts": lambda c: c.num_experts if c.num_experts > 1 else None,
    "top_k_experts": lambda c: c.num_experts_per_tok if c.num_experts > 1 else None,
    "moe_intermediate_size": lambda c: expert_width(c) if c.num_experts > 1 else None,
    "rope_parameters": lambda c: {
      "sliding_attention": rope(c, theta=_local_theta(c), scaled=False),
      "full_attention": rope(c, theta=_global_theta(c), scaled=False)
      | {"rope_type": "proportional", "partial_rotary_factor": c.global_rope_proportion},
    },
  },
  (activation_keys, capped_keys, _read, _ALWAYS, vision.read_rope),
  absent=absent(tie_word_embeddings=True, head_dim=256, sliding_window=512, attention_k_eq_v=False),
  expects={
    "layer_types": layer_types("sliding_attention", lambda c: 6),
    "num_kv_shared_layers": lambda c: 0,
    "use_double_wide_mlp": lambda c: False,
  },
  prefixes={"model.language_model.": "model."},
  ignored=(*TIED_HEAD, r"model\.(vision_tower|embed_vision)\..*"),
  towers=pooled_vision.FIELDS,
)
_WITH_IMAGES = replace(
  HUGGING_FACE,
  fields={**HUGGING_FACE.fields, "use_bidirectional_attention": lambda c: "vision"},
  prefixes=None,
  ignored=TIED_HEAD,
  multimodal=Multimodal("Gemma4ForConditionalGeneration", "gemma4"),
)
