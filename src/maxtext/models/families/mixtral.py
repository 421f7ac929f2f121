"""Mixtral: the Mistral layer with experts; the weights of the selected experts sum to 1."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, HuggingFace
from maxtext.models.mixture import expert_width, mixture
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  layer = standard.block(config, standard.attention(config), mixture(config, {"normalize": True}))
  return standard.decoder(config, cycles((layer,), config.base_num_decoder_layers))


_EXPERTS, _HF_EXPERTS = f"{standard.LAYER}/feed_forward", "model.layers.{layer}.block_sparse_moe"

WEIGHTS = standard.WEIGHTS | {
  f"{_EXPERTS}/router/logits/weight": Weight(f"{_HF_EXPERTS}.gate.weight", transposed=True),
  **{
    f"{_EXPERTS}/experts/{ours}/weight": Weight(f"{_HF_EXPERTS}.experts.{{expert}}.{theirs}.weight", transposed=True)
    for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()
  },
}
HUGGING_FACE = HuggingFace(
  "MixtralForCausalLM",
  "mixtral",
  {
    **STANDARD,
    "intermediate_size": expert_width,
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "sliding_window": lambda c: None,
  },
  (*READS, lambda entries: {"base_mlp_dim": entries["intermediate_size"]}, {"attention_bias": False}),
)
