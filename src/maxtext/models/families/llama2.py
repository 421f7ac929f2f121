"""Llama 2, 3, 3.1 and 3.3: pre-norm, grouped-query attention, half-split RoPE, gated feed-forward."""

from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, HuggingFace, absent

spec = standard.dense
WEIGHTS = standard.WEIGHTS
HUGGING_FACE = HuggingFace(
  "LlamaForCausalLM", "llama", {**STANDARD, "mlp_bias": "mlp_bias"}, READS, absent=absent(mlp_bias=False)
)
