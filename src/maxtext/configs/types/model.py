"""What the model is, attention and experts apart."""

from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from maxtext.configs.types.enums import DecoderBlockType, RopeType
from maxtext.configs.types.section import Section


class ModelArchitecture(Section):
  """Sizes and shape of the decoder."""

  decoder_block: DecoderBlockType = Field(DecoderBlockType.LLAMA2, description="Family of the model.")
  global_parameter_scale: int = Field(
    1, description="Approximate growth in parameter count over the base sizes; a power of two."
  )
  base_emb_dim: int = Field(2048, description="Width of the residual stream.")
  base_num_query_heads: int = Field(16, description="Query heads.")
  base_num_kv_heads: int = Field(16, description="Key and value heads; divides the query heads.")
  base_mlp_dim: int = Field(7168, description="Width of the feed-forward layer.")
  dense_init_scale: float = Field(1.0, description="Variance of initial weights, times the number of inputs.")
  base_num_decoder_layers: int = Field(16, description="Layers.")
  head_dim: int = Field(128, description="Width of one attention head.")
  attention_output_dim: int = Field(-1, description="Width of the attention output; -1 takes the embedding width.")
  global_head_dim: int = Field(0, description="Head width in global attention layers; 0 takes head_dim.")
  mlp_activations: list[str] = Field(
    ["silu", "linear"], description="Activation of the feed-forward layer; a second 'linear' makes it gated."
  )
  mlp_activations_limit: float = Field(
    -1.0, description="Bound at which feed-forward activations are clipped; -1 is no limit."
  )
  normalization_layer_epsilon: float = Field(1e-05, description="Added to the variance in norms.")
  fused_qkv: bool = Field(False, description="True computes query, key and value in one matmul.")
  attention_bias: bool = Field(False, description="True adds a bias to the attention projections.")
  fused_mlp: bool = Field(False, description="True computes gate and up projections in one matmul.")
  qk_norm_with_scale: bool = Field(True, description="True gives query and key norms a learned scale.")
  v_norm_with_scale: bool = Field(True, description="True gives the value norm a learned scale.")


class Engram(Section):
  """Memory looked up by n-grams."""

  engram_layers: list[int] = Field(
    default_factory=list, description="Decoder layers that get an n-gram memory, from 0; [] is none."
  )
  engram_num_heads: int = Field(8, description="Hash heads per n-gram length.")
  engram_head_dim: int = Field(1280, description="Width of one Engram head.")
  engram_vocab_bases: list[int] = Field(
    default_factory=list, description="Least hash table size for each n-gram length, from 2 up."
  )
  engram_max_ngram_size: int = Field(3, description="Longest n-gram looked up, in tokens; lengths start at 2.")
  engram_kernel_size: int = Field(4, description="Tokens spanned by the convolution over the looked-up memory.")
  engram_seed: int = Field(0, description="Seed of the n-gram hash multipliers.")


class MTP(Section):
  """Prediction of several tokens at once."""

  mtp_num_layers: int = Field(
    0, ge=0, description="Multi-token prediction (MTP) layers, each of which predicts one token further; 0 is none."
  )
  mtp_loss_scaling_factor: float = Field(
    0.1, ge=0, description="Weight of the multi-token prediction loss in the total."
  )
  mtp_eval_target_module: int = Field(
    0, ge=0, description="Prediction layer, from 1, whose acceptance rate is evaluated; 0 is none."
  )


class Logits(Section):
  """From the last hidden state to the loss."""

  logits_via_embedding: bool = Field(False, description="Use the embedding table as output head.")
  normalize_embedding_logits: bool = Field(True, description="With a tied head, divide logits by sqrt(width).")
  logits_dot_in_fp32: bool = Field(False, description="Compute the head's matmul in float32.")
  cast_logits_to_fp32: bool = Field(
    True, description="Keep logits in float32; false keeps them in dtype. The loss is summed in float32 either way."
  )
  final_logits_soft_cap: None | Annotated[float, Ge(0)] = Field(None, description="Bound logits by cap*tanh(x/cap).")
  z_loss_multiplier: float = Field(0.0, description="Weight of the squared log-partition in the loss.")


