"""Qwen3.5: as Qwen3-Next, with separate delta net projections and always normalised expert weights. Images of any size
are encoded."""

from dataclasses import replace

from maxtext.configs import MaxTextConfig
from maxtext.media.processed import MediaProcessor
from maxtext.models import hybrid
from maxtext.models.encoders import merged_vision
from maxtext.models.hugging_face import HuggingFace, Multimodal
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec, ModelSpec, towers_of
from maxtext.models.weight_table import Table, Weight, fused, renamed


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c, rope = config, merged_vision.rope(config)
  decoder = hybrid.decoder(c, mixture(c, {"normalize": True}, shared_gate=True), rope=rope)
  return ModelSpec.of(decoder, merged_vision.tower(c)) if c.use_multimodal else decoder


_DELTA = {
  **fused(hybrid.OURS, ("query", "key", "value"), f"{hybrid.THEIRS}.in_proj_qkv.weight", transposed=True),
  **{
    f"{hybrid.OURS}/{ours}/weight": Weight(f"{hybrid.THEIRS}.in_proj_{theirs}.weight", transposed=True)
    for ours, theirs in {"gate": "z", "strength": "b", "decay": "a"}.items()
  },
}


def weights(spec: DecoderSpec) -> Table:
  """The weight table, which depends on the kind of each layer, of the text model or of the one with images."""
  text = hybrid.weights(spec, _DELTA)
  if not (towers := towers_of(spec)):
    return text
  return renamed(text, "model.", "model.language_model.") | merged_vision.weights(towers[0], _NAMES)


def processors(config: MaxTextConfig) -> dict[str, MediaProcessor]:
  """What makes inputs of the tower."""
  images = merged_vision.image_processor(config, least=64, most=16_384)
  return {"image": images, "video": merged_vision.video_processor(config, stamped=True)}


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class of the text model, or of the one with images."""
  return _WITH_IMAGES if config.use_multimodal else HUGGING_FACE


_NAMES = merged_vision.Names("model.visual", "norm", "linear_fc1", "linear_fc2")
_MTP = r"mtp\..*"
HUGGING_FACE = HuggingFace(
  "Qwen3_5MoeForCausalLM",
  "qwen3_5_moe_text",
  hybrid.FIELDS,
  (*hybrid.HYBRID_READS, merged_vision.read, merged_vision.read_placeholders),
  absent=hybrid.ABSENT,
  expects={**hybrid.EXPECTS, "vision_config.deepstack_visual_indexes": lambda c: []},
  prefixes={"model.language_model.": "model."},
  ignored=(_MTP, r"model\.visual\..*"),
  towers={**merged_vision.FIELDS, "vision_config.model_type": lambda c: "qwen3_5_moe_vision"},
)
_WITH_IMAGES = replace(
  HUGGING_FACE,
  fields={**hybrid.FIELDS, "rope_parameters": lambda c: hybrid.rope_of(c) | merged_vision.mrope_entries(c)},
  prefixes=None,
  ignored=(_MTP,),
  multimodal=Multimodal("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)
