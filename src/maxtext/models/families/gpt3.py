"""GPT-3: learned positions, LayerNorm, biases everywhere, a tied head. Weights have the layout of GPT-2."""

from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.norm import LayerNormSpec
from maxtext.models import standard
from maxtext.models.hugging_face import Entries, HuggingFace
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight, fused


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = LayerNormSpec(c.normalization_layer_epsilon)
  mixer = standard.attention(c, rope=None, bias=True, out_bias=True, fused=c.fused_qkv)
  layer = standard.block(c, mixer, standard.mlp(c, bias=True), norm=norm)
  return standard.decoder(c, cycles((layer,), c.base_num_decoder_layers), final_norm=norm)


_LAYER, _HF_LAYER = standard.LAYER, "transformer.h.{layer}"
_NORMS = {
  f"{_LAYER}/mixer_norm": f"{_HF_LAYER}.ln_1",
  f"{_LAYER}/feed_forward_norm": f"{_HF_LAYER}.ln_2",
  "final_norm": "transformer.ln_f",
}
_PROJECTIONS = {"mixer/qkv": "attn.c_attn", "mixer/out": "attn.c_proj", "feed_forward/up": "mlp.c_fc",
             "feed_forward/down": "mlp.c_proj"}  # fmt: skip

WEIGHTS = {
  "embedding/table": Weight("transformer.wte.weight", table=True),
  "positions/table": Weight("transformer.wpe.weight", table=True),
  **{
    f"{ours}/{leaf}": Weight(f"{theirs}.{name}")
    for ours, theirs in _NORMS.items()
    for leaf, name in {"scale": "weight", "bias": "bias"}.items()
  },
  **{
    f"{_LAYER}/{ours}/{leaf}": Weight(f"{_HF_LAYER}.{theirs}.{leaf}")
    for ours, theirs in _PROJECTIONS.items()
    for leaf in ("weight", "bias")
  },
  **{
    path: weight
    for leaf in ("weight", "bias")
    for path, weight in fused(
      f"{_LAYER}/mixer", ("query", "key", "value"), f"{_HF_LAYER}.attn.c_attn.{leaf}", leaf
    ).items()
  },
}


def _read(entries: Entries) -> dict[str, Any]:
  if entries["activation_function"] not in ("gelu_new", "gelu_pytorch_tanh"):
    raise ConfigError(f"config.json has activation_function={entries['activation_function']}, and here it is gelu_new.")
  heads, longest = entries["n_head"], min(entries["n_positions"], _LONGEST)
  return {"base_num_kv_heads": heads, "head_dim": entries["n_embd"] // heads, "max_target_length": longest}


_LONGEST = 2048  # default max_target_length; it must not exceed the learned positions
_ALWAYS = {"mlp_activations": ["gelu"], "normalize_embedding_logits": False, "fused_qkv": True}
HUGGING_FACE = HuggingFace(
  "GPT2LMHeadModel",
  "gpt2",
  {
    "vocab_size": "vocab_size",
    "n_embd": "base_emb_dim",
    "n_inner": "base_mlp_dim",
    "n_layer": "base_num_decoder_layers",
    "n_head": "base_num_query_heads",
    "n_positions": "trainable_position_size",
    "layer_norm_epsilon": "normalization_layer_epsilon",
    "activation_function": lambda c: "gelu_new",
    "tie_word_embeddings": "logits_via_embedding",
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), lambda c: 0.0),
  },
  (_read, _ALWAYS),
  absent={
    "tie_word_embeddings": True,
    "n_inner": lambda entries: 4 * entries["n_embd"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": lambda entries: entries["n_ctx"],
  },
  expects={
    "scale_attn_weights": lambda c: True,
    "scale_attn_by_inverse_layer_idx": lambda c: False,
    "add_cross_attention": lambda c: False,
  },
  ignored=(r"lm_head\.weight", r".*\.attn\.(masked_)?bias"),
)
