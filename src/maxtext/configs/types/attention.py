"""How tokens see each other."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from maxtext.configs.types.section import Section


class Attention(Section):
  """How attention is computed and what it sees."""

  attention: str = Field(
    "autoselected",
    description="Kernel: autoselected, dot_product, chunked, flash (TPU, GPU), cudnn_flash_jax (GPU); or paged, "
    "which is autoselected with a cache in pages.",
  )
  attention_type: Literal["global", "local_sliding", "chunk", "mla", "full"] = Field(
    "global", description="Which keys a query attends to."
  )
  share_kv_projections: bool = Field(False, description="True uses one projection for both keys and values.")
  global_num_kv_heads: int = Field(
    0, description="Key-value heads in global attention layers; 0 takes the usual count."
  )
  attention_sink: bool = Field(False, description="True adds a learned logit per head to the softmax denominator.")
  float32_qk_product: bool = Field(False, description="True computes the query-key matmul in float32.")
  float32_logits: bool = Field(False, description="True casts attention logits to float32 before softmax.")
  sliding_window_size: int = Field(0, ge=0, description="Window of local_sliding attention, in tokens.")
  chunk_attn_window_size: int = Field(0, ge=0, description="Tokens per chunk when attention is chunked; 0 is unset.")
  attn_logits_soft_cap: None | Annotated[float, Ge(0)] = Field(
    None, description="Bound of the tanh cap on attention logits; None or 0 is no cap."
  )
  use_post_attn_norm: bool = Field(False, description="True normalizes the attention output before the residual sum.")
  use_post_ffw_norm: bool = Field(False, description="True normalizes the feed-forward output before the residual sum.")
  use_ragged_attention: bool = Field(
    False, description="True reads the cache in blocks when decoding, up to what is used of it, on any device."
  )
  use_tokamax_gmm: bool = Field(False, description="True runs the experts' grouped matmuls with Tokamax.")
  ragged_block_size: int = Field(256, description="Most cache tokens per block in ragged attention.")
  enable_padding_causal_mask: bool = Field(
    True, description="True masks padding as well as later tokens (GPU fused attention)."
  )
  use_tokamax_splash: bool = Field(False, description="True uses Tokamax's splash attention kernel.")
  use_jax_splash: bool = Field(
    False, description="True uses the plain JAX version of splash attention, with no kernel."
  )
  force_q_layout: bool = Field(
    False, description="True pins the memory layout of the query before the attention kernel."
  )
  use_qk_clip: bool = Field(False, description="True shrinks query and key weights when logits pass qk_clip_threshold.")
  qk_clip_threshold: float = Field(100.0, description="Largest attention logit before use_qk_clip shrinks the weights.")


class MlaAttention(Section):
  """Attention over a compressed latent."""

  mla_naive_kvcache: bool = Field(True, description="True caches full keys and values, false the compressed latent.")
  q_lora_rank: int = Field(0, ge=0, description="Width of the compressed query; 0 is a direct projection.")
  kv_lora_rank: int = Field(512, ge=0, description="Width of the compressed key-value latent.")
  qk_nope_head_dim: int = Field(128, ge=0, description="Query and key width per head without rotary position (MLA).")
  qk_rope_head_dim: int = Field(64, ge=0, description="Query and key width per head with rotary position (MLA).")
  v_head_dim: int = Field(128, ge=0, description="Value width per head (MLA).")


class MoBa(Section):
  """Attention to chosen blocks of keys."""

  moba: bool = Field(False, description="True has each query attend to only its best-scoring key blocks.")
  moba_chunk_size: int = Field(1024, description="Tokens per key block (moba).")
  moba_topk: int = Field(8, description="Key blocks each query attends to (moba).")


class AttentionIndexer(Section):
  """Attention to keys that a small indexer chooses."""

  use_indexer: bool = Field(False, description="True has a small scorer choose the tokens each query attends to.")
  indexer_head_dim: int = Field(128, ge=0, description="Width of each indexer head.")
  indexer_n_heads: int = Field(64, ge=0, description="Indexer query heads.")
  indexer_topk: int = Field(2048, ge=0, description="Tokens the indexer picks for each query.")
  indexer_sparse_training: bool = Field(
    False, description="True trains with attention to the picked tokens only, false to all (dense warm-up)."
  )
  indexer_loss_scaling_factor: float = Field(
    0.0, description="Weight of the loss that fits the indexer to attention; 0 is no such loss."
  )


class Llama4Attention(Section):
  """Norms and temperature of queries and keys."""

  use_qk_norm: bool = Field(False, description="True normalizes queries and keys in attention.")
  temperature_tuning: bool = Field(
    False, description="True scales queries by position in layers without rotary position."
  )


class SplashAttention(Section):
  """Block sizes of the splash kernel."""

  sa_block_q: int = Field(512, description="Query block, forward.")
  sa_block_kv: int = Field(512, description="Key block held in memory, forward.")
  sa_block_kv_compute: int = Field(512, description="Key block per matmul, forward.")
  sa_block_q_dkv: int = Field(512, description="Query block, gradient of keys and values.")
  sa_block_kv_dkv: int = Field(512, description="Key block held in memory, gradient of keys and values.")
  sa_block_kv_dkv_compute: int = Field(512, description="Key block per matmul, gradient of keys and values.")
  sa_block_q_dq: int = Field(512, description="Query block, gradient of queries.")
  sa_block_kv_dq: int = Field(512, description="Key block, gradient of queries.")
  sa_use_fused_bwd_kernel: bool = Field(False, description="One kernel for the whole backward pass.")
  sa_q_layout: str = Field("HEAD_DIM_MINOR", description="Query memory layout: HEAD_DIM_MINOR or SEQ_MINOR.")
  sa_k_layout: str = Field("HEAD_DIM_MINOR", description="Key memory layout: HEAD_DIM_MINOR or SEQ_MINOR.")
  sa_v_layout: str = Field("HEAD_DIM_MINOR", description="Value memory layout: HEAD_DIM_MINOR or SEQ_MINOR.")
  use_max_logit_estimate: int = Field(
    -1, description="Fixed guess of the largest logit, in place of a running one; -1 is none."
  )
  cost_estimate_flops_fwd: int = Field(
    -1, description="Forward FLOPs reported to the compiler; -1 leaves it to the kernel."
  )
  cost_estimate_flops_bwd: int = Field(
    -1, description="Backward FLOPs reported to the compiler; -1 leaves it to the kernel."
  )
  dq_reduction_steps: int = Field(
    0, description="Partial sums of the query gradient (Tokamax); 0 is the kernel's own choice."
  )
  use_splash_scheduler: bool = Field(
    False, description="True turns on the experimental scheduler in the splash kernel (Tokamax)."
  )


class PagedAttention(Section):
  """Pages of the cache."""

  pagedattn_num_pages: int = Field(64, ge=1, description="Pages in the key-value cache.")
  pagedattn_tokens_per_page: int = Field(32, ge=1, description="Tokens held by one cache page.")
  pagedattn_pages_per_compute_block: int = Field(4, ge=1, description="Pages the kernel handles in one block.")
  pagedattn_max_pages_per_group: int = Field(
    -1, description="Most pages for one sequence; -1 works it out from the longest length."
  )
  pagedattn_head_dim_alignment: int = Field(
    128, ge=1, description="Multiple that the head width is padded to in the paged cache."
  )
