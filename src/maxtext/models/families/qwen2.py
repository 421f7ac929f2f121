"""Qwen 2.5: biases on query, key and value projections, none on the output's."""

from maxtext.configs import MaxTextConfig
from maxtext.models import standard
from maxtext.models.hugging_face import NO_WINDOW, READS, STANDARD, TIED_HEAD, HuggingFace
from maxtext.models.spec import DecoderSpec


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  return standard.dense(config, out_bias=False)


WEIGHTS = standard.WEIGHTS
HUGGING_FACE = HuggingFace(
  "Qwen2ForCausalLM", "qwen2", STANDARD, (*READS, {"attention_bias": True}), expects=NO_WINDOW, ignored=TIED_HEAD
)
