"""Weights at rest in few bits. These keys are beyond the specification, whose `quantization` is about matmuls."""

from typing import Literal

from pydantic import Field

from maxtext.configs.types.section import Section


class WeightsAtRest(Section):
  """How the weights of linear layers and experts are stored for inference and below LoRA adapters."""

  weight_format: Literal["", "int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"] = Field(
    "",
    description="Few-bit format in which weights are stored: for inference, and below LoRA adapters (QLoRA). Without "
    "adapters, training rounds to it (QAT). '' stores weight_dtype.",
  )
  weight_block_size: int = Field(
    0, ge=-1, le=2**20, description="Inputs that share a scale of weight_format; 0 is the format's own, -1 all inputs."
  )
  weight_format_targets: list[str] = Field(
    default_factory=lambda: ["layers/"],
    description="Patterns of paths of modules whose weights have weight_format, among linear layers, experts and head. "
    "The embedding has it where 'embedding' is one of them.",
  )
