"""Conversion between configurations and Hugging Face's `config.json`.

Each family's file has a `HUGGING_FACE`, or `hugging_face(config)` if Hugging Face has several classes for it. This
file holds what most families share.
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
"""The content of a `config.json`."""
Reader = Callable[[Entries], Mapping[str, Any]]
"""From entries of `config.json` to configuration keys."""
LEFT_OUT = object()  # what a field's function returns if the model has no such entry


def absent(**others: Any) -> dict[str, Any]:
  """Defaults of most classes for missing entries. A callable default takes the other entries, and replaces null too."""
  return {
    "num_key_value_heads": lambda entries: entries["num_attention_heads"],
    "head_dim": lambda entries: entries["hidden_size"] // entries["num_attention_heads"],
    "attention_bias": False,
    "tie_word_embeddings": False,
    **others,
  }


@dataclass(frozen=True)
class HuggingFace:
  """A family in the Transformers library.

  Attributes:
    architecture: the name of the class.
    model_type: the `model_type` entry.
    fields: {entry of `config.json`: our key, or a function that computes the entry from a configuration}.
    reads: functions from entries to keys, and constant keys that hold for every file.
    absent: the class's defaults for missing entries.
    expects: entries that are not written, and that must have these values if a file has them.
    also: `model_type` of multimodal models that contain this one.
    prefixes: {prefix of tensor names in some files: its replacement}.
    ignored: patterns of tensors that are not weights of the model.
    multimodal: the class with towers around this one, whose entries are below `text_config`; None is a text model.
    towers: further fields, of `multimodal`; those of a tower are named as in `vision_config.hidden_size`.
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
  multimodal: "Multimodal | None" = None
  towers: Mapping[str, Field] = field(default_factory=dict)

  def config(self, config: MaxTextConfig) -> dict[str, Any]:
    """The entries of `config.json` for a configuration."""
    text = {"architectures": [self.architecture], "model_type": self.model_type, **_entries(self.fields, config)}
    return text if self.multimodal is None else self.multimodal.around(text, _entries(self.towers, config))

  def must_be(self, config: MaxTextConfig) -> dict[str, Any]:
    """The entries that a file must not contradict."""
    return flat_entries(self.config(config)) | _entries(self.expects, config)

  def keys(self, content: Entries) -> dict[str, Any]:
    """The keys of the model that a `config.json` describes.

    Raises:
      ConfigError: an entry is missing or not supported; the message names it.
    """
    entries = dict(content)
    try:
      for name, value in self.absent.items():
        if name not in entries or (entries[name] is None and callable(value)):
          entries[name] = value(entries) if callable(value) else value
      own = {name: key for name, key in self.fields.items() if isinstance(key, str)}
      if missing := [name for name in own if entries.get(name) is None and name != "max_position_embeddings"]:
        raise ConfigError(f"config.json of a {self.model_type} has no {missing[0]}.")
      towers = {name: key for name, key in self.towers.items() if isinstance(key, str)}
      found = {key: entries[name] for name, key in (own | towers).items() if name in entries}
      for read in self.reads:
        found |= read(entries) if callable(read) else read
    except ConfigError:
      raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
      raise ConfigError(f"config.json of a {self.model_type} cannot be read: {error!r}.") from None
    return found


def placeholders(**keys: str) -> Callable[[Entries], dict[str, Any]]:
  """Reads what the chat template of a model writes for media, if the model has an image encoder."""
  return lambda entries: keys if any(name.startswith("vision_config.") for name in entries) else {}


