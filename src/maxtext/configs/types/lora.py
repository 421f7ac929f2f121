"""LoRA adapters. These keys are beyond the specification, which has `lora_input_adapters_path` alone."""

from pydantic import Field

from maxtext.configs.types.section import Section


class Lora(Section):
  """Adapters beside frozen weights; `lora_input_adapters_path` sets these keys from its folder."""

  lora_rank: int = Field(0, ge=0, le=65536, description="Rank of LoRA adapters, which alone are trained; 0 is none.")
  lora_alpha: float = Field(16.0, gt=0, le=1e9, description="LoRA adapters are multiplied by this over their rank.")
  lora_targets: list[str] = Field(
    default_factory=lambda: ["layers/"],
    description="Patterns of paths of modules that get LoRA adapters, among layers' linear and expert weights.",
  )
  use_dora: bool = Field(False, description="True trains the magnitudes of adapted weights beside LoRA (DoRA).")
  use_rslora: bool = Field(False, description="True divides lora_alpha by the root of the rank instead (rsLoRA).")
  lora_merge_aware: bool = Field(
    False,
    description="True rounds the base with its LoRA adapters in it to weight_format in training, so that what "
    "`maxtext quantize` merges is what was trained.",
  )
