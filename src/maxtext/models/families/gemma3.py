"""Gemma 3 (text): five local layers, then a global one, with rotary positions of their own; queries and keys normed."""

from maxtext.configs import MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.spec import DecoderSpec, cycles

# What queries are divided by the root of, where it is not the head's width; no key says so.
_QUERY_SCALAR = {"gemma3-27b": 168}


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, offset=1.0)
  common = {
    "scale": _QUERY_SCALAR.get(c.model_name, c.head_dim) ** -0.5,
    "qk_norm": QueryKeyNorm(norm) if c.use_qk_norm else None,
  }
  theta = c.local_rope_max_timescale if c.local_rope_max_timescale > 0 else c.rope_max_timescale
  rope = standard.rope(c, c.head_dim, theta=theta, scaling=None)
  near = standard.block(c, standard.attention(c, window=c.sliding_window_size, rope=rope, **common), norm=norm)
  far = standard.block(c, standard.attention(c, **common), norm=norm)
  groups = cycles((near,) * 5 + (far,), c.base_num_decoder_layers)
  return standard.decoder(c, groups, final_norm=norm, **standard.multiplied_embeddings(c))


WEIGHTS = standard.WEIGHTS | standard.SANDWICH
