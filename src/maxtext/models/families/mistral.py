"""Mistral 7B: as the Llamas; version 0.1 has a sliding window, later ones a longer base of rotary positions."""

from maxtext.models import standard
from maxtext.models.hugging_face import STANDARD, HuggingFace

spec = standard.dense
WEIGHTS = standard.WEIGHTS
HUGGING_FACE = HuggingFace(
  "MistralForCausalLM",
  "mistral",
  {**STANDARD, "sliding_window": lambda c: c.sliding_window_size if c.attention_type == "local_sliding" else None},
)