class ManifoldConstrainedHyperConnections(Section):
  """Several residual streams, mixed by doubly stochastic matrices."""

  mhc_expansion_rate: int = Field(1, gt=0, description="Parallel residual streams per layer; 1 is the plain residual.")
  sinkhorn_iterations: int = Field(
    20, gt=0, description="Row and column normalizations that make the stream mixing doubly stochastic."
  )


class PositionalEmbedding(Section):
  """Positions other than rotary."""

  use_iota_embed: bool = Field(False, description="True looks tokens up by a one-hot matmul instead of a gather.")
  use_untrainable_positional_embedding: bool = Field(
    False, description="True adds fixed sinusoidal positions to the token embeddings."
  )
  trainable_position_size: int = Field(-1, description="Rows of the learned position table; -1 is no table.")
  nope_layer_interval: int = Field(-1, description="Every n-th layer goes without rotary positions; -1 is none.")


class Rope(Section):
  """Rotary positions."""

  rope_type: RopeType = Field(RopeType.DEFAULT, description="Scaling of rotary frequencies.")
  rope_use_scale: bool = Field(True, description="True applies the Llama 3.1 long-context frequency scaling.")
  rope_min_timescale: int = Field(1, description="Shortest rotary wavelength scale, in positions.")
  rope_max_timescale: int = Field(10000, description="Base of the rotary frequencies (theta).")
  rope_linear_scaling_factor: float = Field(
    1.0, description="Divisor of rotary frequencies for longer context; 1 is no change."
  )
  local_rope_max_timescale: int = Field(
    -1, description="Rotary base of sliding-window layers; -1 takes rope_max_timescale."
  )
  global_rope_max_timescale: int = Field(
    -1, description="Rotary base of full-attention layers; -1 takes rope_max_timescale."
  )
  global_rope_proportion: float = Field(
    0.25, description="Share of the head width rotated in full-attention layers, 0 to 1."
  )
  local_rope_proportion: float = Field(
    1.0, description="Share of the head width rotated in sliding-window layers, 0 to 1."
  )


class YarnRope(Section):
  """Parameters of scaled rotary positions."""

  max_position_embeddings: int = Field(163840, description="Longest context, in positions, after YaRN extension.")
  original_max_position_embeddings: int = Field(4096, description="Length the model was first trained on.")
  rope_factor: int = Field(40, description="How many times longer positions are stretched.")
  beta_fast: int = Field(
    32, description="Rotations over the original context above which YaRN leaves a frequency as is."
  )
  beta_slow: int = Field(
    1, description="Rotations over the original context below which YaRN scales a frequency fully."
  )
  mscale: float = Field(1.0, description="Multiplier in the attention-score correction for longer context (YaRN).")
  rope_interleave: bool = Field(
    True, description="True rotates neighbouring dimensions as pairs; false pairs the two halves."
  )
  rope_truncate: bool = Field(True, description="True rounds the YaRN ramp's bounds to whole dimensions.")
  rope_attention_scaling: bool = Field(
    False, description="True multiplies rotated queries and keys by YaRN's attention factor."
  )


class Qwen3Next(Section):
  """The gated delta net."""

  gdn_conv_kernel_dim: int = Field(4, description="Tokens spanned by the causal convolution.")
  gdn_key_head_dim: int = Field(128, description="Query and key width per head, linear attention.")
  gdn_value_head_dim: int = Field(128, description="Value width per head, linear attention.")
  gdn_num_key_heads: int = Field(16, description="Query and key heads, linear attention.")
  gdn_num_value_heads: int = Field(32, description="Value heads, linear attention.")
  gdn_chunk_size: int = Field(64, description="Tokens per chunk when the delta rule runs in parallel.")
  use_qk_norm_in_gdn: bool = Field(True, description="True applies L2 norm to queries and keys in linear attention.")
  partial_rotary_factor: float = Field(1.0, description="Share of each head's width with rotary position; 1 is all.")
