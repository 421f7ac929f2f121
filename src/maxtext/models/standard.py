"""What most families share: blocks built from the keys, and the usual Hugging Face names of their weights.

A family uses these functions as they are, or passes changes for what no key describes.
"""

import math
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.layers.attention import GQA, QueryKeyNorm
from maxtext.layers.block import Block, FeedForward, Mixer
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.parameter_paths import ANY_LAYER
from maxtext.layers.rope import LinearScaling, LongContextScaling, RotaryEmbedding, Scaling, YarnScaling
from maxtext.models.spec import DecoderSpec, Group, cycles
from maxtext.models.weight_table import Weight


def decoder(config: MaxTextConfig, groups: tuple[Group, ...], **changes: Any) -> DecoderSpec:
  """The decoder with these groups of layers; `changes` replace fields of the spec."""
  c = config
  tied = c.logits_via_embedding
  values: dict[str, Any] = {
    "vocab": c.vocab_size,
    "width": c.base_emb_dim,
    "groups": groups,
    "final_norm": norm(c),
    "tied": tied,
    "logit_scale": c.base_emb_dim**-0.5 if tied and c.normalize_embedding_logits else 1.0,
    "logit_cap": c.final_logits_soft_cap or None,
    "learned_positions": c.trainable_position_size if c.trainable_position_size > 0 else None,
    "sinusoidal_positions": c.use_untrainable_positional_embedding,
  }
  return DecoderSpec(**(values | changes))


def multiplied_embeddings(config: MaxTextConfig) -> dict[str, float]:
  """Changes for a decoder whose embeddings are scaled by the square root of the width.

  A tied head uses the scaled table as well, and normalize_embedding_logits divides its logits by the same factor.
  """
  root = config.base_emb_dim**0.5
  plain = config.normalize_embedding_logits or not config.logits_via_embedding
  return {"embedding_scale": root, "logit_scale": 1.0 if plain else root}


def dense(config: MaxTextConfig, **attention_changes: Any) -> DecoderSpec:
  """A decoder of identical layers: attention and a dense feed-forward layer."""
  layer = block(config, attention(config, **attention_changes))
  return decoder(config, cycles((layer,), config.base_num_decoder_layers))


def block(config: MaxTextConfig, mixer: Mixer, feed_forward: FeedForward | None = None, **changes: Any) -> Block:
  """A layer, with post-norms if the keys enable them."""
  layer_norm = changes.setdefault("norm", norm(config))
  post: dict[str, Any] = {
    "mixer_post_norm": layer_norm if config.use_post_attn_norm else None,
    "feed_forward_post_norm": layer_norm if config.use_post_ffw_norm else None,
  }
  return Block(mixer, feed_forward or mlp(config), **(post | changes))


def attention(config: MaxTextConfig, **changes: Any) -> GQA:
  """The attention that the keys describe; `changes` replace fields of its spec."""
  c = config
  if c.attention_type == "mla":
    raise ConfigError(f"attention_type=mla is not what decoder_block={c.decoder_block.value} has: leave it out.")
  window = _WINDOWS.get(c.attention_type)
  values: dict[str, Any] = {
    "heads": c.base_num_query_heads,
    "kv_heads": c.base_num_kv_heads,
    "head_dim": c.head_dim,
    "window": getattr(c, window) if window else None,
    "chunked": c.attention_type == "chunk",
    "cap": c.attn_logits_soft_cap or None,
    "bias": c.attention_bias,
    "out_bias": c.attention_bias,
    "qk_norm": QueryKeyNorm(norm(c, scaled=c.qk_norm_with_scale)) if c.use_qk_norm else None,
    "shared_values": c.share_kv_projections,
    "sinks": c.attention_sink,
  }
  if "rope" not in changes:
    changes["rope"] = rope(c, changes.get("head_dim", c.head_dim))
  return GQA(**(values | changes))


# The key of the window length of each attention type.
_WINDOWS = {"local_sliding": "sliding_window_size", "chunk": "chunk_attn_window_size"}


def mlp(config: MaxTextConfig, **changes: Any) -> MLP:
  """The dense feed-forward layer."""
  c = config
  values: dict[str, Any] = {
    "width": c.base_mlp_dim,
    "activation": c.mlp_activations[0],
    "gated": len(c.mlp_activations) == 2,
    "limit": c.mlp_activations_limit if c.mlp_activations_limit > 0 else None,
    "bias": c.mlp_bias,
  }
  return MLP(**(values | changes))


