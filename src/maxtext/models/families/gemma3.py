"""Gemma 3 (text): five local layers per global layer, each kind with its own RoPE; queries and keys are normed."""

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
  return standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))


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


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
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
