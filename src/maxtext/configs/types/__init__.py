"""Every key of a run as typed sections, one file per theme, gathered in `MaxTextConfig`."""

from maxtext.configs.types.data import DatasetGeneral, InferenceGeneral, Tokenizer
from maxtext.configs.types.enums import (
  DatasetType,
  DecoderBlockType,
  DType,
  LearningRateScheduleType,
  MatmulPrecision,
  OptimizerType,
  RematLocation,
  RematPolicy,
  RopeType,
)
from maxtext.configs.types.model import Attention, Logits, ModelArchitecture, Rope, SplashAttention, YarnRope
from maxtext.configs.types.numerics import DataTypes
from maxtext.configs.types.optimizer import AdamW, Optimizer
from maxtext.configs.types.parallel import (
  DcnParallelism,
  HardwareAndMesh,
  IciParallelism,
  LayoutAndSharding,
  RematAndOffload,
)
from maxtext.configs.types.run import AOT, DevelopmentAndDebugging, Metrics, RunInfo, TrainingLoop


class MaxTextConfig(
  RunInfo,
  DataTypes,
  ModelArchitecture,
  Logits,
  Attention,
  SplashAttention,
  HardwareAndMesh,
  LayoutAndSharding,
  DcnParallelism,
  IciParallelism,
  RematAndOffload,
  TrainingLoop,
  Optimizer,
  AdamW,
  Rope,
  YarnRope,
  DatasetGeneral,
  Tokenizer,
  InferenceGeneral,
  AOT,
  DevelopmentAndDebugging,
  Metrics,
):
  """One run: every key of every section, flat."""


__all__ = [
  "AOT",
  "AdamW",
  "Attention",
  "DType",
  "DataTypes",
  "DatasetGeneral",
  "DatasetType",
  "DcnParallelism",
  "DecoderBlockType",
  "DevelopmentAndDebugging",
  "HardwareAndMesh",
  "IciParallelism",
  "InferenceGeneral",
  "LayoutAndSharding",
  "LearningRateScheduleType",
  "Logits",
  "MatmulPrecision",
  "MaxTextConfig",
  "Metrics",
  "ModelArchitecture",
  "Optimizer",
  "OptimizerType",
  "RematAndOffload",
  "RematLocation",
  "RematPolicy",
  "Rope",
  "RopeType",
  "RunInfo",
  "SplashAttention",
  "Tokenizer",
  "TrainingLoop",
  "YarnRope",
]