def norm(config: MaxTextConfig, **changes: Any) -> RMSNormSpec:
  """The norm of every layer."""
  return RMSNormSpec(config.normalization_layer_epsilon, **changes)


def rope(config: MaxTextConfig, head_dim: int, **changes: Any) -> RotaryEmbedding:
  """RoPE for heads of width `head_dim`, of which partial_rotary_factor is rotated."""
  c = config
  values: dict[str, Any] = {
    "head_dim": int(head_dim * c.partial_rotary_factor),
    "theta": c.rope_max_timescale,
    "shortest": c.rope_min_timescale,
    "interleaved": c.rope_type == RopeType.YARN and c.rope_interleave,
  }
  if "scaling" not in changes:
    changes["scaling"] = scaling(c)
  return RotaryEmbedding(**(values | changes))


def scaling(config: MaxTextConfig) -> Scaling | None:
  """RoPE scaling for contexts longer than the original training length; None if there is none."""
  c = config
  if c.rope_type == RopeType.LLAMA3_1 and c.rope_use_scale:
    return LongContextScaling(c.rope_factor, c.original_max_position_embeddings)
  if c.rope_type == RopeType.YARN:
    multiplier = 0.1 * math.log(c.rope_factor) + 1.0 if c.rope_attention_scaling else 1.0
    return YarnScaling(
      c.rope_factor, c.original_max_position_embeddings, c.beta_fast, c.beta_slow, c.rope_truncate, multiplier
    )
  return LinearScaling(c.rope_linear_scaling_factor) if c.rope_linear_scaling_factor != 1.0 else None


LAYER = ANY_LAYER
_HF_LAYER = "model.layers.{layer}"

WEIGHTS = {
  "embedding/table": Weight("model.embed_tokens.weight", table=True),
  f"{LAYER}/mixer_norm/scale": Weight(f"{_HF_LAYER}.input_layernorm.weight"),
  **{
    f"{LAYER}/mixer/{ours}/{leaf}": Weight(f"{_HF_LAYER}.self_attn.{theirs}_proj.{leaf}", transposed=leaf == "weight")
    for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
    for leaf in ("weight", "bias")
  },
  f"{LAYER}/mixer/query_norm/scale": Weight(f"{_HF_LAYER}.self_attn.q_norm.weight"),
  f"{LAYER}/mixer/key_norm/scale": Weight(f"{_HF_LAYER}.self_attn.k_norm.weight"),
  f"{LAYER}/mixer/sinks": Weight(f"{_HF_LAYER}.self_attn.sinks"),
  f"{LAYER}/feed_forward_norm/scale": Weight(f"{_HF_LAYER}.post_attention_layernorm.weight"),
  **{
    f"{LAYER}/feed_forward/{ours}/{leaf}": Weight(f"{_HF_LAYER}.mlp.{ours}_proj.{leaf}", transposed=leaf == "weight")
    for ours in ("gate", "up", "down")
    for leaf in ("weight", "bias")
  },
  "final_norm/scale": Weight("model.norm.weight"),
  "head/weight": Weight("lm_head.weight", transposed=True),
}

# Names of the norms in layers with pre- and post-norms.
SANDWICH = {
  f"{LAYER}/mixer_post_norm/scale": Weight(f"{_HF_LAYER}.post_attention_layernorm.weight"),
  f"{LAYER}/feed_forward_norm/scale": Weight(f"{_HF_LAYER}.pre_feedforward_layernorm.weight"),
  f"{LAYER}/feed_forward_post_norm/scale": Weight(f"{_HF_LAYER}.post_feedforward_layernorm.weight"),
}

# A mixture of experts with one tensor per expert.
EXPERTS = {
  f"{LAYER}/feed_forward/router/logits/weight": Weight(f"{_HF_LAYER}.mlp.gate.weight", transposed=True),
  **{
    f"{LAYER}/feed_forward/experts/{ours}/weight": Weight(
      f"{_HF_LAYER}.mlp.experts.{{expert}}.{ours}_proj.weight", transposed=True
    )
    for ours in ("gate", "up", "down")
  },
}


def shared_expert(name: str) -> dict[str, Weight]:
  """The weights of the shared expert and of its optional gate."""
  names = {f"shared/{part}": f"{name}.{part}_proj" for part in ("gate", "up", "down")} | {"shared_gate": f"{name}_gate"}
  return {
    f"{LAYER}/feed_forward/{ours}/weight": Weight(f"{_HF_LAYER}.{theirs}.weight", transposed=True)
    for ours, theirs in names.items()
  }