@dataclass(frozen=True)
class Multimodal:
  """A class of the Transformers library with towers around a text model."""

  architecture: str
  model_type: str

  def around(self, text: Mapping[str, Any], towers: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `config.json`, nested."""
    inner = {name: value for name, value in text.items() if name != "architectures"}
    found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type, "text_config": inner}
    for name, value in towers.items():
      part, _, entry = name.rpartition(".")
      (found.setdefault(part, {}) if part else found)[entry] = value
    return found


def flat_entries(content: Entries) -> dict[str, Any]:
  """A `config.json` with its text part on top, and entries of towers named as in `vision_config.hidden_size`."""
  found = dict(content)
  for part in ("thinker_config", "text_config"):
    found |= _part(found, part)
  for tower in ("vision_config", "audio_config"):
    found |= {f"{tower}.{name}": value for name, value in _part(found, tower).items()}
  return found


def _part(content: Entries, name: str) -> Entries:
  inner = content.get(name)
  return inner if isinstance(inner, dict) else {}


def _entries(fields: Mapping[str, Field], config: MaxTextConfig) -> dict[str, Any]:
  values = {name: getattr(config, f) if isinstance(f, str) else f(config) for name, f in fields.items()}
  return {name: value for name, value in values.items() if value is not LEFT_OUT}


def rope(config: MaxTextConfig, theta: float | None = None, scaled: bool = True, high: float = 4.0) -> dict[str, Any]:
  """`rope_parameters` of one kind of layer; `high` is `high_freq_factor` of Llama's scaling."""
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
  """Hugging Face's name of the feed-forward activation."""
  name = config.mlp_activations[0]
  return _ACTIVATIONS.get(name, name)


def rope_entries(content: Entries, layers: str = "full_attention") -> dict[str, Any]:
  """The RoPE parameters of one kind of layer, from any of the formats that `config.json` has had."""
  parameters: dict[str, Any] = content.get("rope_parameters") or {}
  found: dict[str, Any] = dict(parameters.get(layers, parameters))
  if not found and "rope_theta" in content:
    found = {"rope_theta": content["rope_theta"]} | (content.get("rope_scaling") or {})
  kind = found.pop("type", "default")
  return {"rope_type": kind} | found if found else {}


def rope_keys(entries: Entries) -> dict[str, Any]:
  """The RoPE keys."""
  found = rope_entries(entries) or {"rope_type": "default"}
  if (kind := found["rope_type"]) not in _ROPE_KEYS:
    raise ConfigError(f"config.json has rope_type={kind}, and this version reads {', '.join(_ROPE_KEYS)}.")
  return {"rope_max_timescale": found.get("rope_theta", 10000), **_ROPE_KEYS[kind](found | {"model": entries})}


def _long_context_keys(found: Entries) -> dict[str, Any]:
  return {
    "rope_type": "llama3.1",
    "rope_factor": found["factor"],
    "original_max_position_embeddings": found["original_max_position_embeddings"],
  }


def _yarn_keys(found: Entries) -> dict[str, Any]:
  """YaRN keys for half-split RoPE. The attention factor must be the default one or 1."""
  default = 0.1 * math.log(found["factor"]) + 1.0
  factor = found.get("attention_factor") or default
  if not (math.isclose(factor, default) or factor == 1.0):
    raise ConfigError(
      f"config.json has attention_factor={factor}, and here it is 1 or {default}, which goes by factor."
    )
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


def activation_keys(entries: Entries) -> dict[str, Any]:
  """The activation key of a gated feed-forward layer."""
  name = entries.get("hidden_activation") or entries.get("hidden_act")
  ours = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {"silu": "silu", "relu": "relu", "gelu_new": "gelu"}
  if name not in ours:
    raise ConfigError(f"config.json has the activation {name}, and this version reads {', '.join(ours)}.")
  return {"mlp_activations": [ours[name], "linear"]}


def interval_of(layer_types: list[str] | None, default: int) -> int:
  """The interval between full-attention layers, from the types of all layers; `default` if they are not listed."""
  if not layer_types:
    return default
  return layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1


def layer_types(local: str, interval: Field) -> Callable[[MaxTextConfig], list[str]]:
  """Returns a function that lists the types of all layers: one `full_attention` layer per interval, others `local`."""

  def kinds(config: MaxTextConfig) -> list[str]:
    step = getattr(config, interval) if isinstance(interval, str) else interval(config)
    return [local if (layer + 1) % step else "full_attention" for layer in range(config.base_num_decoder_layers)]

  return kinds


# For families with unscaled logits, a gated feed-forward layer and one kind of RoPE.
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

# Families with capped logits have another name for the activation entry.
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

EXPERTS_READS: tuple[Reader, ...] = (lambda entries: {"base_moe_mlp_dim": entries["moe_intermediate_size"]},)
NO_DENSE_LAYERS: Mapping[str, Field] = {"mlp_only_layers": lambda c: []}


def capped_keys(entries: Entries) -> dict[str, Any]:
  """The keys of the soft caps on attention logits and final logits."""
  return {
    "attn_logits_soft_cap": entries.get("attn_logit_softcapping") or 0.0,
    "final_logits_soft_cap": entries.get("final_logit_softcapping") or 0.0,
  }


# For families with pre- and post-norms, and tied embeddings scaled by the square root of their width.
CAPPED_READS: tuple[Reader | Mapping[str, Any], ...] = (
  *READS,
  capped_keys,
  {"normalize_embedding_logits": True, "use_post_attn_norm": True, "use_post_ffw_norm": True},
)

# Some files also hold the head, a copy of the embedding.
TIED_HEAD = (r"lm_head\.weight",)
