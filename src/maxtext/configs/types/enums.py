"""The closed sets of values that keys may take."""

from enum import Enum


class DType(str, Enum):
  """Number formats of weights, activations and gradients."""

  BFLOAT16 = "bfloat16"
  FLOAT32 = "float32"
  FLOAT16 = "float16"


class MatmulPrecision(str, Enum):
  """How many passes the matrix unit spends on a product."""

  DEFAULT = "default"
  HIGH = "high"
  HIGHEST = "highest"
  BFLOAT16 = "bfloat16"
  FLOAT32 = "float32"


class RematPolicy(str, Enum):
  """What of a layer's forward pass is kept for its backward pass; the rest is computed again."""

  FULL = "full"
  MINIMAL = "minimal"
  SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP = "save_dot_with_context_except_mlp"
  SAVE_DOT_EXCEPT_MLPWI = "save_dot_except_mlpwi"
  SAVE_DOT_EXCEPT_MLP = "save_dot_except_mlp"
  SAVE_QKV_PROJ = "save_qkv_proj"
  QKV_PROJ_OFFLOADED = "qkv_proj_offloaded"
  CUSTOM = "custom"
  MINIMAL_OFFLOADED = "minimal_offloaded"
  SAVE_OUT_PROJ = "save_out_proj"


class RematLocation(str, Enum):
  """Where one tensor waits for the backward pass."""

  REMAT = "remat"
  DEVICE = "device"
  OFFLOAD = "offload"


class OptimizerType(str, Enum):
  """Optimizers."""

  ADAMW = "adamw"
  ADAM_PAX = "adam_pax"
  SGD = "sgd"
  MUON = "muon"


class LearningRateScheduleType(str, Enum):
  """Shapes of the learning rate over the run."""

  COSINE = "cosine"
  WSD = "wsd"


class RopeType(str, Enum):
  """Ways to stretch rotary positions beyond the length a model was first trained on."""

  DEFAULT = "default"
  LLAMA3_1 = "llama3.1"
  YARN = "yarn"


class DatasetType(str, Enum):
  """Where training text comes from."""

  SYNTHETIC = "synthetic"
  HF = "hf"
  GRAIN = "grain"
  TFDS = "tfds"
  C4MLPERF = "c4_mlperf"
  OLMO_GRAIN = "olmo_grain"


class DecoderBlockType(str, Enum):
  """Model families: each names one file in `maxtext.models`."""

  LLAMA2 = "llama2"
