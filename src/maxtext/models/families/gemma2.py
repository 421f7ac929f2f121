"""Gemma 2: alternating local and global layers, pre- and post-norms, soft caps on attention and final logits."""

from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import CAPPED, CAPPED_READS, TIED_HEAD, Entries, HuggingFace, absent, layer_types
from maxtext.models.spec import DecoderSpec, cycles

# query_pre_attn_scalar of the models where it is not head_dim; there is no key for it.
_QUERY_SCALAR = {"gemma2-27b": 144}


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, offset=1.0)
  scale = _query_scalar(c) ** -0.5
  windows = (c.sliding_window_size, None)
  layers = tuple(standard.block(c, standard.attention(c, window=w, scale=scale), norm=norm) for w in windows)
  groups = cycles(layers, c.base_num_decoder_layers)
  return standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))


def _query_scalar(c: MaxTextConfig) -> int:
  return _QUERY_SCALAR.get(c.model_name, c.head_dim)


def _named_scalar(entries: Entries) -> dict[str, Any]:
  """Sets model_name to the model with this scalar if the scalar is not head_dim."""
  scalar = entries["query_pre_attn_scalar"]
  names = [name for name, value in _QUERY_SCALAR.items() if value == scalar and entries["head_dim"] != scalar]
  return {"model_name": names[0], "override_model_config": True} if names else {}


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
HUGGING_FACE = HuggingFace(
  "Gemma2ForCausalLM",
  "gemma2",
  {**CAPPED, "query_pre_attn_scalar": _query_scalar},
  (*CAPPED_READS, _named_scalar),
  absent=absent(
    tie_word_embeddings=True,
    head_dim=256,
    sliding_window=4096,
    query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
  ),
  expects={"layer_types": layer_types("sliding_attention", lambda c: 2)},
  ignored=TIED_HEAD,
)
