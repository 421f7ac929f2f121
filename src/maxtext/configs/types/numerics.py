"""Dtypes and quantization."""

from typing import Literal

from pydantic import Field

from maxtext.configs.types.enums import DType, KvQuantAxis, MatmulPrecision, QuantizationType
from maxtext.configs.types.section import Section


class DataTypes(Section):
  """Dtypes of weights, activations and gradients."""

  dtype: DType = Field(DType.BFLOAT16, description="Activations and the inputs of matmuls.")
  grad_dtype: DType = Field(DType.FLOAT32, description="Gradients as they are summed and as the optimizer sees them.")
  weight_dtype: DType = Field(DType.FLOAT32, description="Weights as they are stored.")
  matmul_precision: MatmulPrecision = Field(
    MatmulPrecision.DEFAULT, description="Precision of matmuls outside attention kernels."
  )
  activations_in_float32: bool = Field(False, description="Apply activation functions in float32.")
  dtype_mm: str = Field("float32", description="Computation type of the multimodal encoders.")


class Quantization(Section):
  """Products and caches in few bits."""

  quantization: None | QuantizationType = Field(
    QuantizationType.NONE, description="Format of quantized matmuls (int8, fp8...); empty is none."
  )
  replicate_quant_scale: bool = Field(
    False, description="True copies quantization scales to all devices rather than sharding them."
  )
  quant_cfg_path: str = Field(
    "", description="File of per-layer settings for mixed-precision quantization; '' is none."
  )
  quantize_kvcache: bool = Field(False, description="True stores the key-value cache as kv_quant_dtype.")
  kv_quant_axis: KvQuantAxis = Field(
    KvQuantAxis.HEADS_AND_DKV, description="Axes that share one scale in the quantized key-value cache."
  )
  kv_quant_dtype: Literal["int8", "int4"] = Field("int8", description="Dtype of the quantized KV cache.")
  quantization_local_shard_count: int = Field(
    -1, description="Shards that each find their own scale range; -1 takes the slice count."
  )
  use_qwix_quantization: bool = Field(False, description="Either value: one implementation does what Qwix and AQT do.")
  use_manual_quantization: bool = Field(
    False, description="True quantizes by hand-written code in the batch-split layers."
  )
  weight_quantization_calibration_method: str = Field(
    "absmax", description="How the range of weights is found, such as absmax, fixed or delayed."
  )
  act_quantization_calibration_method: str = Field(
    "absmax", description="How the range of activations is found, such as absmax, fixed or delayed."
  )
  bwd_quantization_calibration_method: str = Field(
    "absmax", description="How the range of gradients is found, such as absmax or fixed."
  )
  weight_sparsity_n: int | None = Field(None, description="Weights kept of every weight_sparsity_m; None is dense.")
  weight_sparsity_m: int | None = Field(None, description="Group size for weight_sparsity_n; None is dense.")
  weight_sparsity_update_step: int = Field(10, description="Steps between updates of the sparsity mask.")
  weight_sparsity_start_step: int = Field(50, description="First step with sparse weights; dense before it.")
