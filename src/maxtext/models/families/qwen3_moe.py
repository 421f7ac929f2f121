"""Qwen 3 with experts in every layer, and the text part of Qwen3-Omni."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.experts import mixture
from maxtext.models.spec import DecoderSpec, cycles


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  layer = standard.block(config, standard.attention(config), mixture(config))
  return standard.decoder(config, cycles((layer,), config.base_num_decoder_layers))


WEIGHTS = standard.WEIGHTS | standard.EXPERTS
