"""Fine-tuning, distillation and reinforcement learning."""

from typing import Any, Literal

from pydantic import Field

from maxtext.configs.types.section import Section

DpoLossType = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "orpo", "sft", "kto"]


def _sigmoid() -> list[DpoLossType]:
  return ["sigmoid"]


class FineTuning(Section):
  """Supervised and preference tuning."""

  use_dpo: bool = Field(False, description="True trains on preference pairs with the DPO loss.")
  dpo_label_smoothing: float = Field(
    0.0, ge=0.0, le=1.0, description="Assumed share of swapped preference labels in the DPO loss, 0 to 1; 0 trusts all."
  )
  dpo_beta: float = Field(0.1, description="Strength of the pull to the reference model in the DPO loss.")
  dpo_loss_type: list[DpoLossType] = Field(
    default_factory=_sigmoid,
    min_length=1,
    description="Losses of preference pairs that are added up: sigmoid (DPO), ipo, hinge, robust, simpo, orpo, ...",
  )
  dpo_loss_weights: list[float] = Field(
    default_factory=list, description="Weight of each loss of dpo_loss_type; empty is 1 for all."
  )
  simpo_gamma: float = Field(0.5, description="Margin of the simpo loss between chosen and rejected answer.")
  kto_desirable_weight: float = Field(1.0, ge=0.0, description="Weight of answers with label true in the kto loss.")
  kto_undesirable_weight: float = Field(1.0, ge=0.0, description="Weight of answers with label false in the kto loss.")
  precompute_ref_log_probs: bool = Field(
    True,
    description="True computes the reference model's log-probabilities once, on disk; false keeps a copy in memory.",
  )
  reference_log_probs_path: str = Field(
    "", description="Folder of precomputed reference log-probabilities, which runs can share; '' is the run's own."
  )
  use_sft: bool = Field(False, description="True does supervised fine-tuning on prompt and completion or chat data.")
  sft_train_on_completion_only: bool = Field(
    False, description="True counts the loss on completion tokens only, not on the prompt."
  )
  formatting_func_path: str = Field(
    "", description="Import path of a function from a row to messages, or to prompt and completion; '' is none."
  )
  formatting_func_kwargs: dict = Field(
    default_factory=dict, description="Keyword arguments passed to the function of formatting_func_path."
  )
  use_grpo: None | bool = Field(
    None, description="True trains with GRPO from sampled, rewarded completions; None is unset."
  )


class Distillation(Section):
  """Learning from a teacher."""

  student_overrides: dict[str, Any] = Field(
    default_factory=dict, description="Keys of the student alone, which win over all others."
  )
  teacher_overrides: dict[str, Any] = Field(
    default_factory=dict, description="Keys of the teacher alone: model_name, load_parameters_path. Empty: no teacher."
  )
  offline_data_dir: str | None = Field(
    None, description="Folder of saved teacher outputs, read instead of other data; None runs the teacher."
  )
  distill_alpha: float = Field(0.5, description="Weight of the teacher loss, 0 to 1; the label loss has the rest.")
  distill_temperature: float = Field(
    1.0, description="Divisor of student and teacher logits before the softmax; higher is softer."
  )
  distill_beta: float = Field(0.0, description="Weight of the hidden-feature loss; 0 is no such loss.")
  distill_feature_loss_type: Literal["cosine", "l2"] = Field(
    "cosine", description="Distance between student and teacher features: cosine or l2."
  )
  distill_layer_indices: None | list = Field(
    None, description="Layers whose features are compared, with distill_beta; None is all."
  )
  distill_alpha_end: float | None = Field(
    None, description="Value distill_alpha reaches at the end of training; None keeps it fixed."
  )
  distill_alpha_schedule: Literal["constant", "linear", "cosine"] = Field(
    "constant", description="Path from distill_alpha to its end value: constant, linear or cosine."
  )
  distill_temperature_end: float | None = Field(
    None, description="Value distill_temperature reaches at the end of training; None keeps it fixed."
  )
  distill_temperature_schedule: Literal["constant", "linear", "cosine"] = Field(
    "constant", description="Path from distill_temperature to its end value: constant, linear or cosine."
  )
  distill_beta_end: float | None = Field(
    None, description="Value distill_beta reaches at the end of training; None keeps it fixed."
  )
  distill_beta_schedule: Literal["constant", "linear", "cosine"] = Field(
    "constant", description="Path from distill_beta to its end value: constant, linear or cosine."
  )
  learn_to_init_mode: bool = Field(
    False, description="True learns the student's starting weights as linear maps of the teacher's."
  )
  lti_use_general_linear_map: bool = Field(
    False, description="True uses one full linear map per weight in learn_to_init_mode, not a factored one."
  )
  distill_weights_copy_map: dict[str, Any] = Field(
    default_factory=dict,
    description="Paths of student weights, and the teacher's that they start with: PATH, or [PATH, [LAYER, ...]].",
  )
  distill_student_weights_share_map: dict[str, Any] = Field(
    default_factory=dict, description="Student weight names and the student weights they share values with."
  )
  student_params_to_update: None | list = Field(
    None, description="Regular expressions of paths of the student's weights that train; None trains all."
  )


