"""Where arrays live and what is kept between forward and backward."""

from typing import Any, Literal

from pydantic import Field

from maxtext.configs.types.enums import RematLocation
from maxtext.configs.types.section import Section


class HardwareAndMesh(Section):
  """The devices and the mesh they form."""

  hardware: Literal["tpu", "gpu", "gpu_multiprocess", "cpu"] = Field(
    "tpu", description="Hardware to run on; when not set, whatever JAX finds."
  )
  mesh_axes: list[str] = Field(
    ["data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_autoregressive", "tensor",
     "tensor_transpose", "tensor_sequence", "expert", "autoregressive"],
    description="Names of the mesh axes, outermost first.",
  )  # fmt: skip
  scan_layers: bool = Field(True, description="Compile one layer and loop over it, instead of every layer.")
  allow_split_physical_axes: bool = Field(False, description="Let one physical torus axis serve two mesh axes.")


class LayoutAndSharding(Section):
  """Which mesh axes each named dimension is split over."""

  logical_axis_rules: Any = Field([], description="Pairs [named dimension, mesh axes]; activation_* for activations.")
  input_data_sharding_logical_axes: list[str] = Field(
    ["activation_embed_and_logits_batch", "activation_norm_length"], description="Named dimensions of a batch."
  )


class DcnParallelism(Section):
  """Parallelism between slices, over the data-centre network; -1 takes what is left."""

  dcn_data_parallelism: int = Field(-1, description="Slices that split the batch.")
  dcn_fsdp_parallelism: int = Field(1, description="Slices that split weights and batch.")
  dcn_fsdp_transpose_parallelism: int = Field(1, description="Slices that split weights along their other side.")
  dcn_tensor_parallelism: int = Field(1, description="Slices that split heads and feed-forward width.")
  dcn_tensor_transpose_parallelism: int = Field(1, description="Slices that split the residual width.")
  dcn_tensor_sequence_parallelism: int = Field(1, description="Slices that split heads, and length between layers.")


class IciParallelism(Section):
  """Parallelism inside a slice, over its fast links; -1 takes what is left."""

  ici_data_parallelism: int = Field(1, description="Devices that split the batch.")
  ici_fsdp_parallelism: int = Field(-1, description="Devices that split weights and batch.")
  ici_fsdp_transpose_parallelism: int = Field(1, description="Devices that split weights along their other side.")
  ici_tensor_parallelism: int = Field(1, description="Devices that split heads and feed-forward width.")
  ici_tensor_transpose_parallelism: int = Field(1, description="Devices that split the residual width.")
  ici_tensor_sequence_parallelism: int = Field(1, description="Devices that split heads, and length between layers.")


class RematAndOffload(Section):
  """What of a layer's forward pass waits for its backward pass, and where."""

  remat_policy: str = Field(
    "full", description="A policy's name; several, separated by commas, take turns over the layers."
  )
  decoder_layer_input: RematLocation = Field(RematLocation.DEVICE, description="Input of a layer (policy custom).")
  context: RematLocation = Field(RematLocation.REMAT, description="Attention output before its projection (custom).")
  mlpwi: RematLocation = Field(RematLocation.REMAT, description="Feed-forward input product, ungated (custom).")
  mlpwi_0: RematLocation = Field(RematLocation.REMAT, description="Feed-forward gate product (custom).")
  mlpwi_1: RematLocation = Field(RematLocation.REMAT, description="Feed-forward up product (custom).")
  mlpwo: RematLocation = Field(RematLocation.REMAT, description="Feed-forward output product (custom).")
  query_proj: RematLocation = Field(RematLocation.REMAT, description="Query projection (custom).")
  key_proj: RematLocation = Field(RematLocation.REMAT, description="Key projection (custom).")
  value_proj: RematLocation = Field(RematLocation.REMAT, description="Value projection (custom).")
  out_proj: RematLocation = Field(RematLocation.REMAT, description="Attention output projection (custom).")
