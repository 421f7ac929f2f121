"""GPT-OSS: alternating local and global layers, attention sinks, biases everywhere, clamped expert activations."""

from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import STANDARD, Entries, HuggingFace, absent, interval_of, layer_types, rope_keys
from maxtext.models.mixture import expert_width, mixture
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight, fused


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, scale_in_float32=True)
  # The router's bias is added to its logits, so it affects the weights. Normalizing the selected experts' softmax over
  # all experts is the same as a softmax over the selected ones.
  experts = mixture(c, {"bias": c.routed_bias, "selection_bias": False, "normalize": True})
  local, full = standard.attention(c, window=c.sliding_window_size), standard.attention(c)
  cycle = (local,) * (c.inhomogeneous_layer_cycle_interval - 1) + (full,)
  layers = tuple(standard.block(c, mixer, experts, norm=norm) for mixer in cycle)
  return standard.decoder(c, cycles(layers, c.base_num_decoder_layers), final_norm=norm)


_EXPERTS, _HF_EXPERTS = f"{standard.LAYER}/feed_forward", "model.layers.{layer}.mlp"

WEIGHTS = standard.WEIGHTS | {
  f"{_EXPERTS}/router/logits/weight": Weight(f"{_HF_EXPERTS}.router.weight", transposed=True),
  f"{_EXPERTS}/router/bias": Weight(f"{_HF_EXPERTS}.router.bias"),
  **fused(f"{_EXPERTS}/experts", ("gate", "up"), f"{_HF_EXPERTS}.experts.gate_up_proj", blocks="each"),
  **fused(f"{_EXPERTS}/experts", ("gate", "up"), f"{_HF_EXPERTS}.experts.gate_up_proj_bias", "bias", blocks="each"),
  f"{_EXPERTS}/experts/down/weight": Weight(f"{_HF_EXPERTS}.experts.down_proj"),
  f"{_EXPERTS}/experts/down/bias": Weight(f"{_HF_EXPERTS}.experts.down_proj_bias"),
}


def _read(entries: Entries) -> dict[str, Any]:
  interval = interval_of(entries.get("layer_types"), 2)
  return {"base_mlp_dim": entries["intermediate_size"], "inhomogeneous_layer_cycle_interval": interval}


_ALWAYS = {
  "mlp_activations": ["sigmoid", "linear"],
  "attention_sink": True,
  "mlp_bias": True,
  "routed_bias": True,
  "normalize_embedding_logits": False,
}
HUGGING_FACE = HuggingFace(
  "GptOssForCausalLM",
  "gpt_oss",
  {
    **STANDARD,
    "intermediate_size": expert_width,
    "hidden_act": lambda c: "silu",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "sliding_window": "sliding_window_size",
    "layer_types": layer_types("sliding_attention", "inhomogeneous_layer_cycle_interval"),
    "swiglu_limit": "mlp_activations_limit",
  },
  (rope_keys, _read, _ALWAYS),
  absent=absent(head_dim=64, attention_bias=True, sliding_window=128, swiglu_limit=7.0),
  expects={"swiglu_alpha": lambda c: 1.702},
)
