"""DeepSeek 2, 3 and 3.2, and Kimi K2: multi-head latent attention (MLA), dense layers followed by MoE layers.

Version 3.2 attends only to the keys that an indexer selects.
"""

import math
from dataclasses import replace
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.layers.indexer import Indexer
from maxtext.layers.mla import MLA
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.parameter_paths import ANY_PREDICTION
from maxtext.models import standard
from maxtext.models.hugging_face import READS, STANDARD, Entries, Field, HuggingFace, absent, rope, rope_entries
from maxtext.models.mixture import expert_width, mixture
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Table, Weight


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  mixer, dense = _attention(c), c.first_num_dense_layers
  if dense > c.base_num_decoder_layers:
    raise ConfigError(
      f"first_num_dense_layers={dense} is more than base_num_decoder_layers={c.base_num_decoder_layers}."
    )
  first = cycles((standard.block(c, mixer),), dense)
  experts = standard.block(c, mixer, mixture(c, {"float32": True}))
  return standard.decoder(c, first + cycles((experts,), c.base_num_decoder_layers - dense))


def _attention(c: MaxTextConfig) -> MLA:
  if c.attention_type != "mla":
    raise ConfigError(f"attention_type={c.attention_type} is not what this family has: write attention_type=mla.")
  if c.base_num_kv_heads != c.base_num_query_heads:
    raise ConfigError(
      f"base_num_kv_heads={c.base_num_kv_heads} must be base_num_query_heads={c.base_num_query_heads} with "
      f"attention_type=mla: each head has its own projection of the latent."
    )
  # YaRN's mscale, whose square multiplies the attention scale.
  correction = 0.1 * c.mscale * math.log(c.rope_factor) + 1.0
  indexer = Indexer(
    c.indexer_n_heads,
    c.indexer_head_dim,
    c.indexer_topk,
    standard.rope(c, c.qk_rope_head_dim, interleaved=False),
    c.indexer_loss_scaling_factor,
    c.indexer_sparse_training,
  )
  return MLA(
    heads=c.base_num_query_heads,
    qk_nope_head_dim=c.qk_nope_head_dim,
    v_head_dim=c.v_head_dim,
    kv_lora_rank=c.kv_lora_rank,
    q_lora_rank=c.q_lora_rank or None,
    rope=standard.rope(c, c.qk_rope_head_dim),
    scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * correction**2,
    norm=RMSNormSpec(1e-6),
    latent_cache=not c.mla_naive_kvcache,
    indexer=indexer if c.use_indexer else None,
  )


_OURS, _THEIRS = standard.LAYER, "model.layers.{layer}"
_PROJECTIONS = {
  "query_down": "q_a_proj",
  "kv_down": "kv_a_proj_with_mqa",
  "kv": "kv_b_proj",
  "indexer/query": "indexer.wq_b",
  "indexer/key": "indexer.wk",
  "indexer/weights": "indexer.weights_proj",
}
_VECTORS = {
  "query_norm/scale": "q_a_layernorm.weight",
  "kv_norm/scale": "kv_a_layernorm.weight",
  "indexer/key_norm/scale": "indexer.k_norm.weight",
  "indexer/key_norm/bias": "indexer.k_norm.bias",
}


# MTP layers combine the hidden state with the embedding of the next token. They share the embedding and the head.
_MTP_LAYER = f"{ANY_PREDICTION}/stack/layers/*"
_JOIN = {
  "token_norm/scale": Weight(f"{_THEIRS}.enorm.weight"),
  "hidden_norm/scale": Weight(f"{_THEIRS}.hnorm.weight"),
  "join/weight": Weight(f"{_THEIRS}.eh_proj.weight", transposed=True),
  "norm/scale": Weight(f"{_THEIRS}.shared_head.norm.weight"),
}