class RLHardware(Section):
  """Devices of trainer and sampler."""

  trainer_devices_fraction: float = Field(0.5, description="Share of the devices that train the policy (0 to 1).")
  sampler_devices_fraction: float = Field(0.5, description="Share of the devices that generate rollouts (0 to 1).")
  chips_per_vm: int = Field(4, description="Accelerator chips on each host.")
  use_pathways: bool = Field(True, description="True runs RL under Pathways, one controller for all hosts.")
  num_trainer_slices: int = Field(
    -1, description="Slices that train the policy; -1 splits by trainer_devices_fraction."
  )
  num_samplers_slices: int = Field(
    -1, description="Slices that generate rollouts; -1 splits by sampler_devices_fraction."
  )
  rollout_data_parallelism: int = Field(
    -1, description="Model copies among the sampler devices; -1 takes what the others leave."
  )
  rollout_tensor_parallelism: int = Field(
    -1, description="Sampler devices that split each layer; -1 takes what the others leave."
  )
  rollout_expert_parallelism: int = Field(1, description="Sampler devices that split the experts; 1 is no split.")


class VLLM(Section):
  """Rollouts by vLLM."""

  kv_cache_buffer: int = Field(256, description="Spare KV-cache tokens beyond the prompt and the response.")
  hbm_utilization_vllm: float = Field(0.72, description="Share of device memory that vLLM may take (0 to 1).")
  swap_space_vllm_gb: int = Field(2, description="Host memory per device for swapped KV cache, in GB.")
  enable_dp_attention: bool = Field(False, description="True splits vLLM attention over requests instead of heads.")
  enable_expert_parallel: bool = Field(False, description="True lets vLLM place whole experts on different devices.")
  async_scheduling: bool = Field(False, description="True lets vLLM schedule the next step while the current one runs.")
  max_num_batched_tokens: int | None = Field(None, description="Most tokens in one vLLM step; None is vLLM's default.")
  max_num_seqs: int | None = Field(None, description="Most sequences generated at once; None is all of a batch.")
  stop_strings: list[str] | None = Field(
    None, description="Texts that end a response when generated; None is only the end token."
  )
  vllm_additional_config: dict[str, Any] = Field(
    default_factory=dict, description="Extra options passed on to vLLM's backend."
  )
  vllm_hf_overrides: dict[str, Any] = Field(
    default_factory=dict, description="Hugging Face configuration fields replaced when vLLM loads the model."
  )
  vllm_hf_config_path: str = Field(
    "", description="Folder of the Hugging Face configuration for vLLM; '' is the model's own."
  )
  use_standalone_converter: bool = Field(
    False, description="True turns trainer weights into vLLM's layout by a separate converter."
  )
  vllm_load_format: str = Field(
    "dummy", description="How vLLM gets its first weights; 'dummy' is random, to be replaced."
  )
  debug_converter: bool = Field(False, description="True checks and logs the conversion of weights to vLLM.")
  gcs_debug_path: str = Field("", description="Bucket folder for the converter's debugging output; '' is none.")


