"""Qwen 3 with experts in every layer, and the thinker of Qwen3-Omni, which encodes images of any size
and audio."""

from dataclasses import replace

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.media.processed import FeatureText, MediaProcessor
from maxtext.media.video import VideosWithSound
from maxtext.models import standard
from maxtext.models.encoders import mel_audio, merged_vision
from maxtext.models.hugging_face import (
  EXPERTS,
  EXPERTS_READS,
  NO_DENSE_LAYERS,
  NO_WINDOW,
  READS,
  STANDARD,
  TIED_HEAD,
  HuggingFace,
  Multimodal,
  absent,
  rope,
)
from maxtext.models.mixture import mixture
from maxtext.models.spec import DecoderSpec, Group, ModelSpec, cycles, towers_of
from maxtext.models.weight_table import Table


def spec(config: MaxTextConfig) -> DecoderSpec:
  """The decoder that a configuration describes."""
  c = config
  layer = standard.block(c, standard.attention(c, rope=merged_vision.rope(c)), mixture(c))
  audio = (mel_audio.tower(c),) if c.use_audio else ()
  if not c.use_multimodal:
    decoder = standard.decoder(c, cycles((layer,), c.base_num_decoder_layers))
    return ModelSpec.of(decoder, *audio) if audio else decoder
  tower = merged_vision.tower(c, c.deepstack_visual_indexes_for_vit)
  first = len(tower.deepstack) + 1 if tower.deepstack else 0
  if first > c.base_num_decoder_layers:
    raise ConfigError(
      f"deepstack_visual_indexes_for_vit={c.deepstack_visual_indexes_for_vit}: its features enter {first - 1} layers "
      f"behind the first, and base_num_decoder_layers={c.base_num_decoder_layers}."
    )
  groups = (Group((layer,), first), Group((layer,), c.base_num_decoder_layers - first))
  return ModelSpec.of(standard.decoder(c, tuple(group for group in groups if group.repeats)), tower, *audio)


def weights(spec: DecoderSpec) -> Table:
  """The weights in files of the text model, or of the one with towers."""
  found = WEIGHTS
  for tower in towers_of(spec):
    found = found | (merged_vision.weights(tower, _NAMES) if tower.name == "vision" else mel_audio.weights(tower))
  return found


def processors(config: MaxTextConfig) -> dict[str, MediaProcessor]:
  """What makes inputs of the towers that the model has."""
  found: dict[str, MediaProcessor] = {}
  if config.use_audio:
    found["audio"] = sounds = mel_audio.processor(config)
  if config.use_multimodal:
    found["image"] = merged_vision.image_processor(config, least=3136 / 1024, most=12_544)
    found["video"] = videos = merged_vision.video_processor(config, stamped=False)
  if config.use_audio and config.use_multimodal and config.use_audio_in_video:
    around = FeatureText(sounds.token, "<|audio_start|>", "<|audio_end|>")
    found["video"] = VideosWithSound(videos, sounds, around, config.position_id_per_seconds)
  return found


def hugging_face(config: MaxTextConfig) -> HuggingFace:
  """The class of the text model, or of the one with towers."""
  on = {"visual": config.use_multimodal, "audio_tower": config.use_audio}
  if not any(on.values()):
    return HUGGING_FACE
  left_out = tuple(rf"(thinker\.)?{name}\..*" for name, built in on.items() if not built)
  towers = (_VISION_FIELDS if config.use_multimodal else {}) | (mel_audio.FIELDS if config.use_audio else {})
  return replace(_WITH_TOWERS, ignored=(*left_out, r"(talker|code2wav)\..*"), towers=towers)


_NAMES = merged_vision.Names("visual", "ln_q", "mlp.0", "mlp.2")
WEIGHTS = standard.WEIGHTS | standard.EXPERTS
_VISION_FIELDS = {
  **merged_vision.FIELDS,
  "vision_config.model_type": lambda c: "qwen3_omni_moe_vision_encoder",
  "vision_config.deepstack_visual_indexes": "deepstack_visual_indexes_for_vit",
  "position_id_per_seconds": "position_id_per_seconds",
}
HUGGING_FACE = HuggingFace(
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  {**STANDARD, **EXPERTS, "norm_topk_prob": "norm_topk_prob", "decoder_sparse_step": lambda c: 1},
  (*READS, *EXPERTS_READS, {"use_qk_norm": True}, merged_vision.read, merged_vision.read_placeholders),
  absent=absent(norm_topk_prob=False, num_experts=lambda entries: entries["num_local_experts"]),
  expects={**NO_WINDOW, **NO_DENSE_LAYERS},
  also=("qwen3_omni_moe_text",),
  prefixes={"thinker.model.": "model.", "thinker.lm_head.": "lm_head."},
  ignored=(*TIED_HEAD, r"(thinker\.)?(visual|audio_tower)\..*", r"(talker|code2wav)\..*"),
  towers={**_VISION_FIELDS, **mel_audio.FIELDS},
)
_WITH_TOWERS = replace(
  HUGGING_FACE,
  model_type="qwen3_omni_moe_text",
  fields={**HUGGING_FACE.fields, "rope_parameters": lambda c: rope(c) | merged_vision.mrope_entries(c)},
  prefixes={"thinker.": ""},
  multimodal=Multimodal("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker"),
)
