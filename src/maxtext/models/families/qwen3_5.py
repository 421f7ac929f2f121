"""Qwen3.5 (text): as Qwen3-Next, with separate delta net projections and always normalised expert weights."""

from maxtext.configs import MaxTextConfig
from maxtext.models import hybrid
from maxtext.models.hugging_face import HuggingFace
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec
from maxtext.models.weight_table import Table, Weight, fused


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  return hybrid.decoder(config, mixture(config, {"normalize": True}, shared_gate=True))


_DELTA = {
  **fused(hybrid.OURS, ("query", "key", "value"), f"{hybrid.THEIRS}.in_proj_qkv.weight", transposed=True),
  **{
    f"{hybrid.OURS}/{ours}/weight": Weight(f"{hybrid.THEIRS}.in_proj_{theirs}.weight", transposed=True)
    for ours, theirs in {"gate": "z", "strength": "b", "decay": "a"}.items()
  },
}


def weights(spec: DecoderSpec) -> Table:
  """The weight table, which depends on the kind of each layer."""
  return hybrid.weights(spec, _DELTA)


HUGGING_FACE = HuggingFace(
  "Qwen3_5MoeForCausalLM",
  "qwen3_5_moe_text",
  hybrid.FIELDS,
  hybrid.HYBRID_READS,
  absent=hybrid.ABSENT,
  expects=hybrid.EXPECTS,
  prefixes={"model.language_model.": "model."},
  ignored=(
    r"mtp\..*",
    r"model\.visual\..*",
  ),
)