class RL(Section):
  """Group-relative policy optimisation."""

  num_generations: int = Field(2, description="Responses sampled per prompt, the group that GRPO compares.")
  num_iterations: int = Field(1, description="Policy updates from each batch of rollouts.")
  grpo_beta: float = Field(0.08, description="Weight of the KL penalty against the reference model; 0 is none.")
  grpo_epsilon: float = Field(0.2, description="Clip range of the policy ratio around 1.")
  loss_algo: Literal["grpo", "gspo-token"] = Field(
    "grpo", description="Policy ratio per token ('grpo') or per sequence ('gspo-token')."
  )
  use_agentic_rollout: bool = Field(False, description="True generates rollouts asynchronously, by the agent loop.")
  max_concurrency: int = Field(256, description="Most rollouts in flight at once (use_agentic_rollout).")
  off_policy_steps: int = Field(0, description="Steps by which rollouts may lag the policy; 0 is on-policy.")
  system_prompt: str = Field("", description="Text put before every prompt; '' is none.")
  degenerate_group_masking: bool = Field(
    True, description="True leaves groups whose rewards are all equal out of the loss."
  )
  epsilon_high: float | None = Field(None, description="Upper clip range of the policy ratio; None takes grpo_epsilon.")
  reshard_chunk_size: int | None = Field(
    None, description="Arrays moved at once from trainer to sampler; None moves all together."
  )


class RLMethod(Section):
  """Variants of GRPO, and what they are stopped by. These keys are beyond the specification."""

  rl_advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
    "grpo",
    description="A reward less the mean of its group, over their deviation (grpo) or not (dr_grpo); or less the mean "
    "of the others (rloo).",
  )
  rl_aggregation: Literal["sequence", "token", "fixed"] = Field(
    "sequence",
    description="A mean over tokens of each answer, then answers (sequence); over all tokens (token, DAPO); or over "
    "answers of a fixed length (fixed, Dr. GRPO).",
  )
  rl_clipping: Literal["ppo", "cispo"] = Field(
    "ppo", description="Clips ratios, without a gradient beyond (ppo), or the weights of gradients (cispo)."
  )
  dynamic_sampling: int = Field(
    0,
    ge=0,
    le=1000,
    description="Most further batches of prompts for an update, in place of groups whose rewards are all equal (DAPO).",
  )
  overlong_buffer: int = Field(
    0, ge=0, description="The last so many tokens of the longest answer are penalised, more and more (DAPO); 0 is none."
  )
  overlong_penalty: float = Field(
    1.0, ge=0, le=1e9, description="Subtracted from the reward of an answer of full length, with overlong_buffer."
  )
  importance_sampling_cap: float = Field(
    2.0,
    ge=0,
    description="Largest weight by which tokens of an older policy are corrected (truncated importance sampling); 0 "
    "corrects none.",
  )
  sampler_address: str = Field(
    "",
    description="HOST:PORT of a process that generates the rollouts, the same command with --sampler; '' generates "
    "here.",
  )
  routing_replay: bool = Field(
    True,
    description="The trainer routes tokens to the experts that the engine chose when it wrote them (rollout routing "
    "replay, R3).",
  )
  mismatch_limit: float = Field(
    0.0,
    ge=0,
    description="Largest difference of a token's log-probability between engine and trainer before a run ends; 0 is "
    "none.",
  )
  reward_functions: list[str] = Field(
    default_factory=lambda: ["format", "format_tags", "answer"],
    description="What rewards answers: format, format_tags, answer, exact_match, math_verify, code, or "
    "module:function.",
  )
  reward_weights: list[float] = Field(
    default_factory=list, description="A weight for each of reward_functions; empty is 1 for all."
  )
  code_timeout: float = Field(
    10.0, gt=0, le=86400, description="Seconds for an answer's program and its tests, with reward_functions=[code]."
  )
  code_memory_gb: float = Field(
    1.0, ge=0.1, le=1e4, description="Memory of each process of such a program, in GiB of address space."
  )


