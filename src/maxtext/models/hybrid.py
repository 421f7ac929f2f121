"""Hybrid decoders: gated delta net layers with a gated attention layer at a fixed interval."""

from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import QueryKeyNorm
from maxtext.layers.block import FeedForward
from maxtext.layers.delta_net import DeltaNet
from maxtext.models import standard
from maxtext.models.hugging_face import (
  EXPERTS,
  EXPERTS_READS,
  NO_DENSE_LAYERS,
  READS,
  STANDARD,
  Entries,
  Field,
  absent,
  interval_of,
  layer_types,
  rope,
  rope_entries,
)
from maxtext.models.mixture import expert_width
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Table, Weight, fused, of_layers


def decoder(config: MaxTextConfig, feed_forward: FeedForward, **attention_changes: Any) -> DecoderSpec:
  """The decoder with this feed-forward layer; `attention_changes` replace fields of attention.

  All norms except the delta net's own scale by 1 + weight.
  """
  c = config
  norm = standard.norm(c, offset=1.0)
  delta = DeltaNet(
    key_heads=c.gdn_num_key_heads,
    value_heads=c.gdn_num_value_heads,
    key_dim=c.gdn_key_head_dim,
    v_head_dim=c.gdn_value_head_dim,
    span=c.gdn_conv_kernel_dim,
    chunk=c.gdn_chunk_size,
    norm=standard.norm(c),
    unit_keys=c.use_qk_norm_in_gdn,
  )
  qk_norm = QueryKeyNorm(norm) if c.use_qk_norm else None
  attention = standard.attention(c, gated=True, qk_norm=qk_norm, **attention_changes)
  mixers = (delta,) * (c.inhomogeneous_layer_cycle_interval - 1) + (attention,)
  layers = tuple(standard.block(c, mixer, feed_forward, norm=norm) for mixer in mixers)
  return standard.decoder(c, cycles(layers, c.base_num_decoder_layers), final_norm=norm)


OURS, THEIRS = "mixer", "model.layers.{layer}.linear_attn"

_ATTENTION = fused(
  OURS, ("query", "gate"), "model.layers.{layer}.self_attn.q_proj.weight", transposed=True, blocks="query"
)
_DELTA = {
  **fused(OURS, ("query_conv", "key_conv", "value_conv"), f"{THEIRS}.conv1d.weight", convolution=True),
  f"{OURS}/log_rate": Weight(f"{THEIRS}.A_log"),
  f"{OURS}/decay_bias": Weight(f"{THEIRS}.dt_bias"),
  f"{OURS}/norm/scale": Weight(f"{THEIRS}.norm.weight"),
  f"{OURS}/out/weight": Weight(f"{THEIRS}.out_proj.weight", transposed=True),
}


def weights(spec: DecoderSpec, delta: Table) -> Table:
  """The weight table; `delta` holds the delta net's projections."""
  own = of_layers(spec, lambda layer: {**_DELTA, **delta} if isinstance(layer.mixer, DeltaNet) else _ATTENTION)
  return own | standard.WEIGHTS | standard.EXPERTS | standard.shared_expert("mlp.shared_expert")


def rope_of(config: MaxTextConfig) -> dict[str, Any]:
  """`rope_parameters`."""
  return rope(config) | {"partial_rotary_factor": config.partial_rotary_factor}


FIELDS: dict[str, Field] = {
  **STANDARD,
  **EXPERTS,
  "shared_expert_intermediate_size": lambda c: expert_width(c) * c.shared_experts,
  "linear_num_key_heads": "gdn_num_key_heads",
  "linear_num_value_heads": "gdn_num_value_heads",
  "linear_key_head_dim": "gdn_key_head_dim",
  "linear_value_head_dim": "gdn_value_head_dim",
  "linear_conv_kernel_dim": "gdn_conv_kernel_dim",
  "full_attention_interval": "inhomogeneous_layer_cycle_interval",
  "rope_parameters": rope_of,
}


def _read(entries: Entries) -> dict[str, Any]:
  """Keys of partial RoPE and of the shared expert, whose width is a multiple of an expert's."""
  shared, rest = divmod(entries["shared_expert_intermediate_size"], entries["moe_intermediate_size"])
  if rest:
    raise ConfigError(
      f"config.json has shared_expert_intermediate_size={entries['shared_expert_intermediate_size']}, and here it is a "
      f"multiple of moe_intermediate_size={entries['moe_intermediate_size']}."
    )
  share = rope_entries(entries).get("partial_rotary_factor") or entries["partial_rotary_factor"]
  return {"shared_experts": shared, "partial_rotary_factor": share}


HYBRID_READS = (*READS, *EXPERTS_READS, _read, {"use_qk_norm": True})
ABSENT = absent(
  norm_topk_prob=True,
  partial_rotary_factor=0.25,
  full_attention_interval=lambda entries: interval_of(entries.get("layer_types"), 4),
  intermediate_size=lambda entries: entries["moe_intermediate_size"],
)
EXPECTS: dict[str, Field] = {
  **NO_DENSE_LAYERS,
  "decoder_sparse_step": lambda c: 1,
  "layer_types": layer_types("linear_attention", "inhomogeneous_layer_cycle_interval"),
}
