"""Gemma 3 (text): five local layers, then a global one, with rotary positions of their own; queries and keys normed."""

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.hugging_face import CAPPED, TIED_HEAD, HuggingFace, rope
from maxtext.models.spec import DecoderSpec, cycles

# What queries are divided by the root of, where it is not the head's width; no key says so.
_QUERY_SCALAR = {"gemma3-27b": 168}


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, offset=1.0)
  common = {
    "scale": _query_scalar(c) ** -0.5,
    "qk_norm": QueryKeyNorm(norm) if c.use_qk_norm else None,
  }
  turns = standard.rope(c, c.head_dim, theta=_near_theta(c), scaling=None)
  near = standard.block(c, standard.attention(c, window=c.sliding_window_size, rope=turns, **common), norm=norm)
  far = standard.block(c, standard.attention(c, **common), norm=norm)
  groups = cycles((near,) * 5 + (far,), c.base_num_decoder_layers)
  return standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))


def _query_scalar(c: MaxTextConfig) -> int:
  return _QUERY_SCALAR.get(c.model_name, c.head_dim)


def _near_theta(c: MaxTextConfig) -> float:
  return c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
HUGGING_FACE = HuggingFace(
  "Gemma3ForCausalLM",
  "gemma3_text",
  {
    **CAPPED,
    "query_pre_attn_scalar": _query_scalar,
    "rope_parameters": lambda c: {
      "sliding_attention": rope(c, theta=_near_theta(c), scaled=False),
      "full_attention": rope(c),
    },
  },
  prefixes={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
  ignored=(*TIED_HEAD, r"vision_tower\..*", r"multi_modal_projector\..*"),
)
