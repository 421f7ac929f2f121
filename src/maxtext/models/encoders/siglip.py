"""The SigLIP vision encoder: keys to a tower, names of its weights, entries of `vision_config`."""

from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.patches import PatchProjection, Projector
from maxtext.models.encoders import vision
from maxtext.models.encoders.vision import LAYER
from maxtext.models.hugging_face import Field
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight

EPSILON = 1e-6  # of the norms


def tower(config: MaxTextConfig, projector: Projector, **changes: Any) -> TowerSpec:
  """The encoder with a projector to the decoder's width; `changes` replace fields of the spec."""
  c, norm = config, LayerNormSpec(EPSILON)
  values: dict[str, Any] = {
    "name": "vision",
    "width": c.hidden_size_for_vit,
    "length": vision.patches_per_side(c) ** 2,
    "front_end": PatchProjection((c.num_channels_for_vit, c.patch_size_for_vit, c.patch_size_for_vit)),
    "groups": (Group((vision.layer(c, norm),), c.num_hidden_layers_for_vit),),
    "projector": projector,
    "final_norm": norm,
    "learned_positions": True,
    "projector_dropout": vision.projector_dropout(c),
  }
  return TowerSpec(**(values | changes))


def weights(spec: TowerSpec, prefix: str) -> dict[str, Weight]:
  """The names of the encoder's weights, without the projector's."""
  tower, layer = f"towers/{spec.name}", f"{prefix}.encoder.layers.{{layer}}"
  assert isinstance(spec.front_end, PatchProjection)
  patch = f"{prefix}.embeddings.patch_embedding"
  return {
    f"{tower}/front_end/weight": Weight(f"{patch}.weight", transposed=True, inputs=spec.front_end.shape),
    f"{tower}/front_end/bias": Weight(f"{patch}.bias"),
    f"{tower}/positions/table": Weight(f"{prefix}.embeddings.position_embedding.weight", table=True),
    **vision.linear_weights({f"{LAYER}/{ours}": f"{layer}.{theirs}" for ours, theirs in _LINEAR.items()}),
    **vision.norm_weights({f"{LAYER}/{ours}": f"{layer}.{theirs}" for ours, theirs in _NORMS.items()}),
    **vision.norm_weights({f"{tower}/final_norm": f"{prefix}.post_layernorm"}),
  }


_LINEAR = {
  "mixer/query": "self_attn.q_proj",
  "mixer/key": "self_attn.k_proj",
  "mixer/value": "self_attn.v_proj",
  "mixer/out": "self_attn.out_proj",
  "feed_forward/up": "mlp.fc1",
  "feed_forward/down": "mlp.fc2",
}
_NORMS = {"mixer_norm": "layer_norm1", "feed_forward_norm": "layer_norm2"}


def prefixes(tower: str) -> dict[str, str]:
  """Names in files that leave out `vision_model`."""
  parts = ("embeddings", "encoder", "post_layernorm")
  return {f"{tower}.{part}.": f"vision_tower.vision_model.{part}." for part in parts}


FIELDS: dict[str, Field] = {
  **vision.FIELDS,
  **vision.COUNTS,
  "vision_config.model_type": lambda c: "siglip_vision_model",
  "vision_config.image_size": "image_size_for_vit",
  "vision_config.hidden_act": lambda c: "gelu_pytorch_tanh",
  "vision_config.layer_norm_eps": lambda c: EPSILON,
  "vision_config.vision_use_head": lambda c: False,
}
