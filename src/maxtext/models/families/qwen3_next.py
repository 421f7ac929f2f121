"""Qwen3-Next: three layers of a gated delta net, then one of gated attention; experts everywhere, one shared."""

from maxtext.configs import MaxTextConfig
from maxtext.models import hybrid
from maxtext.models.hugging_face import HuggingFace
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec
from maxtext.models.weight_table import Table, fused


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  return hybrid.decoder(config, mixture(config, shared_gate=True))


# Rows are interleaved by key head: its query, its key, and the values and gates of its value heads.
_DELTA = fused(
  hybrid.OURS,
  ("query", "key", "value", "gate"),
  f"{hybrid.THEIRS}.in_proj_qkvz.weight",
  transposed=True,
  blocks="query",
) | fused(hybrid.OURS, ("strength", "decay"), f"{hybrid.THEIRS}.in_proj_ba.weight", transposed=True, blocks="query")


def weights(spec: DecoderSpec) -> Table:
  """The weight table, which depends on the kind of each layer."""
  return hybrid.weights(spec, _DELTA)


HUGGING_FACE = HuggingFace(
  "Qwen3NextForCausalLM",
  "qwen3_next",
  {**hybrid.FIELDS, "norm_topk_prob": "norm_topk_prob"},
  hybrid.HYBRID_READS,
  absent=hybrid.ABSENT,
  expects=hybrid.EXPECTS,
  ignored=(r"mtp\..*",),
)
