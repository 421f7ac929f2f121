"""Gemma 4 (text): five local layers, then a global one with wider and fewer heads whose values are its keys.

Norms scale by their weight in float32, queries and keys are normed and so are values, logits are not scaled at all, and
each layer's output is multiplied by a number of its own.
"""

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import GQA, QueryKeyNorm
from maxtext.models import standard
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
  theta = c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale
  rope = standard.rope(c, c.head_dim, theta=theta, share=c.local_rope_proportion)
  return standard.attention(c, window=c.sliding_window_size, rope=rope, shared_values=False, **_common(c))


def _far(c: MaxTextConfig) -> GQA:
  head_dim, kv_heads = c.global_head_dim or c.head_dim, c.global_num_kv_heads or c.base_num_kv_heads
  theta = c.global_rope_max_timescale if c.global_rope_max_timescale > 0 else c.rope_max_timescale
  rope = standard.rope(c, head_dim, theta=theta, share=c.global_rope_proportion)
  return standard.attention(c, head_dim=head_dim, kv_heads=kv_heads, rope=rope, **_common(c))


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
