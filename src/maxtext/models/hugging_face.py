"""How a family is described to Hugging Face's library: the table behind `config.json`.

Each family's file has a `HUGGING_FACE`, or `hugging_face(config)` where it has several classes there. What most of them
share is here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.models.experts import expert_width

Field = str | Callable[[MaxTextConfig], Any]
LEFT_OUT = object()  # what a function gives where an entry means nothing for this model


@dataclass(frozen=True)
class HuggingFace:
  """A family there.

  Attributes:
    architecture: the class.
    model_type: its name.
    fields: each entry of `config.json` with our key, or with what makes it from a configuration.
    also: what models that hold one of these are called.
    prefixes: beginnings of tensors' names in some of its files, with what they stand for.
    ignored: patterns of tensors that are no weights of the decoder.
  """

  architecture: str
  model_type: str
  fields: Mapping[str, Field]
  also: tuple[str, ...] = ()
  prefixes: Mapping[str, str] | None = None
  ignored: tuple[str, ...] = ()

  def config(self, config: MaxTextConfig) -> dict[str, Any]:
    """The entries of `config.json` that follow from a configuration."""
    values = {name: getattr(config, f) if isinstance(f, str) else f(config) for name, f in self.fields.items()}
    said = {name: value for name, value in values.items() if value is not LEFT_OUT}
    return {"architectures": [self.architecture], "model_type": self.model_type, **said}


def rope(config: MaxTextConfig, theta: float | None = None, scaled: bool = True, high: float = 4.0) -> dict[str, Any]:
  """`rope_parameters` of one kind of layer; `high` is where Llama's scaling ends."""
  c = config
  plain = {"rope_type": "default", "rope_theta": float(theta or c.rope_max_timescale)}
  scaling = _SCALED[c.rope_type](c) if scaled else {}
  return plain | scaling | ({"high_freq_factor": high} if "high_freq_factor" in scaling else {})


def _linear(c: MaxTextConfig) -> dict[str, Any]:
  factor = c.rope_linear_scaling_factor
  return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _long_context(c: MaxTextConfig) -> dict[str, Any]:
  if not c.rope_use_scale:
    return {}
  return {
    "rope_type": "llama3",
    "factor": float(c.rope_factor),
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": c.original_max_position_embeddings,
  }


def _yarn(c: MaxTextConfig) -> dict[str, Any]:
  return {
    "rope_type": "yarn",
    "factor": float(c.rope_factor),
    "beta_fast": float(c.beta_fast),
    "beta_slow": float(c.beta_slow),
    "truncate": c.rope_truncate,
    "original_max_position_embeddings": c.original_max_position_embeddings,
    **({} if c.rope_attention_scaling else {"attention_factor": 1.0}),
  }


_SCALED = {RopeType.DEFAULT: _linear, RopeType.LLAMA3_1: _long_context, RopeType.YARN: _yarn}
_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}


def activation(config: MaxTextConfig) -> str:
  """The name of the feed-forward layer's."""
  name = config.mlp_activations[0]
  return _ACTIVATIONS.get(name, name)


STANDARD: Mapping[str, Field] = {
  "vocab_size": "vocab_size",
  "hidden_size": "base_emb_dim",
  "intermediate_size": "base_mlp_dim",
  "num_hidden_layers": "base_num_decoder_layers",
  "num_attention_heads": "base_num_query_heads",
  "num_key_value_heads": "base_num_kv_heads",
  "head_dim": "head_dim",
  "hidden_act": activation,
  "max_position_embeddings": "max_position_embeddings",
  "rms_norm_eps": "normalization_layer_epsilon",
  "tie_word_embeddings": "logits_via_embedding",
  "attention_bias": "attention_bias",
  "rope_parameters": rope,
}

# Families whose logits may be capped also call the activation otherwise.
CAPPED: Mapping[str, Field] = {
  **{name: field for name, field in STANDARD.items() if name != "hidden_act"},
  "hidden_activation": activation,
  "sliding_window": "sliding_window_size",
  "attn_logit_softcapping": lambda c: c.attn_logits_soft_cap or None,
  "final_logit_softcapping": lambda c: c.final_logits_soft_cap or None,
}

EXPERTS: Mapping[str, Field] = {
  "num_experts": "num_experts",
  "num_experts_per_tok": "num_experts_per_tok",
  "moe_intermediate_size": expert_width,
}

# Some files hold a head that is the embedding again.
TIED_HEAD = (r"lm_head\.weight",)
