"""Qwen 3, dense: queries and keys are normed per head before RoPE."""

from maxtext.models import standard
from maxtext.models.hugging_face import NO_WINDOW, READS, STANDARD, TIED_HEAD, HuggingFace

spec = standard.dense
WEIGHTS = standard.WEIGHTS
HUGGING_FACE = HuggingFace(
  "Qwen3ForCausalLM", "qwen3", STANDARD, (*READS, {"use_qk_norm": True}), expects=NO_WINDOW, ignored=TIED_HEAD
)
