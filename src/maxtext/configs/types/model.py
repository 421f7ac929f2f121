"""What the model is."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from maxtext.configs.types.enums import DecoderBlockType, RopeType
from maxtext.configs.types.section import Section


class ModelArchitecture(Section):
  """Sizes and shape of the decoder."""

  decoder_block: DecoderBlockType = Field(DecoderBlockType.LLAMA2, description="Family of the model.")
  base_emb_dim: int = Field(2048, description="Width of the residual stream.")
  base_num_query_heads: int = Field(16, description="Query heads.")
  base_num_kv_heads: int = Field(16, description="Key and value heads; divides the query heads.")
  base_mlp_dim: int = Field(7168, description="Width of the feed-forward layer.")
  dense_init_scale: float = Field(1.0, description="Variance of initial weights, times the number of inputs.")
  base_num_decoder_layers: int = Field(16, description="Layers.")
  head_dim: int = Field(128, description="Width of one attention head.")
  mlp_activations: list[str] = Field(
    ["silu", "linear"], description="Activation of the feed-forward layer; a second 'linear' makes it gated."
  )
  normalization_layer_epsilon: float = Field(1e-5, description="Added to the variance in norms.")


class Logits(Section):
  """From the last hidden state to the loss."""

  logits_via_embedding: bool = Field(False, description="Use the embedding table as output head.")
  normalize_embedding_logits: bool = Field(True, description="With a tied head, divide logits by sqrt(width).")
  logits_dot_in_fp32: bool = Field(False, description="Compute the head's product in float32.")
  cast_logits_to_fp32: bool = Field(True, description="Compute softmax and loss in float32.")
  final_logits_soft_cap: None | Annotated[float, Ge(0)] = Field(None, description="Bound logits by cap*tanh(x/cap).")
  z_loss_multiplier: float = Field(0.0, description="Weight of the squared log-partition in the loss.")


class Attention(Section):
  """How attention is computed and what it sees."""

  attention: str = Field(
    "autoselected", description="Kernel: autoselected, dot_product, chunked, flash (TPU, GPU), cudnn_flash_jax (GPU)."
  )
  attention_type: Literal["global", "local_sliding"] = Field("global", description="Which keys a query sees.")
  sliding_window_size: Annotated[int, Ge(0)] = Field(0, description="Window of local_sliding attention, in tokens.")


class SplashAttention(Section):
  """Block sizes of the splash kernel."""

  sa_block_q: int = Field(512, description="Query block, forward.")
  sa_block_kv: int = Field(512, description="Key block held in memory, forward.")
  sa_block_kv_compute: int = Field(512, description="Key block per product, forward.")
  sa_block_q_dkv: int = Field(512, description="Query block, gradient of keys and values.")
  sa_block_kv_dkv: int = Field(512, description="Key block held in memory, gradient of keys and values.")
  sa_block_kv_dkv_compute: int = Field(512, description="Key block per product, gradient of keys and values.")
  sa_block_q_dq: int = Field(512, description="Query block, gradient of queries.")
  sa_block_kv_dq: int = Field(512, description="Key block, gradient of queries.")
  sa_use_fused_bwd_kernel: bool = Field(False, description="One kernel for the whole backward pass.")


class Rope(Section):
  """Rotary positions."""

  rope_type: RopeType = Field(RopeType.DEFAULT, description="Scaling of rotary frequencies.")
  rope_max_timescale: int = Field(10000, description="Base of the rotary frequencies (theta).")


class YarnRope(Section):
  """Parameters of scaled rotary positions."""

  original_max_position_embeddings: int = Field(4096, description="Length the model was first trained on.")
  rope_factor: int = Field(40, description="How many times longer positions are stretched.")
