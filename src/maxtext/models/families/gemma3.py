"""Gemma 3 (text): five local layers, then a global one, with rotary positions of their own; queries and keys normed."""

from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.hugging_face import (
  CAPPED,
  CAPPED_READS,
  TIED_HEAD,
  Entries,
  HuggingFace,
  absent,
  layer_types,
  rope,
  rope_entries,
)
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


def _read(said: Entries) -> dict[str, Any]:
  """What queries are divided by goes by a model's name; positions of local layers were an entry of their own once."""
  scalar, own = said["query_pre_attn_scalar"], "rope_parameters" in said
  names = [name for name, value in _QUERY_SCALAR.items() if value == scalar and said["head_dim"] != scalar]
  near = rope_entries(said, "sliding_attention")["rope_theta"] if own else said.get("rope_local_base_freq", 10000)
  named = {"model_name": names[0], "override_model_config": True} if names else {}
  return named | {"use_qk_norm": True, "local_rope_max_timescale": near}


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
  (*CAPPED_READS, _read),
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
)