def weights(spec: DecoderSpec) -> Table:
  """The weight table; the query projection has another name if queries have a latent."""
  latent = any(isinstance(b.mixer, MLA) and b.mixer.q_lora_rank is not None for g in spec.groups for b in g.cycle)
  projections = _PROJECTIONS | ({"query": "q_b_proj"} if latent else {})
  attention = f"{_OURS}/mixer", f"{_THEIRS}.self_attn"
  own = (
    standard.WEIGHTS
    | standard.EXPERTS
    | {
      f"{attention[0]}/{n}/weight": Weight(f"{attention[1]}.{t}.weight", transposed=True)
      for n, t in projections.items()
    }
    | {f"{attention[0]}/{ours}": Weight(f"{attention[1]}.{theirs}") for ours, theirs in _VECTORS.items()}
    | {f"{_OURS}/feed_forward/router/selection_bias": Weight(f"{_THEIRS}.mlp.gate.e_score_correction_bias")}
    | standard.shared_expert("mlp.shared_experts")
  )
  mtp = {path.replace(_OURS, _MTP_LAYER): weight for path, weight in own.items() if path.startswith(_OURS)}
  return own | mtp | {f"{ANY_PREDICTION}/{path}": weight for path, weight in _JOIN.items()}


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class depends on the router and the indexer."""
  version = "v2" if config.routed_score_func != "sigmoid" else "v32" if config.use_indexer else "v3"
  # Files hold MTP layers after the last layer. Of those that are read, the copies of embedding and head are ignored.
  first = config.base_num_decoder_layers
  mtp = "|".join(str(first + i) for i in range(max(config.mtp_num_layers, 1)))
  return replace(_VERSIONS[version], ignored=(rf"model\.layers\.({mtp})\..*",))


def _rope_parameters(c: MaxTextConfig) -> dict[str, Any]:
  return rope(c) | {"mscale": c.mscale, "mscale_all_dim": c.mscale}


def _read(entries: Entries) -> dict[str, Any]:
  """The attention scale always includes the YaRN correction; no key disables it."""
  found = rope_entries(entries)
  if found.get("rope_type") != "yarn":
    raise ConfigError("config.json has no YaRN, without which this version has no model of this family.")
  groups = entries["n_group"] if entries["topk_method"] != "greedy" and entries["n_group"] > 1 else -1
  return {
    "rope_interleave": entries["rope_interleave"],
    "mscale": found["mscale_all_dim"],
    "rope_attention_scaling": False,
    "base_moe_mlp_dim": entries["moe_intermediate_size"],
    "q_lora_rank": entries["q_lora_rank"] or 0,
    "n_routing_groups": groups,
    "topk_routing_group": entries["topk_group"] if groups > 0 else -1,
  }


def _always_interleaved(entries: Entries) -> dict[str, Any]:
  """Ignores `rope_interleave` in the file, as the class does."""
  return _read({**entries, "rope_interleave": True})


def _router_3(entries: Entries) -> dict[str, Any]:
  return {"routed_score_func": "sigmoid", "routed_bias": entries["topk_method"] == "noaux_tc"}


_FIELDS: dict[str, Field] = {
  **{name: field for name, field in STANDARD.items() if name not in ("head_dim", "attention_bias")},
  "moe_intermediate_size": expert_width,
  "n_routed_experts": "num_experts",
  "num_experts_per_tok": "num_experts_per_tok",
  "n_shared_experts": "shared_experts",
  "first_k_dense_replace": "first_num_dense_layers",
  "kv_lora_rank": "kv_lora_rank",
  "q_lora_rank": lambda c: c.q_lora_rank or None,
  "qk_nope_head_dim": "qk_nope_head_dim",
  "qk_rope_head_dim": "qk_rope_head_dim",
  "v_head_dim": "v_head_dim",
  "n_group": lambda c: max(c.n_routing_groups, 1),
  "topk_group": lambda c: max(c.topk_routing_group, 1),
  "routed_scaling_factor": "routed_scaling_factor",
  "norm_topk_prob": "norm_topk_prob",
  "attention_bias": lambda c: False,
  "rope_interleave": lambda c: c.rope_type == RopeType.YARN and c.rope_interleave,
  "rope_parameters": _rope_parameters,
}
# Entries that the Transformers classes ignore and other libraries read.
_ROUTER_2: dict[str, Field] = {"topk_method": lambda c: "group_limited_greedy" if c.n_routing_groups > 1 else "greedy"}
_ROUTER_3: dict[str, Field] = {
  "topk_method": lambda c: "noaux_tc" if c.routed_bias else "group_limited_greedy",
  "scoring_func": "routed_score_func",
}
_MTP: dict[str, Field] = {"num_nextn_predict_layers": lambda c: c.mtp_num_layers}
_INDEXER: dict[str, Field] = {
  "index_topk": "indexer_topk",
  "index_head_dim": "indexer_head_dim",
  "index_n_heads": "indexer_n_heads",
}
_READS = (*READS, _read, {"attention_type": "mla"})
_ABSENT = absent(
  rope_interleave=True,
  n_group=1,
  topk_group=1,
  q_lora_rank=None,
  scoring_func="sigmoid",
  topk_method="noaux_tc",
  norm_topk_prob=True,
  first_k_dense_replace=0,
  routed_scaling_factor=1.0,
)
_EXPECTS: dict[str, Field] = {"moe_layer_freq": lambda c: 1}
_VERSIONS = {
  "v2": HuggingFace(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    {**_FIELDS, **_ROUTER_2},
    (*_READS, _always_interleaved, {"routed_score_func": "softmax"}),
    absent={**_ABSENT, "topk_method": "greedy", "norm_topk_prob": False},
    expects=_EXPECTS,
  ),
  "v3": HuggingFace(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    {**_FIELDS, **_ROUTER_3, **_MTP},
    (*_READS, _router_3),
    absent=_ABSENT,
    expects=_EXPECTS,
    also=("kimi_k2",),
  ),
  "v32": HuggingFace(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    {**_FIELDS, **_ROUTER_3, **_MTP, **_INDEXER},
    (*_READS, _router_3, {"use_indexer": True}),
    absent=_ABSENT,
    expects=_EXPECTS,
  ),
}
HUGGING_FACE = tuple(_VERSIONS.values())
