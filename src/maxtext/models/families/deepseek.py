"""DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention, first dense layers and then experts, of which some are shared.

Version 3.2 attends only to the keys that an indexer chooses.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.indexer import Indexer
from maxtext.layers.mla import MLA
from maxtext.layers.norm import Norm
from maxtext.models import standard
from maxtext.models.experts import expert_width, mixture
from maxtext.models.hugging_face import LEFT_OUT, STANDARD, Field, HuggingFace, rope
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
      f"attention_type=mla: each head has its own product with the latent."
    )
  # Longer context sharpens attention; published as a correction of the scale by its square.
  correction = 0.1 * c.mscale * math.log(c.rope_factor) + 1.0
  indexer = Indexer(
    c.indexer_n_heads, c.indexer_head_dim, c.indexer_topk, standard.rope(c, c.qk_rope_head_dim, interleaved=False)
  )
  return MLA(
    heads=c.base_num_query_heads,
    plain_dim=c.qk_nope_head_dim,
    value_dim=c.v_head_dim,
    kv_rank=c.kv_lora_rank,
    q_rank=c.q_lora_rank or None,
    rope=standard.rope(c, c.qk_rope_head_dim),
    scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * correction**2,
    norm=Norm(1e-6),
    latent_cache=not c.mla_naive_kvcache,
    indexer=indexer if c.use_indexer else None,
  )


_OURS, _THEIRS = standard.LAYER, "model.layers.{layer}"
_PRODUCTS = {
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


# Layers that predict further tokens join what was known with the next token; they share embedding and head.
_FURTHER = "ahead/*/stack/layers/*"
_JOIN = {
  "token_norm/scale": Weight(f"{_THEIRS}.enorm.weight"),
  "hidden_norm/scale": Weight(f"{_THEIRS}.hnorm.weight"),
  "join/weight": Weight(f"{_THEIRS}.eh_proj.weight", transposed=True),
  "norm/scale": Weight(f"{_THEIRS}.shared_head.norm.weight"),
}


def weights(spec: DecoderSpec) -> Table:
  """The names; queries go by another one where they have a latent."""
  latent = any(isinstance(b.mixer, MLA) and b.mixer.q_rank is not None for g in spec.groups for b in g.cycle)
  products = _PRODUCTS | ({"query": "q_b_proj"} if latent else {})
  attention = f"{_OURS}/mixer", f"{_THEIRS}.self_attn"
  own = (
    standard.WEIGHTS
    | standard.EXPERTS
    | {f"{attention[0]}/{n}/weight": Weight(f"{attention[1]}.{t}.weight", transposed=True) for n, t in products.items()}
    | {f"{attention[0]}/{ours}": Weight(f"{attention[1]}.{theirs}") for ours, theirs in _VECTORS.items()}
    | {f"{_OURS}/feed_forward/router/selection_bias": Weight(f"{_THEIRS}.mlp.gate.e_score_correction_bias")}
    | standard.shared_expert("mlp.shared_experts")
  )
  further = {path.replace(_OURS, _FURTHER): weight for path, weight in own.items() if path.startswith(_OURS)}
  return own | further | {f"ahead/*/{path}": weight for path, weight in _JOIN.items()}


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class there goes by the router and the indexer."""
  version = "V2" if config.routed_score_func != "sigmoid" else "V32" if config.use_indexer else "V3"
  own: dict[str, Mapping[str, Field]] = {
    "V2": _ROUTER_2,
    "V3": _ROUTER_3 | _AHEAD,
    "V32": _ROUTER_3 | _AHEAD | _INDEXER,
  }
  # The layer after the last one predicts a token more; where it is read, its copies of embedding and head are not.
  first = config.base_num_decoder_layers
  further = "|".join(str(first + i) for i in range(max(config.mtp_num_layers, 1)))
  ignored = (rf"model\.layers\.({further})\..*",)
  name = f"deepseek_{version.lower()}"
  return HuggingFace(
    f"Deepseek{version}ForCausalLM", name, {**_FIELDS, **own[version]}, also=("kimi_k2",), ignored=ignored
  )


def _rope_parameters(c: MaxTextConfig) -> dict[str, Any]:
  return rope(c) | {"mscale": c.mscale, "mscale_all_dim": c.mscale}


_FIELDS = {
  **{name: field for name, field in STANDARD.items() if name != "head_dim"},
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
  "rope_interleave": "rope_interleave",
  "rope_parameters": _rope_parameters,
}
_ROUTER_2 = {"topk_method": lambda c: "group_limited_greedy" if c.n_routing_groups > 1 else "greedy"}
# What the class of transformers takes for granted, and other readers ask for.
_ROUTER_3: dict[str, Field] = {
  "topk_method": lambda c: "noaux_tc" if c.routed_bias else LEFT_OUT,
  "scoring_func": "routed_score_func",
}
_AHEAD: dict[str, Field] = {"num_nextn_predict_layers": "mtp_num_layers"}
_INDEXER: dict[str, Field] = {
  "index_topk": "indexer_topk",
  "index_head_dim": "indexer_head_dim",
  "index_n_heads": "indexer_n_heads",
}
