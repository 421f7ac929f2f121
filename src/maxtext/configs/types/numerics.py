"""Number formats."""

from pydantic import Field

from maxtext.configs.types.enums import DType, MatmulPrecision
from maxtext.configs.types.section import Section


class DataTypes(Section):
  """Number formats of weights, activations and gradients."""

  dtype: DType = Field(DType.BFLOAT16, description="Activations and the inputs of matrix products.")
  grad_dtype: DType = Field(DType.FLOAT32, description="Gradients as they are summed and as the optimizer sees them.")
  weight_dtype: DType = Field(DType.FLOAT32, description="Weights as they are stored.")
  matmul_precision: MatmulPrecision = Field(
    MatmulPrecision.DEFAULT, description="Precision of matrix products outside attention kernels."
  )
  activations_in_float32: bool = Field(False, description="Apply activation functions in float32.")
