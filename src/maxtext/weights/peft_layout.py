"""What reading and writing PEFT folders of LoRA adapters share: names, and the tensors that are linear layers."""

from dataclasses import replace

from maxtext.configs import MaxTextConfig
from maxtext.models.build import weight_table
from maxtext.models.model import Model
from maxtext.weights.tensor_layout import ParameterSlice, TensorLayout, tensor_layouts

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def linear_layouts(config: MaxTextConfig, model: Model) -> dict[str, TensorLayout]:
  """The tensors that are the weight of one linear layer each."""
  return {
    name: layout
    for name, layout in tensor_layouts(model, weight_table(config, model.spec)).items()
    if name.endswith(".weight")
    and "{expert}" not in layout.weight.name
    and all(_is_matrix(model, s) for s in layout.slices)
  }


def _is_matrix(model: Model, slice_: ParameterSlice) -> bool:
  stacked, contracted = model.contracted[slice_.path]
  return slice_.path.endswith("/weight") and contracted > 0 and stacked == len(slice_.index) and len(slice_.rows) == 1


def of_outputs(model: Model, layout: TensorLayout, rank: int) -> TensorLayout:
  """The layout of B [outputs, rank] beside a weight: the weight's, with the rank in place of the inputs."""
  slices = [replace(s, shape=(rank, *s.shape[model.contracted[s.path][1] :]), rows=(rank,)) for s in layout.slices]
  return TensorLayout(replace(layout.weight, transposed=True), layout.blocks, slices)
