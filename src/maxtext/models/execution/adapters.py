"""From keys to LoRA adapters."""

import re
from collections.abc import Collection

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.dora import DoraMatmul
from maxtext.layers.lora import LoraMatmul, adapted_module, is_adapter
from maxtext.layers.merged_lora import MergedLora
from maxtext.models.execution.quantization import weight_rounding


def adapters(config: MaxTextConfig) -> LoraMatmul | None:
  """The adapters of a run; None without `lora_rank`."""
  c = config
  if not c.lora_rank:
    return None
  scale = c.lora_alpha / (c.lora_rank**0.5 if c.use_rslora else c.lora_rank)
  if c.lora_merge_aware:
    rounding = weight_rounding(c)
    assert rounding is not None, "the table of unsupported options asks for weight_format"
    return MergedLora(rank=c.lora_rank, scale=scale, targets=tuple(c.lora_targets), rounding=rounding)
  kind = DoraMatmul if c.use_dora else LoraMatmul
  return kind(rank=c.lora_rank, scale=scale, targets=tuple(c.lora_targets))


def check_adapters(config: MaxTextConfig, parameters: Collection[str]) -> None:
  """Raises where a pattern of `lora_targets` gives no module an adapter, or adapters are to be loaded into none."""
  if not config.lora_rank:
    if config.lora_input_adapters_path:
      raise ConfigError(
        f"lora_input_adapters_path={config.lora_input_adapters_path} needs lora_rank, lora_alpha and lora_targets of "
        "its adapters; the maxtext command and LLM read them from the folder."
      )
    return
  found = sorted({adapted_module(path) for path in parameters if is_adapter(path)})
  for pattern in config.lora_targets:
    if not any(re.search(pattern, module) for module in found):
      modules = sorted({path.removesuffix("/weight") for path in parameters if path.endswith("/weight")})
      raise ConfigError(
        f"lora_targets: '{pattern}' gives no module an adapter. Linear and expert weights can have one, among "
        f"{', '.join(modules)}."
      )
  if not config.lora_targets:
    raise ConfigError("lora_targets is empty, so that lora_rank has no adapters: leave it out for those of all layers.")
