"""Gemma 1: norms scale by 1 + weight, embeddings are scaled by the square root of the width."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, TIED_HEAD, HuggingFace, absent
from maxtext.models.spec import DecoderSpec, cycles


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  norm = standard.norm(config, offset=1.0)
  layer = standard.block(config, standard.attention(config), norm=norm)
  groups = cycles((layer,), config.base_num_decoder_layers)
  return standard.decoder(config, groups, final_norm=norm, **standard.multiplied_embeddings(config))


WEIGHTS = standard.WEIGHTS
HUGGING_FACE = HuggingFace(
  "GemmaForCausalLM",
  "gemma",
  STANDARD,
  (*READS, {"normalize_embedding_logits": True}),
  absent=absent(tie_word_embeddings=True, head_dim=256),
  ignored=TIED_HEAD,
)
