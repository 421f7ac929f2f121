"""Identity of a run, its length, and how it starts."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from maxtext.configs.types.section import Section

ModelName = Literal[
  "default", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3.1-8b-Instruct", "llama3-70b",
  "llama3.1-70b-Instruct", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.3-70b", "mistral-7b", "mixtral-8x7b",
  "mixtral-8x22b", "deepseek2-16b", "deepseek2-236b", "deepseek3-671b", "deepseek3-671b-2dfsdp",
  "deepseek3-671b-batchsplit", "deepseek3-test", "deepseek3-tiny", "deepseek3.2-671b", "deepseek-custom", "kimi-k2-1t",
  "gemma-7b", "gemma-2b", "gemma2-2b", "gemma2-9b", "gemma2-27b", "gemma3-4b", "gemma3-12b", "gemma3-27b", "gemma4-26b",
  "gemma4-31b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-1.7b-base", "qwen3-4b",
  "qwen3-4b-base", "qwen3-4b-thinking-2507", "qwen3-8b", "qwen3-8b-base", "qwen3-14b", "qwen3-14b-base", "qwen3-32b",
  "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-30b-a3b-base", "qwen3-480b-a35b", "qwen3-next-80b-a3b",
  "qwen3-omni-30b-a3b", "qwen3-custom-30b-a3b", "qwen3.5-397b-a17b", "gpt3-175b", "gpt3-22b", "gpt3-6b", "gpt3-52k",
  "gpt-oss-20b", "gpt-oss-120b", "llama4-17b-16e", "llama4-17b-128e", "olmo3-7b", "olmo3-7b-pt", "olmo3-32b",
]  # fmt: skip


class RunInfo(Section):
  """Identity of the run."""

  base_config: None | str = Field(None, description="A YAML file whose values this file starts from.")
  model_name: ModelName = Field("default", description="A named model; its architecture keys are then fixed.")
  override_model_config: bool = Field(False, description="Allow keys of the named model to be changed.")


class TrainingLoop(Section):
  """Length of the run, its log and its seeds."""

  steps: Annotated[int, Ge(-1)] = Field(150001, description="Optimizer steps; -1 takes learning_rate_schedule_steps.")
  log_period: int = Field(100, description="Steps between lines of the log; the first ten steps are always shown.")
  data_shuffle_seed: int = Field(0, description="Seed of the data order.")
  init_weights_seed: int = Field(0, description="Seed of the initial weights.")


class Metrics(Section):
  """Where figures go."""

  metrics_file: None | str = Field(None, description="Append one JSON object per step to this file.")


class AOT(Section):
  """Compilation for hardware that is not here."""

  compile_topology: str = Field("", description="Topology to compile for, such as 'v5p-128'.")
  compile_topology_num_slices: int = Field(-1, description="Slices of that topology; -1 is one.")


class DevelopmentAndDebugging(Section):
  """Compilation cache and start-up of several processes."""

  jax_cache_dir: str | None = Field("~/jax_cache", description="Folder of compiled programs; empty keeps none.")
  jax_distributed_initialization_timeout: int = Field(300, description="Seconds to wait for the other processes.")
