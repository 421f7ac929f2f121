"""From keys to the KV cache of a run: pages, quantization, and how many positions a step reads at once."""

import math
import os
from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import KvQuantAxis
from maxtext.layers.kv_cache import KVCacheQuantization
from maxtext.layers.paged_kv_cache import PagedKVCache

# Positions per block, by platform. Elsewhere small matmuls are slow: launching one takes longer than its reads.
_BLOCKS = {"cpu": 32}

_MOST_PARTS = 8  # of which each is a loop in the program of a layer

_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}


def kv_cache_pages(config: MaxTextConfig, mesh: Mesh) -> PagedKVCache | None:
  """The paged KV cache; None unless attention=paged."""
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
  """The KV-cache quantization; None unless quantize_kvcache is set."""
  if not config.quantize_kvcache:
    return None
  return KVCacheQuantization(_BITS[config.kv_quant_dtype], per_head=config.kv_quant_axis is KvQuantAxis.DKV)


def kv_cache_block(config: MaxTextConfig, mesh: Mesh) -> int | None:
  """The maximum number of cache positions that a step reads at once; None is no limit."""
  if config.use_ragged_attention:
    return config.ragged_block_size
  return _BLOCKS.get(mesh.devices.flat[0].platform)


def kv_cache_parts(mesh: Mesh) -> int:
  """In how many parts of the rows a step reads blocks: a CPU reads one with each of its cores, up to a few."""
  if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
    return 1
  return 2 ** int(math.log2(min(os.cpu_count() or 1, _MOST_PARTS)))
