"""Mistral 7B: the Llama architecture; version 0.1 has a sliding window, later versions a larger RoPE base."""

from typing import Any

from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, Entries, HuggingFace, absent

spec = standard.dense
WEIGHTS = standard.WEIGHTS


def _window(entries: Entries) -> dict[str, Any]:
  window = entries["sliding_window"]
  return {"attention_type": "local_sliding", "sliding_window_size": window} if window else {}


HUGGING_FACE = HuggingFace(
  "MistralForCausalLM",
  "mistral",
  {**STANDARD, "sliding_window": lambda c: c.sliding_window_size if c.attention_type == "local_sliding" else None},
  (*READS, _window, {"attention_bias": False}),
  absent=absent(sliding_window=4096),
)
