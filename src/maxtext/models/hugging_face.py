"""How a family is described to Hugging Face's library: the table behind `config.json`.

Each family's file has a `HUGGING_FACE`, or `hugging_face(config)` where it has several classes there. What most of them
share is here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import RopeType
from maxtext.models.mixture import expert_width

Field = str | Callable[[MaxTextConfig], Any]
Entries = Mapping[str, Any]
"""What stands in a `config.json`."""
Reader = Callable[[Entries], Mapping[str, Any]]
"""From those to keys."""
LEFT_OUT = object()  # what a function gives where an entry means nothing for this model


def absent(**others: Any) -> dict[str, Any]:
  """What most classes take for entries that a file leaves out, or a function of the others, which null also means."""
  return {
    "num_key_value_heads": lambda said: said["num_attention_heads"],
    "head_dim": lambda said: said["hidden_size"] // said["num_attention_heads"],
    "attention_bias": False,
    "tie_word_embeddings": False,
    **others,
  }


@dataclass(frozen=True)
class HuggingFace:
  """A family there.

  Attributes:
    architecture: the class.
    model_type: its name.
    fields: each entry of `config.json` with our key, or with what makes it from a configuration.
    reads: keys that entries of other forms give, and those that the class always has, whatever a file says.
    absent: what the class takes for entries that a file leaves out.
    expects: entries that are not written, and that may not be otherwise in a file.
    also: what models that hold one of these are called.
    prefixes: beginnings of tensors' names in some of its files, with what they stand for.
    ignored: patterns of tensors that are no weights of the decoder.
  """

  architecture: str
  model_type: str
  fields: Mapping[str, Field]
  reads: tuple[Reader | Mapping[str, Any], ...] = ()
  absent: Mapping[str, Any] = field(default_factory=absent)
  expects: Mapping[str, Field] = field(default_factory=dict)
  also: tuple[str, ...] = ()
  prefixes: Mapping[str, str] | None = None
  ignored: tuple[str, ...] = ()

  def config(self, config: MaxTextConfig) -> dict[str, Any]:
    """The entries of `config.json` that follow from a configuration."""
    return {"architectures": [self.architecture], "model_type": self.model_type, **_said(self.fields, config)}

  def must_be(self, config: MaxTextConfig) -> dict[str, Any]:
    """The entries that a file may not contradict."""
    return self.config(config) | _said(self.expects, config)

  def keys(self, content: Entries) -> dict[str, Any]:
    """The keys of the model that a `config.json` describes.

    Raises:
      ConfigError: names an entry that is missing, or that nothing here can do.
    """
    said = dict(content)
    try:
      for name, value in self.absent.items():
        if name not in said or (said[name] is None and callable(value)):
          said[name] = value(said) if callable(value) else value
      own = {name: key for name, key in self.fields.items() if isinstance(key, str)}
      if missing := [name for name in own if said.get(name) is None and name != "max_position_embeddings"]:
        raise ConfigError(f"config.json of a {self.model_type} has no {missing[0]}.")
      found = {key: said[name] for name, key in own.items() if name in said}
      for read in self.reads:
        found |= read(said) if callable(read) else read
    except ConfigError:
      raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
      raise ConfigError(f"config.json of a {self.model_type} cannot be read: {error!r}.") from None
    return found


def _said(fields: Mapping[str, Field], config: MaxTextConfig) -> dict[str, Any]:
  values = {name: getattr(config, f) if isinstance(f, str) else f(config) for name, f in fields.items()}
  return {name: value for name, value in values.items() if value is not LEFT_OUT}


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


def rope_entries(content: Entries, layers: str = "full_attention") -> dict[str, Any]:
  """The rotary positions of one kind of layer, however they are written down: that has changed over the years."""
  said: dict[str, Any] = content.get("rope_parameters") or {}
  found: dict[str, Any] = dict(said.get(layers, said))
  if not found and "rope_theta" in content:
    found = {"rope_theta": content["rope_theta"]} | (content.get("rope_scaling") or {})
  kind = found.pop("type", "default")
  return {"rope_type": kind} | found if found else {}


def rope_keys(said: Entries) -> dict[str, Any]:
  """The keys of rotary positions."""
  found = rope_entries(said) or {"rope_type": "default"}
  if (kind := found["rope_type"]) not in _ROPE_KEYS:
    raise ConfigError(f"config.json has rope_type={kind}, and this version reads {', '.join(_ROPE_KEYS)}.")
  return {"rope_max_timescale": found.get("rope_theta", 10000), **_ROPE_KEYS[kind](found | {"model": said})}


def _long_context_keys(found: Entries) -> dict[str, Any]:
  return {
    "rope_type": "llama3.1",
    "rope_factor": found["factor"],
    "original_max_position_embeddings": found["original_max_position_embeddings"],
  }


def _yarn_keys(found: Entries) -> dict[str, Any]:
  """Of attention whose rotated halves are apart; the usual factor on logits, another or none."""
  usual = 0.1 * math.log(found["factor"]) + 1.0
  factor = found.get("attention_factor") or usual
  if not (math.isclose(factor, usual) or factor == 1.0):
    raise ConfigError(f"config.json has attention_factor={factor}, and here it is 1 or {usual}, which goes by factor.")
  first = found["model"].get("max_position_embeddings")
  return {
    "rope_type": "yarn",
    "rope_factor": found["factor"],
    "beta_fast": found.get("beta_fast") or 32,
    "beta_slow": found.get("beta_slow") or 1,
    "rope_truncate": found.get("truncate", True),
    "original_max_position_embeddings": found.get("original_max_position_embeddings") or first,
    "rope_attention_scaling": factor != 1.0,
    "rope_interleave": False,
  }


_ROPE_KEYS: Mapping[str, Reader] = {
  "default": lambda found: {},
  "linear": lambda found: {"rope_linear_scaling_factor": found["factor"]},
  "llama3": _long_context_keys,
  "yarn": _yarn_keys,
}


def activation_keys(said: Entries) -> dict[str, Any]:
  """The key of a gated feed-forward layer's activation."""
  name = said.get("hidden_activation") or said.get("hidden_act")
  ours = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {"silu": "silu", "relu": "relu", "gelu_new": "gelu"}
  if name not in ours:
    raise ConfigError(f"config.json has the activation {name}, and this version reads {', '.join(ours)}.")
  return {"mlp_activations": [ours[name], "linear"]}


