"""Builds the mixture-of-experts spec from the keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from maxtext.configs import MaxTextConfig
from maxtext.layers.experts import MoE
from maxtext.layers.mlp import MLP
from maxtext.layers.router import ExpertGroups, Router


def mixture(config: MaxTextConfig, router_changes: Mapping[str, Any] | None = None, **changes: Any) -> MoE:
  """The mixture that the keys describe; a family passes changes for what no key describes."""
  c = config
  score: Literal["softmax", "sigmoid"] = "sigmoid" if c.routed_score_func == "sigmoid" else "softmax"
  # A group's score is its best expert's with softmax, and the sum of its best two with sigmoid.
  groups = ExpertGroups(c.n_routing_groups, c.topk_routing_group, {"softmax": 1, "sigmoid": 2}[score])
  router = Router(
    count=c.num_experts,
    per_token=c.num_experts_per_tok,
    score=score,
    normalize=c.norm_topk_prob,
    scale=c.routed_scaling_factor,
    groups=groups if c.n_routing_groups > 0 else None,
    selection_bias=c.routed_bias,
    selection_bias_rate=c.routed_bias_update_rate,
    balance_weight=c.load_balance_loss_weight,
  )
  width, activation = expert_width(c), c.mlp_activations[0]
  values: dict[str, Any] = {
    "router": replace(router, **(router_changes or {})),
    "width": width,
    "activation": activation,
    "limit": c.mlp_activations_limit if c.mlp_activations_limit > 0 else None,
    "bias": c.mlp_bias,
    "shared": MLP(c.shared_experts * width, activation) if c.shared_experts else None,
  }
  return MoE(**(values | changes))


def expert_width(config: MaxTextConfig) -> int:
  """The width of an expert's hidden layer."""
  dense, own = config.base_mlp_dim, config.base_moe_mlp_dim  # models set both keys, even if only one applies
  return own if own > 0 else dense