class RLEnvironment(Section):
  """Conversations with an environment. These keys are beyond the specification."""

  rl_environment: str = Field(
    "", description="module:Class of an environment that the policy talks with, turn by turn; '' asks for one answer."
  )
  max_turns: int = Field(8, ge=1, description="Most answers of the policy in a conversation with the environment.")
  environment_role: Literal["user", "tool"] = Field(
    "user", description="Role in which the chat template writes what the environment says."
  )
  environment_timeout: float = Field(
    60.0, gt=0, le=86400, description="Seconds for one step of an environment, after which its conversation ends."
  )


class RLDataset(Section):
  """Prompts and batches."""

  batch_size: int = Field(1, description="Prompts per RL training batch.")
  num_batches: int = Field(4, description="RL training batches taken from the dataset.")
  num_test_batches: int = Field(5, description="Batches used to evaluate the RL model.")
  test_batch_start_index: int = Field(0, description="First test batch to evaluate, counted from 0.")
  train_fraction: float = Field(
    1.0, description="Share of the batches for training, the rest for validation; 1 is all."
  )
  train_micro_batch_size: int = Field(-1, description="Examples per gradient computation; -1 is the whole batch.")
  rollout_micro_batch_size: int = Field(-1, description="Prompts per generation call; -1 is the whole batch.")


class RLEvaluation(Section):
  """Evaluation of a policy."""

  eval_sampling_strategy: str = Field("greedy", description="Entry of generation_configs that evaluation samples with.")
  generation_configs: dict[str, Any] = Field(
    default_factory=dict, description="Named sampling settings for evaluation: temperature, top_k and top_p."
  )
  num_eval_passes: int = Field(1, description="Responses sampled per question in evaluation.")
  eval_corr_lst: bool = Field(
    False, description="True lists the correct responses, false the wrong ones (eval_make_lst)."
  )
  eval_make_lst: bool = Field(False, description="True returns a list of responses along with the evaluation scores.")
  eval_mode: Literal["pass", "maj", "pass_at_1"] = Field(
    "pass", description="Score by any correct pass ('pass'), majority ('maj') or mean ('pass_at_1')."
  )


class Reward(Section):
  """Rewards and penalties."""

  reward_exact_answer: float = Field(5.0, description="Reward for an answer equal to the reference.")
  reward_exact_format_match: float = Field(3.0, description="Reward for a response that follows the format exactly.")
  reward_white_space_format_match: float = Field(
    1.5, description="Reward for an answer right but for surrounding white space."
  )
  reward_partial_format_match: float = Field(0.5, description="Reward for each format tag that appears exactly once.")
  reward_ratio_guess_to_answer_high: float = Field(
    0.5, description="Reward for a number close to the answer (about 10%)."
  )
  reward_ratio_guess_to_answer_low: float = Field(
    0.25, description="Reward for a number fairly close to the answer (about 20%)."
  )
  penalty_incorrect_format: float = Field(-0.5, description="Score, below 0, for each format tag missing or repeated.")
  penalty_incorrect_answer: float = Field(-1.0, description="Score, below 0, for a wrong answer.")
  math_verify_timeout: int = Field(300, description="Seconds allowed for checking a batch of math answers.")
  math_verify_num_procs: int | None = Field(
    None, ge=1, description="Processes that check math answers; None picks by the CPU count."
  )


class SpecialTokens(Section):
  """Marks around reasoning and answer."""

  reasoning_start_token: str = Field("<reasoning>", description="Tag that opens the reasoning in a response.")
  reasoning_end_token: str = Field("</reasoning>", description="Tag that closes the reasoning in a response.")
  solution_start_token: str = Field("<answer>", description="Tag that opens the final answer in a response.")
  solution_end_token: str = Field("</answer>", description="Tag that closes the final answer in a response.")
