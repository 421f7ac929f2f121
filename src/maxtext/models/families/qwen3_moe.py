"""Qwen 3 with experts in every layer, and the text part of Qwen3-Omni."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import (
  EXPERTS,
  EXPERTS_READS,
  NO_DENSE_LAYERS,
  NO_WINDOW,
  READS,
  STANDARD,
  TIED_HEAD,
  HuggingFace,
  absent,
)
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec, cycles


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  layer = standard.block(config, standard.attention(config), mixture(config))
  return standard.decoder(config, cycles((layer,), config.base_num_decoder_layers))


WEIGHTS = standard.WEIGHTS | standard.EXPERTS
HUGGING_FACE = HuggingFace(
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  {**STANDARD, **EXPERTS, "norm_topk_prob": "norm_topk_prob", "decoder_sparse_step": lambda c: 1},
  (*READS, *EXPERTS_READS, {"use_qk_norm": True}),
  absent=absent(norm_topk_prob=False, num_experts=lambda entries: entries["num_local_experts"]),
  expects={**NO_WINDOW, **NO_DENSE_LAYERS},
  also=("qwen3_omni_moe_text",),
  prefixes={"thinker.model.": "model.", "thinker.lm_head.": "lm_head."},
  ignored=(*TIED_HEAD, r"(thinker\.)?(visual|audio_tower)\..*", r"(talker|code2wav)\..*"),
)
