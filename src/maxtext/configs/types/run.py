"""Identity, length and start-up of a run."""

from typing import Literal

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
  run_name: str = Field("", description="Name of the run; empty: the recipe, file or model, and the time.")
  model_name: ModelName = Field("default", description="A named model; its architecture keys are then fixed.")
  override_model_config: bool = Field(False, description="Allow keys of the named model to be changed.")
  override_logical_axis_rules: bool = Field(
    False, description="True replaces the base logical axis rules with the given ones, not a merge."
  )
  log_config: bool = Field(True, description="True writes the configuration into the run's folder.")
  debug_sharding: bool = Field(
    False, description="Print every parameter's shape, logical axes, mesh axes and bytes per device."
  )
  base_output_directory: str = Field("", description="Where runs are stored, also gs://...; empty means ./runs.")
  sharding_strategy: None | Literal["experimental"] = Field(
    None, description="Alternative set of sharding rules; None is the standard one."
  )


class TrainingLoop(Section):
  """Length of the run, evaluation, and seeds."""

  steps: int = Field(150001, ge=-1, description="Optimizer steps; -1 takes learning_rate_schedule_steps.")
  log_period: int = Field(100, description="Steps between lines of the log; the first ten steps are always shown.")
  eval_interval: int = Field(-1, description="Training steps between evaluations; -1 is no evaluation.")
  eval_steps: int = Field(-1, description="Batches per evaluation; -1 takes the whole evaluation set.")
  target_eval_loss: float = Field(0.0, description="Evaluation loss at which training stops early; 0 is no target.")
  abort_on_nan_loss: bool = Field(
    True, description="True stops the run when the loss or the gradient norm is not a number."
  )
  abort_on_inf_loss: bool = Field(
    True, description="True stops the run when the loss or the gradient norm is infinite."
  )
  enable_dropout: bool = Field(True, description="True applies dropout_rate in training; false turns dropout off.")
  dropout_rate: float = Field(
    0.0, ge=0.0, le=1.0, description="Share of activations zeroed in training, below 1; 0 is none."
  )
  enable_data_shuffling: bool = Field(True, description="True shuffles the training data, seeded by data_shuffle_seed.")
  data_shuffle_seed: int = Field(0, description="Seed of the data order.")
  init_weights_seed: int = Field(0, description="Seed of the initial weights.")


class TrainingSamples(Section):
  """Samples while training. The specification has no such key."""

  sample_prompts: list[str] = Field(
    [], description="Prompts that the model continues, or with use_sft answers, every eval_interval steps; [] is none."
  )


class TrainingTasks(Section):
  """Evaluation tasks while training. The specification has no such keys."""

  eval_tasks: list[str] = Field(
    [], description="Tasks scored while training: files, folders and names, as maxtext eval --tasks takes; [] is none."
  )
  eval_tasks_interval: int = Field(
    0,
    ge=0,
    description="Training steps between evaluations of eval_tasks; the last step has one too. 0: that one alone.",
  )
  eval_tasks_limit: int | None = Field(
    None, ge=1, description="Only so many samples or documents of each of eval_tasks; None is all."
  )


class CorruptionChecks(Section):
  """Devices that compute or keep something wrongly. The specification has no such keys."""

  replica_check_period: int = Field(
    0, ge=0, description="Steps between comparisons of what replicas hold, bit by bit, and before every save; 0: none."
  )
  step_replay_period: int = Field(
    0,
    ge=0,
    description="Steps from one that is run twice, to compare the results bit by bit, to the next; 0: none.",
  )


class AOT(Section):
  """Compilation for hardware that is not here."""

  compiled_trainstep_file: str = Field(
    "", description="File of the train step compiled ahead, saved or loaded; '' compiles at start."
  )
  compile_topology: str = Field("", description="Topology to compile for, such as 'v5p-128'.")
  compile_topology_num_slices: int = Field(-1, description="Slices of that topology; -1 is one.")


class DevelopmentAndDebugging(Section):
  """Compilation cache, start-up of several processes, and debugging."""

  constant_bound_config: list = Field(
    [], description="Six fixed bounds for static quantization scales; empty computes them on the fly."
  )
  jax_cache_dir: str | None = Field("~/jax_cache", description="Folder of compiled programs; empty keeps none.")
  jax_distributed_initialization_timeout: int = Field(300, description="Seconds to wait for the other processes.")
  jax_debug_log_modules: str = Field("", description="JAX modules that log at debug level, such as 'jax'; '' is none.")
  skip_jax_distributed_system: bool = Field(False, description="True leaves out JAX's multi-host start-up.")
  enable_single_controller: bool = Field(False, description="True runs all hosts from one Python process (Pathways).")
  subslice_shape: str = Field(
    "", description="Part of the slice to use, as sizes with commas (single controller); '' is all."
  )
  max_checkify: bool = Field(False, description="True adds run-time value checks to compiled code; slow.")


class Debug(Section):
  """Debugging switches."""

  rl: bool = Field(False, description="True turns on debugging output of reinforcement learning.")
