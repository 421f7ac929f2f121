"""Every key of a run as typed sections, one file per theme, gathered in `MaxTextConfig`."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from maxtext.configs.types.attention import (
  Attention,
  AttentionIndexer,
  Llama4Attention,
  MlaAttention,
  MoBa,
  PagedAttention,
  SplashAttention,
)
from maxtext.configs.types.checkpointing import Checkpointing, ElasticTraining, EmergencyCheckpointing, OrbaxStorage
from maxtext.configs.types.data import DatasetGeneral, GrainDataset, HfDataset, OlmoGrainDataset, TfdsDataset, Tokenizer
from maxtext.configs.types.derived_values import DerivedValues
from maxtext.configs.types.enums import (
  CustomRule,
  DatasetType,
  DecoderBlockType,
  DType,
  KvQuantAxis,
  LearningRateScheduleType,
  MatmulPrecision,
  OptimizerType,
  ProfilerType,
  QuantizationType,
  RematLocation,
  RematPolicy,
  ReorderStrategy,
  RopeType,
  SamplingStrategy,
  ShardMode,
  TokenizerType,
  WsdDecayStyle,
  XProfTPUPowerTraceMode,
)
from maxtext.configs.types.experts import DeepSeekMoE, MoEGeneral, MoEKernels
from maxtext.configs.types.inference import (
  Decoding,
  InferenceBenchmark,
  InferenceGeneral,
  InferenceLayout,
  InferenceServer,
  PrefixCaching,
)
from maxtext.configs.types.lora import Lora
from maxtext.configs.types.model import (
  MTP,
  Engram,
  Logits,
  ManifoldConstrainedHyperConnections,
  ModelArchitecture,
  PositionalEmbedding,
  Qwen3Next,
  Rope,
  YarnRope,
)
from maxtext.configs.types.multimodal import AudioEncoder, MultimodalGeneral, VisionProjector, VisionTower
from maxtext.configs.types.numerics import DataTypes, Quantization
from maxtext.configs.types.observability import (
  Events,
  ExperimentTrackers,
  GcpMonitoring,
  Goodput,
  HloDump,
  ManagedMLDiagnostics,
  Metrics,
  Profiling,
  StackTrace,
  Tensorboard,
)
from maxtext.configs.types.optimizer import AdamW, Muon, Optimizer
from maxtext.configs.types.parallel import (
  DcnParallelism,
  DilocoParams,
  HardwareAndMesh,
  IciParallelism,
  LayoutAndSharding,
  PipelineParallelism,
  RematAndOffload,
)
from maxtext.configs.types.post_training import (
  RL,
  VLLM,
  Distillation,
  FineTuning,
  Reward,
  RLDataset,
  RLEnvironment,
  RLEvaluation,
  RLHardware,
  RLMethod,
  SpecialTokens,
)
from maxtext.configs.types.run import (
  AOT,
  CorruptionChecks,
  Debug,
  DevelopmentAndDebugging,
  RunInfo,
  TrainingLoop,
  TrainingSamples,
  TrainingTasks,
)
from maxtext.configs.types.weights_at_rest import WeightsAtRest


def get_individual_scales(scale: int) -> tuple[int, int, int, int]:
  """By how much `global_parameter_scale`, a power of two, multiplies width, heads, hidden widths and depth.

  Of three doublings one goes to heads and hidden widths, one to the residual width, one to depth, in this order.
  """
  if scale < 1 or scale.bit_count() > 1:
    raise ValueError(f"global_parameter_scale={scale} must be a power of two.")
  each, left = divmod(scale.bit_length() - 1, 3)
  inner = 2 ** (each + (left > 0))
  return 2 ** (each + (left > 1)), inner, inner, 2**each


# Pydantic compares each field with every direct base, which takes a third of a second with all sections side by side.
class _Saving(RunInfo, Checkpointing, OrbaxStorage, EmergencyCheckpointing, ElasticTraining): ...


class _Model(
  DataTypes,
  Quantization,
  ModelArchitecture,
  Engram,
  MTP,
  Logits,
  Attention,
  MlaAttention,
  MoBa,
  AttentionIndexer,
  Llama4Attention,
  SplashAttention,
  PagedAttention,
): ...


class _Experts(MoEGeneral, MoEKernels, DeepSeekMoE, Qwen3Next): ...


class _Placement(
  HardwareAndMesh,
  LayoutAndSharding,
  DcnParallelism,
  IciParallelism,
  PipelineParallelism,
  RematAndOffload,
): ...


class _Training(
  TrainingLoop,
  TrainingSamples,
  TrainingTasks,
  CorruptionChecks,
  ManifoldConstrainedHyperConnections,
  DilocoParams,
  Optimizer,
  AdamW,
  Muon,
): ...


class _PostTraining(FineTuning, Lora, WeightsAtRest, Distillation): ...


class _ReinforcementLearning(
  RLHardware,
  VLLM,
  RL,
  RLMethod,
  RLEnvironment,
  RLDataset,
  RLEvaluation,
  Reward,
  SpecialTokens,
): ...


class _Input(
  PositionalEmbedding,
  Rope,
  YarnRope,
  DatasetGeneral,
  TfdsDataset,
  HfDataset,
  GrainDataset,
  OlmoGrainDataset,
  Tokenizer,
): ...


class _Serving(InferenceGeneral, Decoding, InferenceLayout, InferenceServer, InferenceBenchmark, PrefixCaching): ...


class _Observation(
  AOT,
  DevelopmentAndDebugging,
  Profiling,
  HloDump,
  StackTrace,
  Metrics,
  Goodput,
  Events,
  ExperimentTrackers,
  GcpMonitoring,
  Tensorboard,
  ManagedMLDiagnostics,
): ...


class _Media(MultimodalGeneral, VisionTower, VisionProjector, AudioEncoder): ...


class MaxTextConfig(
  _Saving,
  _Model,
  _Experts,
  _Placement,
  _Training,
  _PostTraining,
  _ReinforcementLearning,
  _Input,
  _Serving,
  _Observation,
  _Media,
  DerivedValues,
):
  """One run: every key of every section, flat."""

  if not TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any:
      """A derived value that is not known yet has no attribute; whoever asks is told what it takes."""
      if name in DerivedValues.model_fields:
        raise AttributeError(
          f"config.{name} follows from devices or a run_name that are not known here: "
          "maxtext.configs.pyconfig.initialize(argv) asks JAX for them, and "
          "maxtext.configs.derived.with_devices(config, devices) takes their number."
        )
      return super().__getattr__(name)

  debug: Debug = Field(Debug.model_construct(), description="Debugging switches.")
  rl: RL = Field(RL.model_construct(), description="Settings of reinforcement learning as one group.")


__all__ = [
  "AOT",
  "MTP",
  "RL",
  "VLLM",
  "AdamW",
  "Attention",
  "AttentionIndexer",
  "AudioEncoder",
  "Checkpointing",
  "CorruptionChecks",
  "CustomRule",
  "DType",
  "DataTypes",
  "DatasetGeneral",
  "DatasetType",
  "DcnParallelism",
  "Debug",
  "DecoderBlockType",
  "Decoding",
  "DeepSeekMoE",
  "DerivedValues",
  "DevelopmentAndDebugging",
  "DilocoParams",
  "Distillation",
  "ElasticTraining",
  "EmergencyCheckpointing",
  "Engram",
  "Events",
  "ExperimentTrackers",
  "FineTuning",
  "GcpMonitoring",
  "Goodput",
  "GrainDataset",
  "HardwareAndMesh",
  "HfDataset",
  "HloDump",
  "IciParallelism",
  "InferenceBenchmark",
  "InferenceGeneral",
  "InferenceLayout",
  "InferenceServer",
  "KvQuantAxis",
  "LayoutAndSharding",
  "LearningRateScheduleType",
  "Llama4Attention",
  "Logits",
  "Lora",
  "ManagedMLDiagnostics",
  "ManifoldConstrainedHyperConnections",
  "MatmulPrecision",
  "MaxTextConfig",
  "Metrics",
  "MlaAttention",
  "MoBa",
  "MoEGeneral",
  "MoEKernels",
  "ModelArchitecture",
  "MultimodalGeneral",
  "Muon",
  "OlmoGrainDataset",
  "Optimizer",
  "OptimizerType",
  "OrbaxStorage",
  "PagedAttention",
  "PipelineParallelism",
  "PositionalEmbedding",
  "PrefixCaching",
  "ProfilerType",
  "Profiling",
  "Quantization",
  "QuantizationType",
  "Qwen3Next",
  "RLDataset",
  "RLEnvironment",
  "RLEvaluation",
  "RLHardware",
  "RLMethod",
  "RematAndOffload",
  "RematLocation",
  "RematPolicy",
  "ReorderStrategy",
  "Reward",
  "Rope",
  "RopeType",
  "RunInfo",
  "SamplingStrategy",
  "ShardMode",
  "SpecialTokens",
  "SplashAttention",
  "StackTrace",
  "Tensorboard",
  "TfdsDataset",
  "Tokenizer",
  "TokenizerType",
  "TrainingLoop",
  "TrainingSamples",
  "TrainingTasks",
  "VisionProjector",
  "VisionTower",
  "WeightsAtRest",
  "WsdDecayStyle",
  "XProfTPUPowerTraceMode",
  "YarnRope",
  "get_individual_scales",
]
