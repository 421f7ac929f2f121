"""Llama 2, 3, 3.1 and 3.3: pre-norm, grouped-query attention, half-split rotary positions, gated feed-forward."""

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import Norm
from maxtext.layers.rope import LongContext, Rope
from maxtext.models.spec import DecoderSpec, Group
from maxtext.models.weight_table import Weight


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = Norm(c.normalization_layer_epsilon)
  scaled = c.rope_type == RopeType.LLAMA3_1
  scaling = LongContext(c.rope_factor, c.original_max_position_embeddings) if scaled else None
  rope = Rope(c.head_dim, c.rope_max_timescale, scaling)
  mixer = GQA(c.base_num_query_heads, c.base_num_kv_heads, c.head_dim, rope, c.sliding_window_size or None)
  mlp = MLP(c.base_mlp_dim, c.mlp_activations[0], gated=len(c.mlp_activations) == 2)
  tied = c.logits_via_embedding
  return DecoderSpec(
    vocab=c.vocab_size,
    width=c.base_emb_dim,
    groups=(Group((Block(mixer, mlp, norm),), c.base_num_decoder_layers),),
    final_norm=norm,
    tied=tied,
    logit_scale=c.base_emb_dim**-0.5 if tied and c.normalize_embedding_logits else 1.0,
    logit_cap=c.final_logits_soft_cap or None,
  )


_LAYER = "groups/0/layers/0"

WEIGHTS = {
  "embedding/table": Weight("model.embed_tokens.weight"),
  f"{_LAYER}/mixer_norm/scale": Weight("model.layers.{layer}.input_layernorm.weight"),
  f"{_LAYER}/mixer/query/weight": Weight("model.layers.{layer}.self_attn.q_proj.weight", transposed=True),
  f"{_LAYER}/mixer/key/weight": Weight("model.layers.{layer}.self_attn.k_proj.weight", transposed=True),
  f"{_LAYER}/mixer/value/weight": Weight("model.layers.{layer}.self_attn.v_proj.weight", transposed=True),
  f"{_LAYER}/mixer/out/weight": Weight("model.layers.{layer}.self_attn.o_proj.weight", transposed=True),
  f"{_LAYER}/feed_forward_norm/scale": Weight("model.layers.{layer}.post_attention_layernorm.weight"),
  f"{_LAYER}/feed_forward/gate/weight": Weight("model.layers.{layer}.mlp.gate_proj.weight", transposed=True),
  f"{_LAYER}/feed_forward/up/weight": Weight("model.layers.{layer}.mlp.up_proj.weight", transposed=True),
  f"{_LAYER}/feed_forward/down/weight": Weight("model.layers.{layer}.mlp.down_proj.weight", transposed=True),
  "final_norm/scale": Weight("model.norm.weight"),
  "head/weight": Weight("lm_head.weight", transposed=True),
}
