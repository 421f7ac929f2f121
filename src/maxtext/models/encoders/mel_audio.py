"""An audio encoder over log-mel spectrograms: keys to a tower, names of its weights, entries of `audio_config`."""

import math

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block
from maxtext.layers.mel import MelConvolutions, halved
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import LayerNormSpec
from maxtext.layers.patches import PatchMerger
from maxtext.media.audio import MelSounds
from maxtext.media.processed import FeatureText
from maxtext.models.encoders import vision
from maxtext.models.hugging_face import Field
from maxtext.models.spec import Group, TowerSpec
from maxtext.models.weight_table import Weight

_ACTIVATIONS = {"gelu": "exact gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "silu": "silu"}


def tower(config: MaxTextConfig) -> TowerSpec:
  """The encoder of chunks of 2 x n_window_for_audio frames, with the projector."""
  c, norm, chunk = config, LayerNormSpec(), 2 * config.n_window_for_audio
  heads, width = c.encoder_attention_heads_for_audio, c.d_model_for_audio
  if width % heads:
    raise ConfigError(f"encoder_attention_heads_for_audio={heads} does not divide d_model_for_audio={width}.")
  if c.n_window_infer_for_audio % chunk:
    raise ConfigError(
      f"n_window_infer_for_audio={c.n_window_infer_for_audio} must be a multiple of {chunk}, the frames of a chunk "
      f"(2 x n_window_for_audio)."
    )
  if c.output_dim_for_audio != c.base_emb_dim:
    raise ConfigError(
      f"output_dim_for_audio={c.output_dim_for_audio} must be the width of the decoder, {c.base_emb_dim}."
    )
  if (activation := _ACTIVATIONS.get(c.activation_function_for_audio)) is None:
    raise ConfigError(
      f"activation_function_for_audio={c.activation_function_for_audio} must be one of {', '.join(_ACTIVATIONS)}."
    )
  tokens = halved(chunk, c.num_conv_layers_for_audio)
  if tokens > c.max_source_positions_for_audio:
    raise ConfigError(
      f"max_source_positions_for_audio={c.max_source_positions_for_audio} must be at least {tokens}, those of a chunk "
      f"of {chunk} frames."
    )
  attention = GQA(heads, heads, width // heads, rope=None, bias=True, out_bias=True, causal=False)
  layer = Block(attention, MLP(c.encoder_ffn_dim_for_audio, activation, gated=False, bias=True), norm)
  return TowerSpec(
    "audio",
    width,
    math.ceil(c.max_sample_len_for_audio / chunk) * tokens,
    MelConvolutions(
      c.num_mel_bins_for_audio,
      c.downsample_hidden_size_for_audio,
      c.num_conv_layers_for_audio,
      c.max_timescale_for_audio,
      c.conv_chunksize_for_audio,
    ),
    (Group((layer,), c.encoder_layers_for_audio),),
    PatchMerger(1, norm, activation),
  )


def processor(config: MaxTextConfig) -> MelSounds:
  """What makes inputs of the tower."""
  c = config
  return MelSounds(
    FeatureText("<|audio_pad|>"),
    bins=c.num_mel_bins_for_audio,
    chunk=2 * c.n_window_for_audio,
    attended=c.n_window_infer_for_audio,
    longest=c.max_sample_len_for_audio,
    halvings=c.num_conv_layers_for_audio,
  )


_TOWER, _PREFIX = "towers/audio", "audio_tower"
_LAYER, _THEIRS = f"{_TOWER}/groups/*/layers/*", f"{_PREFIX}.layers.{{layer}}"
_LINEAR = {
  "mixer/query": "self_attn.q_proj",
  "mixer/key": "self_attn.k_proj",
  "mixer/value": "self_attn.v_proj",
  "mixer/out": "self_attn.out_proj",
  "feed_forward/up": "fc1",
  "feed_forward/down": "fc2",
}
_NORMS = {"mixer_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"}


def weights(tower: TowerSpec) -> dict[str, Weight]:
  """The names of all weights of the tower."""
  assert isinstance(tower.front_end, MelConvolutions)
  return _WEIGHTS | {
    f"{_TOWER}/front_end/convolutions/{i}/{ours}": Weight(f"{_PREFIX}.conv2d{i + 1}.{theirs}", table=ours == "kernel")
    for i in range(tower.front_end.count)
    for ours, theirs in {"kernel": "weight", "bias": "bias"}.items()
  }


_WEIGHTS = {
  **vision.linear_weights({f"{_TOWER}/front_end/out": f"{_PREFIX}.conv_out"}, bias=False),
  **vision.linear_weights({f"{_LAYER}/{ours}": f"{_THEIRS}.{theirs}" for ours, theirs in _LINEAR.items()}),
  **vision.norm_weights({f"{_LAYER}/{ours}": f"{_THEIRS}.{theirs}" for ours, theirs in _NORMS.items()}),
  **vision.norm_weights({f"{_TOWER}/projector/norm": f"{_PREFIX}.ln_post"}),
  **vision.linear_weights(
    {f"{_TOWER}/projector/up": f"{_PREFIX}.proj1", f"{_TOWER}/projector/out": f"{_PREFIX}.proj2"}
  ),
}
FIELDS: dict[str, Field] = {
  "audio_config.model_type": lambda c: "qwen3_omni_moe_audio_encoder",
  "audio_config.d_model": "d_model_for_audio",
  "audio_config.encoder_layers": "encoder_layers_for_audio",
  "audio_config.encoder_attention_heads": "encoder_attention_heads_for_audio",
  "audio_config.encoder_ffn_dim": "encoder_ffn_dim_for_audio",
  "audio_config.num_mel_bins": "num_mel_bins_for_audio",
  "audio_config.downsample_hidden_size": "downsample_hidden_size_for_audio",
  "audio_config.output_dim": "output_dim_for_audio",
  "audio_config.n_window": "n_window_for_audio",
  "audio_config.n_window_infer": "n_window_infer_for_audio",
  "audio_config.activation_function": "activation_function_for_audio",
  "audio_config.max_source_positions": "max_source_positions_for_audio",
  "audio_config.conv_chunksize": "conv_chunksize_for_audio",
}
