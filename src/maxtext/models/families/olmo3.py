"""OLMo 3: post-norms only; three local layers, then a global one with YaRN."""

from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, HuggingFace, absent, interval_of, layer_types, rope
from maxtext.models.spec import DecoderSpec, cycles


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, scale_in_float32=True)
  qk_norm = QueryKeyNorm(norm, over="all") if c.use_qk_norm else None
  unscaled = standard.rope(c, c.head_dim, scaling=None)
  local = standard.attention(c, window=c.sliding_window_size, rope=unscaled, qk_norm=qk_norm)
  full = standard.attention(c, qk_norm=qk_norm)
  cycle = (local,) * (c.inhomogeneous_layer_cycle_interval - 1) + (full,)
  norms: dict[str, Any] = {"norm": None, "mixer_post_norm": norm, "feed_forward_post_norm": norm}
  layers = tuple(standard.block(c, mixer, **norms) for mixer in cycle)
  return standard.decoder(c, cycles(layers, c.base_num_decoder_layers), final_norm=norm)


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
HUGGING_FACE = HuggingFace(
  "Olmo3ForCausalLM",
  "olmo3",
  {
    **STANDARD,
    "sliding_window": "sliding_window_size",
    "layer_types": layer_types("sliding_attention", "inhomogeneous_layer_cycle_interval"),
    "rope_parameters": lambda c: {"sliding_attention": rope(c, scaled=False), "full_attention": rope(c)},
  },
  (
    *READS,
    lambda entries: {"inhomogeneous_layer_cycle_interval": interval_of(entries.get("layer_types"), 4)},
    {"use_qk_norm": True},
  ),
  absent=absent(sliding_window=4096),
)
