"""The SigLIP vision encoder: keys to a tower, names of its weights, entries of `vision_config`."""

from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.patches import PatchProjection, Projector
from maxtext.models.hugging_face import Field
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight

EPSILON = 1e-6  # of the norms


def patches_per_side(config: MaxTextConfig) -> int:
  """Patches along a side of the square image."""
  c = config
  if not isinstance(c.image_size_for_vit, int) or c.image_size_for_vit % c.patch_size_for_vit:
    raise ConfigError(
      f"image_size_for_vit={c.image_size_for_vit} must be the side of a square image and a multiple of "
      f"patch_size_for_vit={c.patch_size_for_vit}."
    )
  return c.image_size_for_vit // c.patch_size_for_vit


def tower(config: MaxTextConfig, projector: Projector, **changes: Any) -> TowerSpec:
  """The encoder with a projector to the decoder's width; `changes` replace fields of the spec."""
  c = config
  heads, width, norm = c.num_attention_heads_for_vit, c.hidden_size_for_vit, LayerNormSpec(EPSILON)
  if width % heads:
    raise ConfigError(f"num_attention_heads_for_vit={heads} does not divide hidden_size_for_vit={width}.")
  attention = GQA(heads, heads, width // heads, rope=None, bias=True, out_bias=True, causal=False)
  layer = Block(attention, MLP(c.intermediate_size_for_vit, "gelu", gated=False, bias=True), norm)
  values: dict[str, Any] = {
    "name": "vision",
    "width": width,
    "length": patches_per_side(c) ** 2,
    "front_end": PatchProjection((c.num_channels_for_vit, c.patch_size_for_vit, c.patch_size_for_vit)),
    "groups": (Group((layer,), c.num_hidden_layers_for_vit),),
    "projector": projector,
    "final_norm": norm,
    "learned_positions": True,
  }
  return TowerSpec(**(values | changes))


def weights(spec: TowerSpec, prefix: str) -> dict[str, Weight]:
  """The names of the encoder's weights, without the projector's."""
  tower, layer, found = f"towers/{spec.name}", f"{prefix}.encoder.layers.{{layer}}", dict[str, Weight]()
  assert isinstance(spec.front_end, PatchProjection)
  patch = f"{prefix}.embeddings.patch_embedding"
  found[f"{tower}/front_end/weight"] = Weight(f"{patch}.weight", transposed=True, inputs=spec.front_end.shape)
  found[f"{tower}/front_end/bias"] = Weight(f"{patch}.bias")
  found[f"{tower}/positions/table"] = Weight(f"{prefix}.embeddings.position_embedding.weight", table=True)
  for ours, theirs in _LINEAR.items():
    found[f"{tower}/groups/*/layers/*/{ours}/weight"] = Weight(f"{layer}.{theirs}.weight", transposed=True)
    found[f"{tower}/groups/*/layers/*/{ours}/bias"] = Weight(f"{layer}.{theirs}.bias")
  norms = {f"groups/*/layers/*/{ours}": f"{layer}.{theirs}" for ours, theirs in _NORMS.items()}
  for ours, theirs in (norms | {"final_norm": f"{prefix}.post_layernorm"}).items():
    found[f"{tower}/{ours}/scale"] = Weight(f"{theirs}.weight")
    found[f"{tower}/{ours}/bias"] = Weight(f"{theirs}.bias")
  return found


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
  "vision_config.model_type": lambda c: "siglip_vision_model",
  "vision_config.hidden_size": "hidden_size_for_vit",
  "vision_config.intermediate_size": "intermediate_size_for_vit",
  "vision_config.num_hidden_layers": "num_hidden_layers_for_vit",
  "vision_config.num_attention_heads": "num_attention_heads_for_vit",
  "vision_config.num_channels": "num_channels_for_vit",
  "vision_config.image_size": "image_size_for_vit",
  "vision_config.patch_size": "patch_size_for_vit",
  "vision_config.hidden_act": lambda c: "gelu_pytorch_tanh",
  "vision_config.layer_norm_eps": lambda c: EPSILON,
  "vision_config.vision_use_head": lambda c: False,
}