def interval_of(layer_types: list[str] | None, usual: int) -> int:
  """After how many layers one sees all, from the kinds of all layers; `usual` where a file does not say."""
  if not layer_types:
    return usual
  return layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1


def layer_types(near: str, interval: Field) -> Callable[[MaxTextConfig], list[str]]:
  """The kinds of all layers, of which one in so many sees all."""

  def kinds(config: MaxTextConfig) -> list[str]:
    each = getattr(config, interval) if isinstance(interval, str) else interval(config)
    return [near if (layer + 1) % each else "full_attention" for layer in range(config.base_num_decoder_layers)]

  return kinds


# Heads without a scale of their own, a gated feed-forward layer, one kind of rotary positions.
READS: tuple[Reader | Mapping[str, Any], ...] = (activation_keys, rope_keys, {"normalize_embedding_logits": False})
NO_WINDOW: Mapping[str, Field] = {
  "use_sliding_window": lambda c: False,
  "layer_types": layer_types("full_attention", lambda c: 1),
}

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

EXPERTS_READS: tuple[Reader, ...] = (lambda said: {"base_moe_mlp_dim": said["moe_intermediate_size"]},)
NO_DENSE_LAYERS: Mapping[str, Field] = {"mlp_only_layers": lambda c: []}


def capped_keys(said: Entries) -> dict[str, Any]:
  """The keys of caps on both kinds of logits."""
  return {
    "attn_logits_soft_cap": said.get("attn_logit_softcapping") or 0.0,
    "final_logits_soft_cap": said.get("final_logit_softcapping") or 0.0,
  }


# A norm on either side of each branch, tied embeddings that are multiplied by the root of their width.
CAPPED_READS: tuple[Reader | Mapping[str, Any], ...] = (
  *READS,
  capped_keys,
  {"normalize_embedding_logits": True, "use_post_attn_norm": True, "use_post_ffw_norm": True},
)

# Some files hold a head that is the embedding again.
TIED_HEAD = (r"lm_head\.weight",)
