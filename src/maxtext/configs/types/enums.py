"""The closed sets of values that keys may take."""

from enum import Enum, IntEnum
from pathlib import Path

_FAMILIES = Path(__file__).parents[2] / "models" / "families"


class XProfTPUPowerTraceMode(IntEnum):
  """How much a TPU trace says of power."""

  POWER_TRACE_NONE = 0
  POWER_TRACE_NORMAL = 1
  POWER_TRACE_SPI = 2


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


class QuantizationType(str, Enum):
  """Ways to compute in few bits."""

  NONE = ""
  INT4 = "int4"
  INT8 = "int8"
  INTMP = "intmp"
  FP8 = "fp8"
  NANOO_FP8 = "nanoo_fp8"
  FP8_NANO_V2 = "fp8_nanoo"
  FP8_GPU = "fp8_gpu"
  FP8_FULL = "fp8_full"
  TE_FP8_DS = "te_fp8_delayedscaling"
  TE_FP8_CS = "te_fp8_currentscaling"
  TE_MXFP8 = "te_mxfp8"
  TE_NVFP4 = "te_nvfp4"
  TE_NVFP4_NO_RHT = "te_nvfp4_no_rht"


class KvQuantAxis(str, Enum):
  """What shares one scale in a quantized cache."""

  NONE = ""
  DKV = "dkv"
  HEADS_AND_DKV = "heads_and_dkv"


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


class WsdDecayStyle(str, Enum):
  """Shapes of the last part of a warmup-stable-decay schedule."""

  LINEAR = "linear"
  COSINE = "cosine"


class RopeType(str, Enum):
  """Ways to stretch rotary positions beyond the length a model was first trained on."""

  DEFAULT = "default"
  LLAMA3_1 = "llama3.1"
  YARN = "yarn"


class TokenizerType(str, Enum):
  """Tokenizer libraries."""

  SENTENCEPIECE = "sentencepiece"
  HUGGINGFACE = "huggingface"
  TIKTOKEN = "tiktoken"


class DatasetType(str, Enum):
  """Where training text comes from."""

  SYNTHETIC = "synthetic"
  HF = "hf"
  GRAIN = "grain"
  TFDS = "tfds"
  C4MLPERF = "c4_mlperf"
  OLMO_GRAIN = "olmo_grain"


class SamplingStrategy(str, Enum):
  """How the next token is chosen."""

  GREEDY = "greedy"
  WEIGHTED = "weighted"
  NUCLEUS = "nucleus"
  TOPK = "topk"
  COMPOSITE = "composite"


class ProfilerType(str, Enum):
  """Profilers."""

  NONE = ""
  XPLANE = "xplane"
  NSYS = "nsys"


REGISTERED_FAMILIES = set[str]()
"""Values of `decoder_block` that `maxtext.models.build.register_family` added in this process."""


class DecoderBlockType(str, Enum):
  """Model families. Each has a file of its name in `maxtext.models.families`, and such a file makes a name one; so does
  `register_family`."""

  LLAMA2 = "llama2"
  MISTRAL = "mistral"
  MIXTRAL = "mixtral"
  DEEPSEEK = "deepseek"
  GEMMA = "gemma"
  GEMMA2 = "gemma2"
  GEMMA3 = "gemma3"
  GEMMA4 = "gemma4"
  QWEN2 = "qwen2"
  QWEN3 = "qwen3"
  QWEN3_MOE = "qwen3_moe"
  QWEN3_NEXT = "qwen3_next"
  QWEN3_CUSTOM_MOE = "qwen3_custom_moe"
  QWEN3_5 = "qwen3_5"
  GPT3 = "gpt3"
  GPT_OSS = "gpt_oss"
  LLAMA4 = "llama4"
  OLMO3 = "olmo3"

  @classmethod
  def _missing_(cls, value: object) -> "DecoderBlockType | None":
    name = str(value)
    there = name in REGISTERED_FAMILIES or (_FAMILIES / f"{name}.py").exists()
    if not name.isidentifier() or name.startswith("_") or not there:
      return None
    member = str.__new__(cls, name)
    member._name_, member._value_ = name.upper(), name
    return member


class ShardMode(str, Enum):
  """Who decides where activations live: the compiler, or the types of arrays."""

  AUTO = "auto"
  EXPLICIT = "explicit"


class ReorderStrategy(str, Enum):
  """Orders of a sequence that balance causal attention over context-parallel devices."""

  AUTO = "auto"
  DUAL_CHUNK_SWAP = "dual_chunk_swap"
  STRIPED = "striped"


class CustomRule(str, Enum):
  """Mesh axes and rules in place of the base ones: a file in `configs/rules` by its name, or any YAML file's path."""

  DEFAULT = ""
  FSDP = "fsdp"

  @classmethod
  def _missing_(cls, value: object) -> "CustomRule | None":
    if not isinstance(value, str) or not value.endswith((".yml", ".yaml")):
      return None
    path = str.__new__(cls, value)
    path._name_, path._value_ = "FILE", value
    return path
