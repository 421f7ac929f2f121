"""Gemma 2: local and global layers in turn, a norm on either side of each branch, soft caps on both kinds of logits."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import CAPPED, TIED_HEAD, HuggingFace
from maxtext.models.spec import DecoderSpec, cycles

# What queries are divided by the root of, where it is not the head's width; no key says so.
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


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
HUGGING_FACE = HuggingFace(
  "Gemma2ForCausalLM", "gemma2", {**CAPPED, "query_pre_attn_scalar": _query_scalar}, ignored=TIED_HEAD
)
