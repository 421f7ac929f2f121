"""GPT-OSS: local and global layers in turn, a sink per head, biases everywhere, experts with a clamped activation."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.experts import expert_width, mixture
from maxtext.models.hugging_face import STANDARD, HuggingFace
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight, fused


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  norm = standard.norm(c, scale_in_float32=True)
  # The router's bias is one of its logits, and so counts in the weights; a softmax over the chosen is over all of them.
  experts = mixture(c, {"bias": c.routed_bias, "selection_bias": False, "normalize": True})
  near, far = standard.attention(c, window=c.sliding_window_size), standard.attention(c)
  cycle = (near,) * (c.inhomogeneous_layer_cycle_interval - 1) + (far,)
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
    "layer_types": lambda c: [
      "sliding_attention" if (layer + 1) % c.inhomogeneous_layer_cycle_interval else "full_attention"
      for layer in range(c.base_num_decoder_layers)
    ],
    "swiglu_limit": "mlp_activations_limit",
  },
)
