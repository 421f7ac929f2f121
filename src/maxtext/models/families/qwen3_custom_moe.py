"""A Qwen 3 variant with one residual per layer: attention into a bottleneck, experts there, a projection back."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.bottleneck import Bottleneck
from maxtext.models import standard
from maxtext.models.hugging_face import EXPERTS, EXPERTS_READS, READS, STANDARD, HuggingFace
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  narrow = c.attention_output_dim if c.attention_output_dim > 0 else c.base_emb_dim
  if c.moe_expert_input_dim not in (-1, narrow):
    raise ConfigError(
      f"moe_expert_input_dim={c.moe_expert_input_dim} must be the attention_output_dim={c.attention_output_dim}, "
      f"which is what enters the experts."
    )
  mixer = standard.attention(c, out_width=narrow)
  layer = Bottleneck(mixer, mixture(c), standard.norm(c))
  return standard.decoder(c, cycles((layer,), c.base_num_decoder_layers))


# No public model has this architecture. The names follow Qwen 3 MoE.
WEIGHTS = (
  standard.WEIGHTS
  | standard.EXPERTS
  | {f"{standard.LAYER}/out/weight": Weight("model.layers.{layer}.mlp.out_proj.weight", transposed=True)}
)
HUGGING_FACE = HuggingFace(
  "Qwen3CustomMoeForCausalLM",
  "qwen3_custom_moe",
  {**STANDARD, **EXPERTS, "norm_topk_prob": "norm_topk_prob", "attention_output_size": "attention_output_dim"},
  (*READS, *EXPERTS_READS, {"use_qk_norm": True}),
)
