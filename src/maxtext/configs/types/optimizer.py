"""How weights are updated."""

from pydantic import Field

from maxtext.configs.types.enums import LearningRateScheduleType, OptimizerType, WsdDecayStyle
from maxtext.configs.types.section import Section


class Optimizer(Section):
  """Optimizer, accumulation and learning rate."""

  opt_type: OptimizerType = Field(OptimizerType.ADAMW, description="Optimizer.")
  skip_step_on_spikes: bool = Field(
    False, description="True drops updates whose loss or gradient norm is far above its recent mean."
  )
  skip_step_interval: int = Field(
    128, gt=0, description="Recent steps that give the mean and deviation for skip_step_on_spikes."
  )
  skip_step_scaling_factor: float = Field(6.0, description="Standard deviations above the mean that count as a spike.")
  gradient_accumulation_steps: int = Field(1, gt=0, description="Batches summed into one update.")
  use_tunix_gradient_accumulation: bool = Field(
    False, description="True leaves gradient accumulation to the Tunix trainer."
  )
  gradient_clipping_threshold: float = Field(1.0, ge=0, description="Largest gradient norm; 0 is no limit.")
  learning_rate: float = Field(3e-05, ge=0, description="Peak learning rate.")
  lr_schedule_type: LearningRateScheduleType = Field(
    LearningRateScheduleType.COSINE, description="Shape of the learning rate over the run."
  )
  learning_rate_final_fraction: float = Field(0.1, description="Last learning rate, as a fraction of the peak.")
  wsd_decay_steps_fraction: float = Field(
    0.1, ge=0.0, le=1.0, description="Share of the schedule spent in the final decay of warmup-stable-decay, 0 to 1."
  )
  wsd_decay_style: WsdDecayStyle = Field(
    WsdDecayStyle.LINEAR, description="Shape of the final decay of warmup-stable-decay: linear or cosine."
  )
  warmup_steps_fraction: float = Field(0.1, ge=0.0, le=1.0, description="Share of the schedule that rises.")
  learning_rate_schedule_steps: int = Field(-1, ge=-1, description="Schedule length; -1 takes steps.")
  trainable_parameters_mask: list[str] = Field(
    default_factory=list, description="Patterns of parameter names that train, the rest frozen; empty trains all."
  )


class AdamW(Section):
  """AdamW."""

  adam_b1: float = Field(0.9, description="Decay of the first moment.")
  adam_b2: float = Field(0.95, description="Decay of the second moment.")
  adam_eps: float = Field(1e-08, description="Added to the root of the second moment.")
  adam_eps_root: float = Field(0.0, description="Added under the root of the second moment.")
  adam_weight_decay: float = Field(0.1, description="Decoupled weight decay.")
  adamw_mask: list[str] = Field(
    default_factory=list, description="Patterns of parameter names left out of AdamW weight decay; empty decays all."
  )
  mu_dtype: str = Field("", description="Dtype of the first moment; empty takes the weights'.")


class Muon(Section):
  """Muon."""

  muon_beta: float = Field(0.95, description="Decay of Muon's momentum average.")
  muon_weight_decay: float = Field(0, description="Weight decay of matrices updated by Muon; 0 is none.")
  muon_consistent_rms: float | None = Field(
    None, description="Update size to match Adam's, about 0.2; None scales by matrix shape instead."
  )
