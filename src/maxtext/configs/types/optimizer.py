"""How weights are updated."""

from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import Field

from maxtext.configs.types.enums import LearningRateScheduleType, OptimizerType
from maxtext.configs.types.section import Section


class Optimizer(Section):
  """Optimizer, accumulation and learning rate."""

  opt_type: OptimizerType = Field(OptimizerType.ADAMW, description="Optimizer.")
  gradient_accumulation_steps: Annotated[int, Gt(0)] = Field(1, description="Batches summed into one update.")
  gradient_clipping_threshold: Annotated[float, Ge(0)] = Field(1.0, description="Largest gradient norm; 0 is no limit.")
  learning_rate: Annotated[float, Ge(0)] = Field(3e-5, description="Peak learning rate.")
  lr_schedule_type: LearningRateScheduleType = Field(
    LearningRateScheduleType.COSINE, description="Shape of the learning rate over the run."
  )
  learning_rate_final_fraction: float = Field(0.1, description="Last learning rate, as a fraction of the peak.")
  warmup_steps_fraction: Annotated[float, Ge(0.0), Le(1.0)] = Field(
    0.1, description="Share of the schedule that rises."
  )
  learning_rate_schedule_steps: Annotated[int, Ge(-1)] = Field(-1, description="Schedule length; -1 takes steps.")


class AdamW(Section):
  """AdamW."""

  adam_b1: float = Field(0.9, description="Decay of the first moment.")
  adam_b2: float = Field(0.95, description="Decay of the second moment.")
  adam_eps: float = Field(1e-8, description="Added to the root of the second moment.")
  adam_eps_root: float = Field(0.0, description="Added under the root of the second moment.")
  adam_weight_decay: float = Field(0.1, description="Decoupled weight decay.")
  mu_dtype: str = Field("", description="Number format of the first moment; empty takes the weights'.")
