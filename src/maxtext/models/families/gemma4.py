"""Gemma 4 (text): five local layers, then a global one with wider and fewer heads whose values are its keys.

Norms scale by their weight in float32, queries and keys are normed and so are values, logits are not scaled at all, and
each layer's output is multiplied by a number of its own.
"""

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import GQA, QueryKeyNorm
from maxtext.models import standard
from maxtext.models.hugging_face import GEMMA, TIED_HEAD, HuggingFace, rope
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, scale_in_float32=True)
  layers = tuple(standard.block(c, mixer, norm=norm, output_scale=True) for mixer in (*[_near(c)] * 5, _far(c)))
  groups = cycles(layers, c.base_num_decoder_layers)
  return standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))


def _near(c: MaxTextConfig) -> GQA:
  turns = standard.rope(c, c.head_dim, theta=_near_theta(c), share=c.local_rope_proportion)
  return standard.attention(c, window=c.sliding_window_size, rope=turns, shared_values=False, **_common(c))


def _far(c: MaxTextConfig) -> GQA:
  head_dim, kv_heads = c.global_head_dim or c.head_dim, c.global_num_kv_heads or c.base_num_kv_heads
  turns = standard.rope(c, head_dim, theta=_far_theta(c), share=c.global_rope_proportion)
  return standard.attention(c, head_dim=head_dim, kv_heads=kv_heads, rope=turns, **_common(c))


def _near_theta(c: MaxTextConfig) -> float:
  return c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale


def _far_theta(c: MaxTextConfig) -> float:
  return c.global_rope_max_timescale if c.global_rope_max_timescale > 0 else c.rope_max_timescale


def _common(c: MaxTextConfig) -> dict:
  qk_norm = standard.norm(c, scale_in_float32=True, scaled=c.qk_norm_with_scale)
  return {
    "scale": 1.0,
    "qk_norm": QueryKeyNorm(qk_norm) if c.use_qk_norm else None,
    "value_norm": standard.norm(c, scale_in_float32=True, scaled=c.v_norm_with_scale),
  }


WEIGHTS = (
  standard.WEIGHTS | standard.SANDWICH | {f"{standard.LAYER}/output_scale": Weight("model.layers.{layer}.layer_scalar")}
)
HUGGING_FACE = HuggingFace(
  "Gemma4ForCausalLM",
  "gemma4_text",
  {
    **GEMMA,
    "global_head_dim": lambda c: c.global_head_dim or c.head_dim,
    "num_global_key_value_heads": lambda c: c.global_num_kv_heads or c.base_num_kv_heads,
    "attention_k_eq_v": "share_kv_projections",
    "hidden_size_per_layer_input": lambda c: 0,
    "enable_moe_block": lambda c: False,
    "rope_parameters": lambda c: {
      "sliding_attention": rope(c, theta=_near_theta(c), scaled=False),
      "full_attention": rope(c, theta=_far_theta(c), scaled=False)
      | {"rope_type": "proportional", "partial_rotary_factor": c.global_rope_proportion},
    },
  },
  prefixes={"model.language_model.": "model."},
  ignored=(*TIED_HEAD, r"model\.(vision_tower|embed_vision)\..*"),
)
