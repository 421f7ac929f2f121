"""From keys to an attention kernel: the kernel for the platform, its block sizes, and the order of tokens."""

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import ReorderStrategy, SplashAttention
from maxtext.kernels.attention import AttentionKernel, Kernel
from maxtext.kernels.load_balance import LoadBalancedOrder
from maxtext.kernels.splash_attention import SplashBlocks
from maxtext.models.spec import DecoderSpec, groups_of, towers_of

_PLATFORMS = ("tpu", "gpu", "cuda", "cpu")
_FAST: Mapping[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
_KERNELS: Mapping[str, Mapping[str, Kernel]] = {
  "autoselected": {"cpu": "chunked", **_FAST},
  "dot_product": dict.fromkeys(_PLATFORMS, "dot_product"),
  "chunked": dict.fromkeys(_PLATFORMS, "chunked"),
  "flash": _FAST,
  "paged": {"cpu": "chunked", **_FAST},  # for prefill and training; decoding reads the paged KV cache
  "cudnn_flash_jax": {name: kernel for name, kernel in _FAST.items() if kernel == "cudnn"},
}


def attention(config: MaxTextConfig, mesh: Mesh, parts: int) -> AttentionKernel:
  """The attention kernel of a run on a mesh that shards sequences into `parts`."""
  c = config
  blocks = SplashBlocks(
    c.sa_block_q,
    c.sa_block_kv,
    c.sa_block_kv_compute,
    c.sa_block_q_dkv,
    c.sa_block_kv_dkv,
    c.sa_block_kv_dkv_compute,
    c.sa_block_q_dq,
    c.sa_block_kv_dq,
    c.sa_use_fused_bwd_kernel,
    _layouts(c),
  )
  kernel, ring = _kernel(c, mesh, parts), c.context_parallel_strategy == "ring"
  return AttentionKernel(kernel, c.matmul_precision.value, blocks, ring, _order(c, mesh, parts))


def for_spans(config: MaxTextConfig, spec: DecoderSpec, kernel: AttentionKernel) -> AttentionKernel:
  """The kernel, or one that lets the tokens of an image see each other both ways, where the model needs that.

  Raises:
    ConfigError: another kernel was asked for.
  """
  if kernel.kernel not in ("splash", "cudnn") or not any(tower.bidirectional_features for tower in towers_of(spec)):
    return kernel
  if config.attention not in ("autoselected", "paged"):
    raise ConfigError(
      f"attention={config.attention}: tokens of an image see each other both ways, which {kernel.kernel} attention "
      f"cannot do: write attention=chunked."
    )
  return replace(kernel, kernel="chunked")


def check_attention(config: MaxTextConfig, spec: DecoderSpec, kernel: Kernel) -> None:
  """Raises `ConfigError` if the kernel does not support the model: cuDNN has no soft caps, chunks or sinks."""
  names = ("", *(tower.name for tower in towers_of(spec)))
  mixers = [block.mixer for name in names for group in groups_of(spec, name) for block in group.cycle]
  lacking = {
    "attn_logits_soft_cap": any(getattr(mixer, "cap", None) for mixer in mixers),
    "chunk_attn_window_size": any(getattr(mixer, "chunked", False) for mixer in mixers),
    "attention_sink": any(getattr(mixer, "sinks", False) for mixer in mixers),
  }
  for key, needed in lacking.items():
    if needed and kernel == "cudnn":
      raise ConfigError(f"{key}={getattr(config, key)}: cuDNN attention cannot do it; write attention=chunked.")


def _layouts(config: MaxTextConfig) -> tuple[str, str, str]:
  for key in ("sa_q_layout", "sa_k_layout", "sa_v_layout"):
    if (layout := getattr(config, key)) not in ("HEAD_DIM_MINOR", "SEQ_MINOR"):
      raise ConfigError(f"{key}={layout} must be HEAD_DIM_MINOR or SEQ_MINOR.")
  return config.sa_q_layout, config.sa_k_layout, config.sa_v_layout


def _kernel(config: MaxTextConfig, mesh: Mesh, parts: int) -> Kernel:
  platform = mesh.devices.flat[0].platform
  kernels = _KERNELS[config.attention]
  if platform not in kernels:
    raise ConfigError(f"attention={config.attention} does not run on {platform} devices: write attention=autoselected.")
  kernel = kernels[platform]
  if parts > 1 and (kernel == "cudnn" or (kernel == "splash" and config.context_parallel_strategy == "ring")):
    raise ConfigError(
      f"attention={config.attention}: {kernel} attention cannot take rows split over {parts} devices by "
      f"context_parallel_strategy={config.context_parallel_strategy}: write attention=chunked."
    )
  if kernel == "splash":
    _check_splash(config, parts)
  return kernel


def _check_splash(config: MaxTextConfig, parts: int) -> None:
  length = config.max_target_length
  if length % (128 * parts):
    raise ConfigError(
      f"max_target_length={length} is not a multiple of {128 * parts}, 128 for each device that has a part of a row, "
      "which the splash kernel needs."
    )
  for key in (key for key in SplashAttention.model_fields if key.startswith("sa_block_")):
    size = getattr(config, key)
    local = length // parts if "block_q" in key else length
    if size < 128 or size % 128 or local % min(size, local):
      raise ConfigError(
        f"{key}={size} must be a multiple of 128 that divides {local}, "
        f"max_target_length={length} over {length // local} devices."
      )


def _order(config: MaxTextConfig, mesh: Mesh, parts: int) -> LoadBalancedOrder | None:
  """The load-balanced order of tokens in sequences sharded over `context`; None keeps their order."""
  c = config
  if c.max_target_length % parts:
    raise ConfigError(f"max_target_length={c.max_target_length} cannot be split over {parts} devices in equal parts.")
  if mesh.shape.get("context", 1) == 1 or not c.context_parallel_load_balance:
    return None
  ring, strategy = c.context_parallel_strategy == "ring", c.context_parallel_reorder_strategy
  striped = ring if strategy is ReorderStrategy.AUTO else strategy is ReorderStrategy.STRIPED
  order = LoadBalancedOrder("striped" if striped else "dual_chunk_swap", parts)
  if c.max_target_length % order.divisor:
    raise ConfigError(
      f"max_target_length={c.max_target_length} is not a multiple of {order.divisor}, which "
      f"context_parallel_load_balance=true needs to deal {parts} equal parts."
    )
  return order
