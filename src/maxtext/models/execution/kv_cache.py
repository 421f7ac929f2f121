"""From keys to the KV cache of a run: its pages, its quantization, and how much of it a step reads at once."""

from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import KvQuantAxis
from maxtext.layers.kv_cache import KVCacheQuantization
from maxtext.layers.paged_kv_cache import PagedKVCache

# Many small products are slow where starting one takes longer than reading what it reads.
_BLOCKS = {"cpu": 32}

_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}


def kv_cache_pages(config: MaxTextConfig, mesh: Mesh) -> PagedKVCache | None:
  """The pages that caches lie in, if they do."""
  c = config
  if c.attention != "paged":
    return None
  kernel, alignment = mesh.devices.flat[0].platform == "tpu", c.pagedattn_head_dim_alignment
  if kernel and alignment % 128:
    raise ConfigError(f"pagedattn_head_dim_alignment={alignment} must be a multiple of 128 on TPUs.")
  most = None if c.pagedattn_max_pages_per_group == -1 else c.pagedattn_max_pages_per_group
  block = c.pagedattn_pages_per_compute_block
  return PagedKVCache(c.pagedattn_num_pages, c.pagedattn_tokens_per_page, most, alignment, kernel, block)


def kv_cache_quantization(config: MaxTextConfig) -> KVCacheQuantization | None:
  """How cached keys and values are quantized, if they are."""
  if not config.quantize_kvcache:
    return None
  return KVCacheQuantization(_BITS[config.kv_quant_dtype], per_head=config.kv_quant_axis is KvQuantAxis.DKV)


def kv_cache_block(config: MaxTextConfig, mesh: Mesh) -> int | None:
  """The most positions of a cache that a step reads at once; None is any number."""
  if config.use_ragged_attention:
    return config.ragged_block_size
  return _BLOCKS.get(mesh.devices.flat[0].platform)
