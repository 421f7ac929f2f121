"""`ConfigKeys`: every key that a run's configuration takes, with its type, for editors and type checkers.

Generated from the sections in `configs/types` by `python -m tests.test_key_types`; edit those. Nothing imports this
module at run time except whoever asks for `maxtext.ConfigKeys`.
"""

# fmt: off
from typing import Any, Literal, TypedDict

from maxtext.configs.types import (
  RL,
  CustomRule,
  DatasetType,
  Debug,
  DecoderBlockType,
  DType,
  KvQuantAxis,
  LearningRateScheduleType,
  MatmulPrecision,
  OptimizerType,
  ProfilerType,
  QuantizationType,
  RematLocation,
  ReorderStrategy,
  RopeType,
  SamplingStrategy,
  ShardMode,
  TokenizerType,
  WsdDecayStyle,
  XProfTPUPowerTraceMode,
)


class ConfigKeys(TypedDict, total=False):
  """Keys and values, as `load_config` and `LLM` take them by name."""

  abort_on_inf_loss: bool
  """True stops the run when the loss or the gradient norm is infinite. Default: True."""

  abort_on_nan_loss: bool
  """True stops the run when the loss or the gradient norm is not a number. Default: True."""

  act_quantization_calibration_method: str
  """How the range of activations is found, such as absmax, fixed or delayed. Default: 'absmax'."""

  activation_dropout_for_audio: float
  """Dropout rate inside the audio feed-forward; 0 is none. Not supported yet: models take text only for now.
  Default: 0.0."""

  activation_function_for_audio: str
  """Activation in the audio encoder's feed-forward. Not supported yet: models take text only for now. Default:
  'gelu'."""

  activations_in_float32: bool
  """Apply activation functions in float32. Default: False."""

  adam_b1: float
  """Decay of the first moment. Default: 0.9."""

  adam_b2: float
  """Decay of the second moment. Default: 0.95."""

  adam_eps: float
  """Added to the root of the second moment. Default: 1e-08."""

  adam_eps_root: float
  """Added under the root of the second moment. Default: 0.0."""

  adam_weight_decay: float
  """Decoupled weight decay. Default: 0.1."""

  adamw_mask: list[str] | tuple[str, ...]
  """Patterns of parameter names left out of AdamW weight decay; empty decays all. Default: []."""

  add_bos: bool
  """True puts the beginning-of-sequence token before each document. Default: True."""

  add_eos: bool
  """True puts the end-of-sequence token after each document. Default: True."""

  allow_split_physical_axes: bool
  """Let one physical torus axis serve two mesh axes. Default: False."""

  ar_cache_axis_order: str
  """Stored axis order of the generation cache, over batch, sequence, heads, width. Not supported yet: caches have
  one order of dimensions, and the compiler chooses their memory layout. Default: '1,2,0,3'."""

  async_checkpointing: bool
  """True writes checkpoints in the background while training continues. Default: True."""

  async_scheduling: bool
  """True lets vLLM schedule the next step while the current one runs. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: False."""

  attention: str
  """Kernel: autoselected, dot_product, chunked, flash (TPU, GPU), cudnn_flash_jax (GPU); or paged, which is
  autoselected with a cache in pages. Default: 'autoselected'."""

  attention_bias: bool
  """True adds a bias to the attention projections. Default: False."""

  attention_dropout_for_audio: float
  """Dropout rate of audio attention weights; 0 is none. Not supported yet: models take text only for now. Default:
  0.0."""

  attention_out: RematLocation | Literal["remat", "device", "offload"]
  """Attention result before the output projection (custom). Not supported yet: no layer has this tensor yet.
  Default: 'remat'."""

  attention_output_dim: int
  """Width of the attention output; -1 takes the embedding width. Default: -1."""

  attention_sink: bool
  """True adds a learned logit per head to the softmax denominator. Default: False."""

  attention_type: Literal["global", "local_sliding", "chunk", "mla", "full"]
  """Which keys a query attends to. Not supported yet: this kind of attention is not implemented yet: write
  attention_type=global, local_sliding, chunk or mla. Default: 'global'."""

  attn_logits_soft_cap: float | None
  """Bound of the tanh cap on attention logits; None or 0 is no cap. Default: None."""

  audio_path: str
  """Audio file for decoding, several separated by commas; '' is none. Not supported yet: models take text only for
  now. Default: ''."""

  audio_placeholder: str
  """Text that marks an audio clip's place in the prompt. Not supported yet: models take text only for now. Default:
  '<|audio|>'."""

  autoregressive_decode_assert: str
  """Text the decoded output must equal, for tests; '' is no check. Default: ''."""

  base_emb_dim: int
  """Width of the residual stream. Default: 2048."""

  base_mlp_dim: int
  """Width of the feed-forward layer. Default: 7168."""

  base_moe_mlp_dim: int
  """Hidden width of each expert before scaling; -1 takes the dense width. Default: -1."""

  base_num_decoder_layers: int
  """Layers. Default: 16."""

  base_num_kv_heads: int
  """Key and value heads; divides the query heads. Default: 16."""

  base_num_query_heads: int
  """Query heads. Default: 16."""

  base_output_directory: str
  """Where runs are stored, also gs://...; empty means ./runs. Default: ''."""

  batch_size: int
  """Prompts per RL training batch. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo) and distill
  yet. Default: 1."""

  batch_split_factor: int
  """Parts of the batch in the split schedule; 1 is no split. Not supported yet: tokens and expert weights are
  gathered whole, by XLA's own collectives. Default: 1."""

  beta_fast: int
  """Rotations over the original context above which YaRN leaves a frequency as is. Default: 32."""

  beta_slow: int
  """Rotations over the original context below which YaRN scales a frequency fully. Default: 1."""

  bwd_quantization_calibration_method: str
  """How the range of gradients is found, such as absmax or fixed. Default: 'absmax'."""

  capacity_factor: float
  """Expert room over an even share, extra tokens dropped; -1 drops none. Default: -1.0."""

  cast_logits_to_fp32: bool
  """Keep logits in float32; false keeps them in dtype. The loss is summed in float32 either way. Default: True."""

  chat_template: str
  """Chat format as a Jinja string; '' keeps the tokenizer's own. Default: ''."""

  chat_template_path: str
  """File with a chat format that replaces the tokenizer's; '' keeps its own. Default: ''."""

  checkpoint_conversion_fn: str | None
  """Function that maps a foreign checkpoint to this model's tree; None is no change. Not supported yet: checkpoints
  are read and written through Orbax's CheckpointManager, in its own layout, by the process itself. Default: None."""

  checkpoint_is_quantized: bool
  """True reads load_parameters_path as already quantized weights. Default: False."""

  checkpoint_period: int
  """Steps between checkpoints. Default: 10000."""

  checkpoint_storage_concurrent_gb: int
  """Most data in flight while saving or restoring, in GB per host. Default: 96."""

  checkpoint_storage_target_data_file_size_bytes: int
  """Size aimed at for each checkpoint data file, in bytes. Default: 2147483648."""

  checkpoint_storage_use_ocdbt: bool
  """True packs many arrays into few files (OCDBT). Default: True."""

  checkpoint_storage_use_zarr3: bool
  """True stores arrays as Zarr version 3, false as version 2. Default: True."""

  checkpoint_todelete_full_path: str | None
  """Full path old checkpoints are moved to; None deletes them at once. Not supported yet: it needs a bucket whose
  folders can be renamed, which is untested. Default: None."""

  checkpoint_todelete_subdir: str | None
  """Subfolder old checkpoints are moved to; None deletes them at once. Default: None."""

  chips_per_vm: int
  """Accelerator chips on each host. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo) and distill
  yet. Default: 4."""

  chunk_attn_window_size: int
  """Tokens per chunk when attention is chunked; 0 is unset. Default: 0."""

  collect_stack_trace: bool
  """True records stack traces of every thread at intervals, to find hangs. Default: False."""

  colocated_python_checkpointing: bool
  """True saves and restores on the accelerator hosts (Pathways). Not supported yet: it needs Pathways, one process
  that controls all hosts; here every host runs its own process. Default: False."""

  colocated_python_data_input: bool
  """True reads data on the accelerator hosts under a single controller (Pathways). Not supported yet: it needs
  Pathways, one process that controls all hosts; here every host runs its own process. Default: False."""

  compile_topology: str
  """Topology to compile for, such as 'v5p-128'. Default: ''."""

  compile_topology_num_slices: int
  """Slices of that topology; -1 is one. Default: -1."""

  compile_xla_flags: str
  """XLA flags for ahead-of-time compilation, space-separated; '' is none. Default: ''."""

  compiled_trainstep_file: str
  """File of the train step compiled ahead, saved or loaded; '' compiles at start. Default: ''."""

  compute_axis_order: str
  """Axis order in cached attention compute, over batch, sequence, heads, head width. Not supported yet: caches have
  one order of dimensions, and the compiler chooses their memory layout. Default: '0,1,2,3'."""

  constant_bound_config: list[Any] | tuple[Any, ...]
  """Six fixed bounds for static quantization scales; empty computes them on the fly. Not supported yet: it belongs
  to a debugging feature that is not implemented yet. Default: []."""

  context: RematLocation | Literal["remat", "device", "offload"]
  """Attention output before its projection (custom). Default: 'remat'."""

  context_parallel_load_balance: bool
  """True reorders tokens so context shards do equal causal work. Default: True."""

  context_parallel_reorder_strategy: ReorderStrategy | Literal["auto", "dual_chunk_swap", "striped"]
  """Token order for context_parallel_load_balance; auto is striped for a ring, else dual_chunk_swap. Default:
  'auto'."""

  context_parallel_strategy: str
  """How context shards share keys and values: all_gather or ring. Default: 'all_gather'."""

  context_sharding: str
  """Mesh axis that splits the sequence: context or expert. Not supported yet: logical_axis_rules defines all
  shardings; write that. Default: 'context'."""

  conv_chunksize_for_audio: int
  """Audio chunks put through the convolutions at once, to bound memory. Not supported yet: models take text only for
  now. Default: 500."""

  conv_stride_for_vit: int
  """Pixels between patches; the patch size means no overlap. Not supported yet: models take text only for now.
  Default: 14."""

  cost_estimate_flops_bwd: int
  """Backward FLOPs reported to the compiler; -1 leaves it to the kernel. It has no effect on JAX's own splash
  attention and grouped matmuls, which take the place of Tokamax's at the same blocks. Default: -1."""

  cost_estimate_flops_fwd: int
  """Forward FLOPs reported to the compiler; -1 leaves it to the kernel. It has no effect on JAX's own splash
  attention and grouped matmuls, which take the place of Tokamax's at the same blocks. Default: -1."""

  custom_mesh: str
  """Named physical device layout, e.g. hybrid_ring_64x4; '' is the usual one. Default: ''."""

  custom_mesh_and_rule: CustomRule | Literal["", "fsdp"] | str
  """Mesh axes and rules in place of the base ones: fsdp, or a YAML file. Default: ''."""

  d_model_for_audio: int
  """Model width of the audio encoder. Not supported yet: models take text only for now. Default: 256."""

  data_sharding: Any
  """Mesh axes that the input batch is split over. Not supported yet: a batch is sharded by logical_axis_rules, over
  the logical axes that input_data_sharding_logical_axes names. Default: []."""

  data_shuffle_seed: int
  """Seed of the data order. Default: 0."""

  dataset_name: str
  """TFDS training dataset as name/config:version. Default: 'c4/en:3.0.1'."""

  dataset_path: str
  """Folder or bucket with the prepared TFDS data; '' is the TFDS default place. Default: ''."""

  dataset_type: DatasetType | Literal["synthetic", "hf", "grain", "tfds", "c4_mlperf", "olmo_grain"]
  """Source of the data. Default: 'tfds'."""

  dcn_autoregressive_parallelism: int
  """Slices that split the weights in decoding; -1 is the rest. Not supported yet: this axis is not implemented yet;
  there are data, fsdp, fsdp_transpose, tensor, tensor_transpose, tensor_sequence, sequence, context, expert,
  pipeline, diloco. Default: 1."""

  dcn_context_autoregressive_parallelism: int
  """Slices that split context and cache in decoding; -1 is the rest. Not supported yet: this axis is not implemented
  yet; there are data, fsdp, fsdp_transpose, tensor, tensor_transpose, tensor_sequence, sequence, context, expert,
  pipeline, diloco. Default: 1."""

  dcn_context_parallelism: int
  """Slices that split the sequence, attention included; -1 is the rest. Default: 1."""

  dcn_data_parallelism: int
  """Slices that split the batch. Default: -1."""

  dcn_diloco_parallelism: int
  """Slice groups that train independently and synchronise periodically (DiLoCo); -1 is the rest. Default: 1."""

  dcn_expert_parallelism: int
  """Slices that split the experts; -1 is the rest. Default: 1."""

  dcn_fsdp_parallelism: int
  """Slices that split weights and batch. Default: 1."""

  dcn_fsdp_transpose_parallelism: int
  """Slices that split weights along their other side. Default: 1."""

  dcn_pipeline_parallelism: int
  """Slices that split the layers into pipeline stages; -1 is the rest. Default: 1."""

  dcn_sequence_parallelism: int
  """Slices that split the sequence outside attention; -1 is the rest. Default: 1."""

  dcn_tensor_parallelism: int
  """Slices that split heads and feed-forward width. Default: 1."""

  dcn_tensor_sequence_parallelism: int
  """Slices that split heads, and length between layers. Default: 1."""

  dcn_tensor_transpose_parallelism: int
  """Slices that split the residual width. Default: 1."""

  debug: Debug | dict[str, Any]
  """Debugging switches. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo) and distill yet.
  Default: Debug(rl=False)."""

  debug_converter: bool
  """True checks and logs the conversion of weights to vLLM. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: False."""

  debug_sharding: bool
  """Print every parameter's shape, logical axes, mesh axes and bytes per device. Default: False."""

  decode_sampling_nucleus_p: int | float
  """Probability mass kept in nucleus sampling, 0 to 1; -1 is unset. Default: -1.0."""

  decode_sampling_strategy: SamplingStrategy | Literal["greedy", "weighted", "nucleus", "topk", "composite"]
  """How the next token is picked: greedy, weighted, nucleus, topk or composite. Default: 'greedy'."""

  decode_sampling_temperature: float
  """Divisor of logits when sampling; lower is closer to greedy. Default: 1.0."""

  decode_sampling_top_k: int
  """Most likely tokens kept in top-k sampling; 0 is unset. Default: 0."""

  decoder_block: DecoderBlockType | Literal[
    "llama2", "mistral", "mixtral", "deepseek", "gemma", "gemma2", "gemma3", "gemma4", "qwen2", "qwen3", "qwen3_moe",
    "qwen3_next", "qwen3_custom_moe", "qwen3_5", "gpt3", "gpt_oss", "llama4", "olmo3",
  ] | str
  """Family of the model. Default: 'llama2'."""

  decoder_layer_input: RematLocation | Literal["remat", "device", "offload"]
  """Input of a layer (policy custom). Default: 'device'."""

  deepstack_visual_indexes_for_vit: list[int] | tuple[int, ...]
  """Vision layers whose features also enter early decoder layers; [] is none. Not supported yet: models take text
  only for now. Default: []."""

  degenerate_group_masking: bool
  """True leaves groups whose rewards are all equal out of the loss. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: True."""

  dense_init_scale: float
  """Variance of initial weights, times the number of inputs. Default: 1.0."""

  diloco_outer_lr: float
  """Learning rate of the outer optimizer at each merge. Default: 0.3."""

  diloco_outer_momentum: float
  """Nesterov momentum of the outer optimizer. Default: 0.9."""

  diloco_sync_period: int
  """Inner steps between merges of the replicas. Default: 36."""

  distill_alpha: float
  """Weight of the teacher loss, 0 to 1; the label loss has the rest. Default: 0.5."""

  distill_alpha_end: float | None
  """Value distill_alpha reaches at the end of training; None keeps it fixed. Default: None."""

  distill_alpha_schedule: Literal["constant", "linear", "cosine"]
  """Path from distill_alpha to its end value: constant, linear or cosine. Default: 'constant'."""

  distill_beta: float
  """Weight of the hidden-feature loss; 0 is no such loss. Default: 0.0."""

  distill_beta_end: float | None
  """Value distill_beta reaches at the end of training; None keeps it fixed. Default: None."""

  distill_beta_schedule: Literal["constant", "linear", "cosine"]
  """Path from distill_beta to its end value: constant, linear or cosine. Default: 'constant'."""

  distill_feature_loss_type: Literal["cosine", "l2"]
  """Distance between student and teacher features: cosine or l2. Default: 'cosine'."""

  distill_layer_indices: list[Any] | tuple[Any, ...] | None
  """Layers whose features are compared, with distill_beta; None is all. Default: None."""

  distill_student_weights_share_map: dict[str, Any]
  """Student weight names and the student weights they share values with. Default: {}."""

  distill_temperature: float
  """Divisor of student and teacher logits before the softmax; higher is softer. Default: 1.0."""

  distill_temperature_end: float | None
  """Value distill_temperature reaches at the end of training; None keeps it fixed. Default: None."""

  distill_temperature_schedule: Literal["constant", "linear", "cosine"]
  """Path from distill_temperature to its end value: constant, linear or cosine. Default: 'constant'."""

  distill_weights_copy_map: dict[str, Any]
  """Paths of student weights, and the teacher's that they start with: PATH, or [PATH, [LAYER, ...]]. Default: {}."""

  downsample_hidden_size_for_audio: int
  """Channels of the convolutions that shorten the audio. Not supported yet: models take text only for now. Default:
  256."""

  dpo_beta: float
  """Strength of the pull to the reference model in the DPO loss. Default: 0.1."""

  dpo_label_smoothing: float
  """Assumed share of swapped preference labels in the DPO loss, 0 to 1; 0 trusts all. Default: 0.0."""

  dpo_loss_type: list[Literal[
    "sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "orpo", "sft", "kto",
  ]] | tuple[Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo", "orpo", "sft", "kto"], ...]
  """Losses of preference pairs that are added up: sigmoid (DPO), ipo, hinge, robust, simpo, orpo, ... Default:
  ['sigmoid']."""

  dpo_loss_weights: list[float] | tuple[float, ...]
  """Weight of each loss of dpo_loss_type; empty is 1 for all. Default: []."""

  dq_reduction_steps: int
  """Partial sums of the query gradient (Tokamax); 0 is the kernel's own choice. It has no effect on JAX's own splash
  attention and grouped matmuls, which take the place of Tokamax's at the same blocks. Default: 0."""

  dropout_rate: float
  """Share of activations zeroed in training, below 1; 0 is none. Default: 0.0."""

  dtype: DType | Literal["bfloat16", "float32", "float16"]
  """Activations and the inputs of matmuls. Default: 'bfloat16'."""

  dtype_mm: str
  """Computation type of the multimodal encoders. Not supported yet: there is no image encoder yet. Default:
  'float32'."""

  dump_hlo: bool
  """True saves the compiled HLO modules for debugging. Default: False."""

  dump_hlo_delete_local_after: bool
  """True deletes the local HLO files once uploaded. Default: True."""

  dump_hlo_gcs_dir: str
  """Bucket folder for HLO files; '' is xla_dump under the run's output. Default: ''."""

  dump_hlo_local_dir: str
  """Local folder that XLA writes HLO files into. Default: '/tmp/xla_dump/'."""

  dump_hlo_local_module_name: str
  """Text that a module's name must hold to be written locally; '' is all. Default: 'jit_train_step'."""

  dump_hlo_module_name: str
  """Text that a module's file name must hold to be uploaded. Default: 'jit_train_step'."""

  dump_hlo_upload_all: bool
  """True uploads from every host, false from the first only. Default: False."""

  dump_hlo_xla_flags: str
  """XLA flags for the dump; '' builds them from the folder and module name. Default: ''."""

  dump_jaxpr: bool
  """True saves the train step's jaxpr for debugging. Default: False."""

  dump_jaxpr_delete_local_after: bool
  """True deletes the local jaxpr files once uploaded. Default: True."""

  dump_jaxpr_gcs_dir: str
  """Bucket folder for jaxpr files; '' is jaxpr_dump under the run's output. Default: ''."""

  dump_jaxpr_local_dir: str
  """Local folder for jaxpr files. Default: '/tmp/jaxpr_dump/'."""

  dump_step: int
  """Step at which to save the HLO; -1 ties it to no step. Default: -1."""

  elastic_enabled: bool
  """True lets training go on after slices are lost (Pathways). Not supported yet: elastic training needs Pathways;
  here a run that lost processes is started again as a whole: maxtext launch --restarts. Default: False."""

  elastic_max_retries: int
  """Most restarts after slice failures before the run fails. Not supported yet: elastic training needs Pathways;
  here a run that lost processes is started again as a whole: maxtext launch --restarts. Default: 10."""

  elastic_min_slice_count: int
  """Fewest live slices to train on; -1 needs all of them. Not supported yet: elastic training needs Pathways; here a
  run that lost processes is started again as a whole: maxtext launch --restarts. Default: -1."""

  elastic_timeout_seconds: int
  """Seconds to wait for enough slices before giving up. Not supported yet: elastic training needs Pathways; here a
  run that lost processes is started again as a whole: maxtext launch --restarts. Default: 300."""

  enable_autocheckpoint: bool
  """True saves a checkpoint on a preemption or maintenance notice. Default: False."""

  enable_checkpoint_cloud_logger: bool
  """True sends checkpoint save and restore events to cloud logging. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  enable_checkpointing: bool
  """True saves checkpoints and resumes from the run's latest. Default: True."""

  enable_continuous_checkpointing: bool
  """True starts a new save as soon as the last one ends, not by period. Default: False."""

  enable_data_shuffling: bool
  """True shuffles the training data, seeded by data_shuffle_seed. Default: True."""

  enable_diloco: bool
  """True trains replicas independently and merges them with an outer optimizer (DiLoCo). Default: False."""

  enable_dp_attention: bool
  """True splits vLLM attention over requests instead of heads. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: False."""

  enable_dropout: bool
  """True applies dropout_rate in training; false turns dropout off. Default: True."""

  enable_emergency_checkpoint: bool
  """True also saves often to local storage, to recover from a lost slice. Default: False."""

  enable_expert_parallel: bool
  """True lets vLLM place whole experts on different devices. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: False."""

  enable_gcp_goodput_metrics: bool
  """True also sends goodput to Google Cloud Monitoring. Not supported yet: metrics go to the console, the run's
  folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: True."""

  enable_gcp_step_deviation_metrics: bool
  """True also sends step-time deviation to Google Cloud Monitoring. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: True."""

  enable_goodput_recording: bool
  """True logs job and step times from which goodput is computed. Not supported yet: metrics go to the console, the
  run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  enable_jax_profiler: bool
  """True opens a port where a live trace can be taken. Default: False."""

  enable_llm_inference_pool: bool
  """True starts the server as a pool of inference workers (multi-controller JAX). Not supported yet: a server is one
  process. Default: False."""

  enable_model_warmup: bool
  """True compiles the prefill and generate programs before the server takes requests. Default: False."""

  enable_multi_tier_checkpointing: bool
  """True saves to node-local storage, then to peers and a bucket. Not supported yet: there is no replicator service
  here: enable_emergency_checkpoint=true keeps replicas on local disks by itself. Default: False."""

  enable_nnx: bool
  """True uses the Flax NNX code path for the model. Default: False."""

  enable_orbax_v1: bool
  """True uses Orbax's version 1 interface. Not supported yet: checkpoints are read and written through Orbax's
  CheckpointManager, in its own layout, by the process itself. Default: False."""

  enable_padding_causal_mask: bool
  """True masks padding as well as later tokens (GPU fused attention). Not supported yet: the kernels are JAX's own
  splash and paged attention, and cuDNN; choose with attention and sa_block_*. Default: True."""

  enable_pathways_goodput: bool
  """True measures goodput for jobs that run on Pathways. Not supported yet: it needs Pathways, one process that
  controls all hosts; here every host runs its own process. Default: False."""

  enable_prefix_caching: bool
  """True reuses the cache of prompt beginnings already seen by the server. Default: False."""

  enable_rampup_batch_size: bool
  """True starts with a small batch and grows it to per_device_batch_size. Default: False."""

  enable_single_controller: bool
  """True runs all hosts from one Python process (Pathways). Not supported yet: it needs Pathways, one process that
  controls all hosts; here every host runs its own process. Default: False."""

  enable_single_replica_ckpt_restoring: bool
  """True has one replica read the checkpoint and broadcast it to the rest. Default: False."""

  enable_tensorboard: bool
  """True writes metrics as TensorBoard events. Default: True."""

  enable_tpu_profiling_options: bool
  """True passes the tpu_num_* chip and SparseCore settings to the profiler. Not supported yet: metrics go to the
  console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  enable_tunix_perf_metrics: bool
  """True collects Tunix timing metrics in post-training runs. Not supported yet: metrics go to the console, the
  run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  encoder_attention_heads_for_audio: int
  """Attention heads per audio encoder layer. Not supported yet: models take text only for now. Default: 4."""

  encoder_ffn_dim_for_audio: int
  """Feed-forward width of the audio encoder. Not supported yet: models take text only for now. Default: 512."""

  encoder_layers_for_audio: int
  """Layers of the audio encoder. Not supported yet: models take text only for now. Default: 2."""

  engram: RematLocation | Literal["remat", "device", "offload"]
  """Output of the n-gram memory module (custom). Default: 'remat'."""

  engram_head_dim: int
  """Width of one Engram head. Default: 1280."""

  engram_kernel_size: int
  """Tokens spanned by the convolution over the looked-up memory. Default: 4."""

  engram_layers: list[int] | tuple[int, ...]
  """Decoder layers that get an n-gram memory, from 0; [] is none. Default: []."""

  engram_max_ngram_size: int
  """Longest n-gram looked up, in tokens; lengths start at 2. Default: 3."""

  engram_num_heads: int
  """Hash heads per n-gram length. Default: 8."""

  engram_seed: int
  """Seed of the n-gram hash multipliers. Default: 0."""

  engram_vocab_bases: list[int] | tuple[int, ...]
  """Least hash table size for each n-gram length, from 2 up. Default: []."""

  epsilon_high: float | None
  """Upper clip range of the policy ratio; None takes grpo_epsilon. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: None."""

  eval_corr_lst: bool
  """True lists the correct responses, false the wrong ones (eval_make_lst). Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: False."""

  eval_data_columns: list[str] | tuple[str, ...]
  """Data columns that hold the evaluation text, in order. Default: ['text']."""

  eval_dataset_name: str
  """TFDS evaluation dataset as name/config:version. Default: 'c4/en:3.0.1'."""

  eval_image_column: str | list[str] | tuple[str, ...]
  """Data column or columns that hold the evaluation images. Not supported yet: data is text, and every process reads
  the rows of its devices. Default: 'image'."""

  eval_interval: int
  """Training steps between evaluations; -1 is no evaluation. Default: -1."""

  eval_make_lst: bool
  """True returns a list of responses along with the evaluation scores. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: False."""

  eval_mode: Literal["pass", "maj", "pass_at_1"]
  """Score by any correct pass ('pass'), majority ('maj') or mean ('pass_at_1'). Not supported yet: runs only pre-
  train, fine-tune (use_sft, use_dpo) and distill yet. Default: 'pass'."""

  eval_per_device_batch_size: int | float
  """Evaluation sequences per device; 0 takes per_device_batch_size. Default: 0.0."""

  eval_sampling_strategy: str
  """Entry of generation_configs that evaluation samples with. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 'greedy'."""

  eval_split: str
  """Split of eval_dataset_name that evaluation reads. Default: 'validation'."""

  eval_steps: int
  """Batches per evaluation; -1 takes the whole evaluation set. Default: -1."""

  expansion_factor_real_data: float
  """Hosts per host that reads data, the others feed placeholders; -1: all hosts read. Not supported yet: data is
  text, and every process reads the rows of its devices. Default: -1.0."""

  final_logits_soft_cap: float | None
  """Bound logits by cap*tanh(x/cap). Default: None."""

  first_num_dense_layers: int
  """Layers at the start without experts. Default: 0."""

  float32_gate_logits: bool
  """True computes router logits in float32. Default: False."""

  float32_logits: bool
  """True casts attention logits to float32 before softmax. Default: False."""

  float32_qk_product: bool
  """True computes the query-key matmul in float32. Default: False."""

  float32_weight_sum: bool
  """True sums the experts' weighted outputs in float32. Default: True."""

  force_q_layout: bool
  """True pins the memory layout of the query before the attention kernel. Not supported yet: the kernels are JAX's
  own splash and paged attention, and cuDNN; choose with attention and sa_block_*. Default: False."""

  force_unroll: bool
  """True unstacks scanned layers, one entry each, in a weights-only checkpoint. Default: False."""

  formatting_func_kwargs: dict[str, Any]
  """Keyword arguments passed to the function of formatting_func_path. Default: {}."""

  formatting_func_path: str
  """Import path of a function from a row to messages, or to prompt and completion; '' is none. Default: ''."""

  freeze_audio_encoder_params: bool
  """True leaves the audio encoder's weights untrained. Not supported yet: models take text only for now. Default:
  True."""

  freeze_vision_encoder_params: bool
  """True leaves the vision encoder's weights untrained. Not supported yet: models take text only for now. Default:
  True."""

  fused_mlp: bool
  """True computes gate and up projections in one matmul. Not supported yet: gate and up are two matmuls; leave it
  out. Default: False."""

  fused_qkv: bool
  """True computes query, key and value in one matmul. Default: False."""

  gcs_debug_path: str
  """Bucket folder for the converter's debugging output; '' is none. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: ''."""

  gcs_metrics: bool
  """True writes step metrics to the run's bucket folder. Default: False."""

  gdn_chunk_size: int
  """Tokens per chunk when the delta rule runs in parallel. Default: 64."""

  gdn_conv_kernel_dim: int
  """Tokens spanned by the causal convolution. Default: 4."""

  gdn_key_head_dim: int
  """Query and key width per head, linear attention. Default: 128."""

  gdn_num_key_heads: int
  """Query and key heads, linear attention. Default: 16."""

  gdn_num_value_heads: int
  """Value heads, linear attention. Default: 32."""

  gdn_value_head_dim: int
  """Value width per head, linear attention. Default: 128."""

  generate_padding_batch_eval: bool
  """True feeds empty batches to hosts whose evaluation data ran out first. Default: False."""

  generate_padding_batch_train: bool
  """True feeds empty batches to hosts whose training data ran out before the others'. Default: False."""

  generate_slice: str
  """Accelerator slice type for generation when the two phases are split. Not supported yet: prefill and decoding run
  in one server on one mesh: `maxtext serve`. Default: 'v5e-16'."""

  generation_configs: dict[str, Any]
  """Named sampling settings for evaluation: temperature, top_k and top_p. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: {}."""

  global_head_dim: int
  """Head width in global attention layers; 0 takes head_dim. Default: 0."""

  global_num_kv_heads: int
  """Key-value heads in global attention layers; 0 takes the usual count. Default: 0."""

  global_parameter_scale: int
  """Approximate growth in parameter count over the base sizes; a power of two. Default: 1."""

  global_rampup_samples: int
  """Sequences, over all devices, that the whole batch ramp-up lasts. Default: 500."""

  global_rope_max_timescale: int
  """Rotary base of full-attention layers; -1 takes rope_max_timescale. Default: -1."""

  global_rope_proportion: float
  """Share of the head width rotated in full-attention layers, 0 to 1. Default: 0.25."""

  goodput_upload_interval_seconds: int
  """Seconds between goodput uploads. Not supported yet: metrics go to the console, the run's folder, metrics_file,
  prometheus_port, TensorBoard and gcs_metrics. Default: 30."""

  grad_dtype: DType | Literal["bfloat16", "float32", "float16"]
  """Gradients as they are summed and as the optimizer sees them. Default: 'float32'."""

  gradient_accumulation_steps: int
  """Batches summed into one update. Default: 1."""

  gradient_clipping_threshold: float
  """Largest gradient norm; 0 is no limit. Default: 1.0."""

  grain_data_source_max_workers: int
  """Most threads that open the sources of a mixture in parallel. Default: 16."""

  grain_eval_files: str
  """Evaluation file glob, or several with weights; '' is what prepared training data holds out. Default: ''."""

  grain_file_type: str
  """Format of the Grain files: arrayrecord, tfrecord, jsonl or parquet. Default: 'arrayrecord'."""

  grain_num_threads: int
  """Reading threads in each training reader process. Default: 16."""

  grain_num_threads_eval: int
  """Reading threads in each evaluation reader process. Default: 16."""

  grain_packing_type: Literal["first_fit", "best_fit", "concat_then_split"]
  """How Grain packs documents: first_fit, best_fit or concat_then_split. Default: 'first_fit'."""

  grain_per_worker_buffer_size: int
  """Batches each training reader process keeps ready. Default: 1."""

  grain_per_worker_buffer_size_eval: int
  """Batches each evaluation reader process keeps ready. Default: 1."""

  grain_prefetch_buffer_size: int
  """Elements the training reading threads fetch ahead. Default: 500."""

  grain_prefetch_buffer_size_eval: int
  """Elements the evaluation reading threads fetch ahead. Default: 500."""

  grain_ram_budget_mb: int
  """Memory in MB allowed when the reader process count tunes itself. Default: 1024."""

  grain_shuffle_buffer_size: int
  """Elements in the shuffle window of formats read in order (tfrecord, parquet). Default: 100."""

  grain_train_files: str
  """Training file glob, or several with weights; '' leaves it to the mixture file. Default: ''."""

  grain_train_mixture_config_path: str
  """JSON file that lists training sources and weights; '' uses grain_train_files. Default: ''."""

  grain_use_elastic_iterator: bool
  """True lets a saved data position resume on a different number of hosts. Default: False."""

  grain_worker_count: int
  """Training reader processes per host; 0 reads in the main process, -1 tunes itself. Default: 1."""

  grain_worker_count_eval: int
  """Evaluation reader processes per host; 0: in the main process, -1 tunes itself. Default: 1."""

  grpo_beta: float
  """Weight of the KL penalty against the reference model; 0 is none. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: 0.08."""

  grpo_epsilon: float
  """Clip range of the policy ratio around 1. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: 0.2."""

  hardware: Literal["tpu", "gpu", "gpu_multiprocess", "cpu"]
  """Hardware to run on; when not set, whatever JAX finds. Default: 'tpu'."""

  hbm_utilization_vllm: float
  """Share of device memory that vLLM may take (0 to 1). Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 0.72."""

  head_dim: int
  """Width of one attention head. Default: 128."""

  heartbeat_reporting_interval_in_seconds: int
  """Seconds between heartbeats. Not supported yet: metrics go to the console, the run's folder, metrics_file,
  prometheus_port, TensorBoard and gcs_metrics. Default: 5."""

  hf_access_token: str | None
  """Hugging Face token for gated datasets and tokenizers; None takes HF_TOKEN or that of `hf auth login`. Default:
  None."""

  hf_data_dir: str | None
  """Folder inside the hub dataset to read; None is the whole. Default: None."""

  hf_eval_files: str | None
  """Evaluation files, path or glob, for the loader in hf_path; None is the dataset's own. Default: None."""

  hf_eval_split: str | None
  """Split of the hub dataset that evaluation reads; None is no split chosen. Default: None."""

  hf_name: str | None
  """Subset (configuration) of the hub dataset; None is its default. Default: None."""

  hf_path: str
  """Hub dataset name, or a loader such as json or parquet to go with the file keys. Default: ''."""

  hf_train_files: str | None
  """Training files, path or glob, for the loader in hf_path; None is the dataset's own. Default: None."""

  hidden_size_for_vit: int
  """Model width of the vision encoder. Not supported yet: models take text only for now. Default: 1408."""

  hide_profiler_step_metric: bool
  """True leaves the per-step marker out of the trace. Not supported yet: metrics go to the console, the run's
  folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  ici_autoregressive_parallelism: int
  """Devices that split the weights in decoding. Not supported yet: this axis is not implemented yet; there are data,
  fsdp, fsdp_transpose, tensor, tensor_transpose, tensor_sequence, sequence, context, expert, pipeline, diloco.
  Default: 1."""

  ici_context_autoregressive_parallelism: int
  """Devices that split context and cache in decoding. Not supported yet: this axis is not implemented yet; there are
  data, fsdp, fsdp_transpose, tensor, tensor_transpose, tensor_sequence, sequence, context, expert, pipeline, diloco.
  Default: 1."""

  ici_context_parallelism: int
  """Devices that split the sequence, attention included. Default: 1."""

  ici_data_parallelism: int
  """Devices that split the batch. Default: 1."""

  ici_diloco_parallelism: int
  """Device groups in a slice that train independently and synchronise periodically (DiLoCo). Default: 1."""

  ici_expert_parallelism: int
  """Devices that split the experts. Default: 1."""

  ici_fsdp_parallelism: int
  """Devices that split weights and batch. Default: -1."""

  ici_fsdp_transpose_parallelism: int
  """Devices that split weights along their other side. Default: 1."""

  ici_pipeline_parallelism: int
  """Devices that split the layers into pipeline stages. Default: 1."""

  ici_sequence_parallelism: int
  """Devices that split the sequence outside attention. Default: 1."""

  ici_tensor_parallelism: int
  """Devices that split heads and feed-forward width. Default: 1."""

  ici_tensor_sequence_parallelism: int
  """Devices that split heads, and length between layers. Default: 1."""

  ici_tensor_transpose_parallelism: int
  """Devices that split the residual width. Default: 1."""

  image_path: str
  """Image file for decoding, several separated by commas; '' is none. Not supported yet: models take text only for
  now. Default: ''."""

  image_placeholder: str
  """Text that marks an image's place in the prompt. Not supported yet: models take text only for now. Default:
  '<|image|>'."""

  image_size_for_vit: int | list[int] | tuple[int, ...]
  """Image side in pixels, or [height, width], into the vision encoder. Not supported yet: models take text only for
  now. Default: 896."""

  indexer_head_dim: int
  """Width of each indexer head. Default: 128."""

  indexer_loss_scaling_factor: float
  """Weight of the loss that fits the indexer to attention; 0 is no such loss. Default: 0.0."""

  indexer_n_heads: int
  """Indexer query heads. Default: 64."""

  indexer_sparse_training: bool
  """True trains with attention to the picked tokens only, false to all (dense warm-up). Default: False."""

  indexer_topk: int
  """Tokens the indexer picks for each query. Default: 2048."""

  inference_benchmark_test: bool
  """True marks the run as an inference benchmark. Not supported yet: `maxtext bench serve` is the benchmark.
  Default: False."""

  inference_metadata_file: str
  """JSON file of run details stored with the benchmark results; '' is none. Default: ''."""

  inference_microbenchmark_log_file_path: str
  """File for the timing results as JSON; '' writes none. Default: ''."""

  inference_microbenchmark_loop_iters: int
  """Timed repetitions of each measurement. Default: 10."""

  inference_microbenchmark_num_samples: list[int] | tuple[int, ...]
  """Completion counts to time in multi-sampling prefill. Default: [1, 2, 3, 4, 5]."""

  inference_microbenchmark_prefill_lengths: str
  """Prompt lengths to time, in tokens, separated by commas. Default: '64,128,256,512,1024'."""

  inference_microbenchmark_stages: str
  """Phases to time, separated by commas: prefill, generate. Default: 'prefill,generate'."""

  inference_server: str
  """Server class: prefill and generation interleaved on one slice, or on two. Not supported yet: prefill and
  decoding run in one server on one mesh: `maxtext serve`. Default: 'MaxtextInterleavedServer'."""

  inhomogeneous_layer_cycle_interval: int
  """Layers in one repeat of a pattern of unlike layers; 1 is all alike. Default: 1."""

  init_weights_seed: int
  """Seed of the initial weights. Default: 0."""

  input_data_sharding_logical_axes: list[str] | tuple[str, ...]
  """Named dimensions of a batch."""

  interleave_moe_layer_step: int
  """Every how many layers one has experts; 1 is all of them. Default: 1."""

  intermediate_size_for_vit: int
  """Feed-forward width of the vision encoder. Not supported yet: models take text only for now. Default: 5632."""

  internal_compile: bool
  """True compiles ahead of time without a named topology (internal use). Not supported yet: maxtext plan compiles
  for compile_topology. Default: False."""

  internal_compile_num_devices: int
  """Devices to compile for with internal_compile; -1 is unset. Not supported yet: maxtext plan compiles for
  compile_topology. Default: -1."""

  jax_cache_dir: str | None
  """Folder of compiled programs; empty keeps none. Default: '~/jax_cache'."""

  jax_debug_log_modules: str
  """JAX modules that log at debug level, such as 'jax'; '' is none. Not supported yet: it belongs to a debugging
  feature that is not implemented yet. Default: ''."""

  jax_distributed_initialization_timeout: int
  """Seconds to wait for the other processes. Default: 300."""

  jax_profiler_port: int
  """Port of the live trace server, with enable_jax_profiler. Default: 9999."""

  key_proj: RematLocation | Literal["remat", "device", "offload"]
  """Key projection (custom). Default: 'remat'."""

  kto_desirable_weight: float
  """Weight of answers with label true in the kto loss. Default: 1.0."""

  kto_undesirable_weight: float
  """Weight of answers with label false in the kto loss. Default: 1.0."""

  kv_cache_buffer: int
  """Spare KV-cache tokens beyond the prompt and the response. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 256."""

  kv_lora_rank: int
  """Width of the compressed key-value latent. Default: 512."""

  kv_quant_axis: KvQuantAxis | Literal["", "dkv", "heads_and_dkv"]
  """Axes that share one scale in the quantized key-value cache. Default: 'heads_and_dkv'."""

  kv_quant_dtype: Literal["int8", "int4"]
  """Dtype of the quantized KV cache. Default: 'int8'."""

  kv_wa_proj: RematLocation | Literal["remat", "device", "offload"]
  """Key-value down-projection of latent attention (custom). Default: 'remat'."""

  learn_to_init_mode: bool
  """True learns the student's starting weights as linear maps of the teacher's. Default: False."""

  learning_rate: float
  """Peak learning rate. Default: 3e-05."""

  learning_rate_final_fraction: float
  """Last learning rate, as a fraction of the peak. Default: 0.1."""

  learning_rate_schedule_steps: int
  """Schedule length; -1 takes steps. Default: -1."""

  load_balance_loss_weight: float
  """Weight of the loss for even use of experts; 0 is none. Default: 0.0."""

  load_checkpoint_only_once: bool
  """True reads weights once and copies them to the other models (RL actor). Not supported yet: it belongs to RL,
  which is not implemented yet. Default: False."""

  load_from_prefill_dir: bool
  """True reads the prompt's cache from prefill_cache_dir instead of computing it. Default: False."""

  load_full_state_path: str
  """Checkpoint of weights, optimizer and step to start from; '' is none. Default: ''."""

  load_parameters_path: str
  """Checkpoint of weights only to start from; '' is none. Default: ''."""

  local_checkpoint_directory: str
  """Node-local folder for emergency or multi-tier checkpoints; '' is unset. Default: ''."""

  local_checkpoint_period: int
  """Steps between local checkpoints; 0 is unset. Default: 0."""

  local_rope_max_timescale: int
  """Rotary base of sliding-window layers; -1 takes rope_max_timescale. Default: -1."""

  local_rope_proportion: float
  """Share of the head width rotated in sliding-window layers, 0 to 1. Default: 1.0."""

  log_config: bool
  """True writes the configuration into the run's folder. Default: True."""

  log_period: int
  """Steps between lines of the log; the first ten steps are always shown. Default: 100."""

  logical_axis_rules: Any
  """Pairs [logical axis, mesh axes]; activation_* for activations. Default: []."""

  logits_dot_in_fp32: bool
  """Compute the head's matmul in float32. Default: False."""

  logits_via_embedding: bool
  """Use the embedding table as output head. Default: False."""

  lora_alpha: float
  """LoRA adapters are multiplied by this over their rank. Default: 16.0."""

  lora_input_adapters_path: str
  """Folder of LoRA adapters to load onto the base weights; '' is none. Default: ''."""

  lora_merge_aware: bool
  """True rounds the base with its LoRA adapters in it to weight_format in training, so that what `maxtext quantize`
  merges is what was trained. Default: False."""

  lora_rank: int
  """Rank of LoRA adapters, which alone are trained; 0 is none. Default: 0."""

  lora_targets: list[str] | tuple[str, ...]
  """Patterns of paths of modules that get LoRA adapters, among layers' linear and expert weights. Default:
  ['layers/']."""

  loss_algo: Literal["grpo", "gspo-token"]
  """Policy ratio per token ('grpo') or per sequence ('gspo-token'). Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: 'grpo'."""

  lr_schedule_type: LearningRateScheduleType | Literal["cosine", "wsd"]
  """Shape of the learning rate over the run. Default: 'cosine'."""

  lti_use_general_linear_map: bool
  """True uses one full linear map per weight in learn_to_init_mode, not a factored one. Default: False."""

  managed_mldiagnostics: bool
  """True reports metrics and profiles to Google Cloud ML Diagnostics. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  managed_mldiagnostics_run_group: str
  """Name under which ML Diagnostics groups runs; '' is no group. Not supported yet: metrics go to the console, the
  run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: ''."""

  math_verify_num_procs: int | None
  """Processes that check math answers; None picks by the CPU count. Not supported yet: runs only pre-train, fine-
  tune (use_sft, use_dpo) and distill yet. Default: None."""

  math_verify_timeout: int
  """Seconds allowed for checking a batch of math answers. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 300."""

  matmul_precision: MatmulPrecision | Literal["default", "high", "highest", "bfloat16", "float32"]
  """Precision of matmuls outside attention kernels. Default: 'default'."""

  max_checkify: bool
  """True adds run-time value checks to compiled code; slow. Not supported yet: it belongs to a debugging feature
  that is not implemented yet. Default: False."""

  max_concurrency: int
  """Most rollouts in flight at once (use_agentic_rollout). Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 256."""

  max_corpus_chars: int
  """Most characters of text read when a tokenizer is trained. Default: 10000000."""

  max_num_batched_tokens: int | None
  """Most tokens in one vLLM step; None is vLLM's default. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: None."""

  max_num_checkpoints_to_keep: int | None
  """Most recent checkpoints kept; None keeps all. Default: None."""

  max_num_images_per_example: int
  """Most images in one example, padded up to it; -1 is no limit. Not supported yet: models take text only for now.
  Default: -1."""

  max_num_seqs: int | None
  """Most sequences vLLM runs at once; None is vLLM's default. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: None."""

  max_position_embeddings: int
  """Longest context, in positions, after YaRN extension. Default: 163840."""

  max_prefill_predict_length: int
  """Longest prompt, in tokens; the rest of the target length is generated. Default: 64."""

  max_sample_len_for_audio: int
  """Most spectrogram frames in one audio sample. Not supported yet: models take text only for now. Default: 10000."""

  max_segments_per_seq: int
  """Most documents packed in one sequence; -1 is no limit. Default: -1."""

  max_source_positions_for_audio: int
  """Most positions in the audio encoder's sequence. Not supported yet: models take text only for now. Default: 1500."""

  max_target_length: int
  """Length of a sequence, in tokens. Default: 2048."""

  max_timescale_for_audio: float
  """Longest wavelength of the audio encoder's sinusoidal positions. Not supported yet: models take text only for
  now. Default: 10000.0."""

  megablox: bool
  """True runs grouped matmuls with Megablox, false with JAX's ragged_dot. Default: True."""

  merge_gating_gmm: bool
  """True computes the experts' gate and up matmuls in one grouped call. Not supported yet: the experts' gate and up
  projections are separate weights and separate matmuls. Default: False."""

  mesh_axes: list[str] | tuple[str, ...]
  """Names of the mesh axes, outermost first."""

  metrics_file: str | None
  """Append one JSON object per step to this file. Default: None."""

  mhc_expansion_rate: int
  """Parallel residual streams per layer; 1 is the plain residual. Default: 1."""

  mla_kv: RematLocation | Literal["remat", "device", "offload"]
  """Low-rank key-value of latent attention (custom). Not supported yet: no layer has this tensor yet. Default:
  'remat'."""

  mla_naive_kvcache: bool
  """True caches full keys and values, false the compressed latent. Default: True."""

  mla_q: RematLocation | Literal["remat", "device", "offload"]
  """Low-rank query of latent attention (custom). Not supported yet: no layer has this tensor yet. Default: 'remat'."""

  mlp_activations: list[str] | tuple[str, ...]
  """Activation of the feed-forward layer; a second 'linear' makes it gated. Default: ['silu', 'linear']."""

  mlp_activations_limit: float
  """Bound at which feed-forward activations are clipped; -1 is no limit. Default: -1.0."""

  mlp_bias: bool
  """True adds biases to the feed-forward and expert matmuls. Default: False."""

  mlpwi: RematLocation | Literal["remat", "device", "offload"]
  """Feed-forward input matmul, ungated (custom). Default: 'remat'."""

  mlpwi_0: RematLocation | Literal["remat", "device", "offload"]
  """Feed-forward gate matmul (custom). Default: 'remat'."""

  mlpwi_1: RematLocation | Literal["remat", "device", "offload"]
  """Feed-forward up matmul (custom). Default: 'remat'."""

  mlpwo: RematLocation | Literal["remat", "device", "offload"]
  """Feed-forward output matmul (custom). Default: 'remat'."""

  moba: bool
  """True has each query attend to only its best-scoring key blocks. Default: False."""

  moba_chunk_size: int
  """Tokens per key block (moba). Default: 1024."""

  moba_topk: int
  """Key blocks each query attends to (moba). Default: 8."""

  model_call_mode: str
  """'inference' takes the inference path of layers that have one; '' is training. Not supported yet: the command
  decides it: `maxtext train` trains, `maxtext decode` decodes. Default: ''."""

  model_name: Literal[
    "default", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3.1-8b-Instruct", "llama3-70b",
    "llama3.1-70b-Instruct", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.3-70b", "mistral-7b",
    "mixtral-8x7b", "mixtral-8x22b", "deepseek2-16b", "deepseek2-236b", "deepseek3-671b", "deepseek3-671b-2dfsdp",
    "deepseek3-671b-batchsplit", "deepseek3-test", "deepseek3-tiny", "deepseek3.2-671b", "deepseek-custom",
    "kimi-k2-1t", "gemma-7b", "gemma-2b", "gemma2-2b", "gemma2-9b", "gemma2-27b", "gemma3-4b", "gemma3-12b",
    "gemma3-27b", "gemma4-26b", "gemma4-31b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen3-0.6b", "qwen3-1.7b",
    "qwen3-1.7b-base", "qwen3-4b", "qwen3-4b-base", "qwen3-4b-thinking-2507", "qwen3-8b", "qwen3-8b-base", "qwen3-14b",
    "qwen3-14b-base", "qwen3-32b", "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-30b-a3b-base", "qwen3-480b-a35b",
    "qwen3-next-80b-a3b", "qwen3-omni-30b-a3b", "qwen3-custom-30b-a3b", "qwen3.5-397b-a17b", "gpt3-175b", "gpt3-22b",
    "gpt3-6b", "gpt3-52k", "gpt-oss-20b", "gpt-oss-120b", "llama4-17b-16e", "llama4-17b-128e", "olmo3-7b",
    "olmo3-7b-pt", "olmo3-32b",
  ]
  """A named model; its architecture keys are then fixed. Default: 'default'."""

  moe_expert_input_dim: int
  """Width of what enters the experts; -1 takes the embedding width. Default: -1."""

  moe_fsdp_use_two_stage_all_gather: bool
  """True gathers expert weights over the two FSDP axes in two steps. Not supported yet: tokens and expert weights
  are gathered whole, by XLA's own collectives. Default: False."""

  moe_mlpwi_0: RematLocation | Literal["remat", "device", "offload"]
  """Experts' first input matmul, the gate (custom). Default: 'remat'."""

  moe_mlpwi_1: RematLocation | Literal["remat", "device", "offload"]
  """Experts' second input matmul (custom). Default: 'remat'."""

  moe_mlpwo: RematLocation | Literal["remat", "device", "offload"]
  """Experts' output matmul (custom). Default: 'remat'."""

  monitor_goodput: bool
  """True computes goodput and uploads it during the run; needs recording. Not supported yet: metrics go to the
  console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  monitor_step_time_deviation: bool
  """True tracks how far step times stray from the ideal; needs monitoring. Not supported yet: metrics go to the
  console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: True."""

  mrope_section: list[int] | tuple[int, ...]
  """Rotary frequencies given to time, height and width (use_mrope). Not supported yet: models take text only for
  now. Default: [24, 20, 20]."""

  mscale: float
  """Multiplier in the attention-score correction for longer context (YaRN). Default: 1.0."""

  mtc_data_parallelism: int
  """Identical replicas for multi-tier checkpoints; 0 takes the slice count. Not supported yet: there is no
  replicator service here: enable_emergency_checkpoint=true keeps replicas on local disks by itself. Default: 0."""

  mtp_eval_target_module: int
  """Prediction layer, from 1, whose acceptance rate is evaluated; 0 is none. Default: 0."""

  mtp_loss_scaling_factor: float
  """Weight of the multi-token prediction loss in the total. Default: 0.1."""

  mtp_num_layers: int
  """Multi-token prediction (MTP) layers, each of which predicts one token further; 0 is none. Default: 0."""

  mu_dtype: str
  """Dtype of the first moment; empty takes the weights'. Default: ''."""

  multi_sampling: bool
  """True draws several completions from one prompt's cache. Default: False."""

  multi_tier_checkpointing_backup_interval_minutes: int
  """Minutes between multi-tier copies to the bucket; 0 is unset. Not supported yet: there is no replicator service
  here: enable_emergency_checkpoint=true keeps replicas on local disks by itself. Default: 0."""

  muon_beta: float
  """Decay of Muon's momentum average. Default: 0.95."""

  muon_consistent_rms: float | None
  """Update size to match Adam's, about 0.2; None scales by matrix shape instead. Default: None."""

  muon_weight_decay: float
  """Weight decay of matrices updated by Muon; 0 is none. Default: 0."""

  n_routing_groups: int
  """Groups the experts are divided into for routing; -1 is no groups. Default: -1."""

  n_window_for_audio: int
  """Half the spectrogram frames in one audio chunk. Not supported yet: models take text only for now. Default: 50."""

  n_window_infer_for_audio: int
  """Spectrogram frames in one audio attention window at inference. Not supported yet: models take text only for now.
  Default: 800."""

  nope_layer_interval: int
  """Every n-th layer goes without rotary positions; -1 is none. Default: -1."""

  norm_topk_prob: bool
  """True rescales the chosen experts' weights to sum to one. Default: False."""

  normalization_layer_epsilon: float
  """Added to the variance in norms. Default: 1e-05."""

  normalize_embedding_logits: bool
  """With a tied head, divide logits by sqrt(width). Default: True."""

  num_attention_heads_for_vit: int
  """Attention heads per vision encoder layer. Not supported yet: models take text only for now. Default: 16."""

  num_batches: int
  """RL training batches taken from the dataset. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: 4."""

  num_channels_for_vit: int
  """Color channels of input images. Not supported yet: models take text only for now. Default: 3."""

  num_conv_layers_for_audio: int
  """Convolutions that shorten the audio before the encoder layers. Not supported yet: models take text only for now.
  Default: 3."""

  num_epoch: int
  """Passes over the training data before it ends. Default: 1."""

  num_eval_passes: int
  """Responses sampled per question in evaluation. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 1."""

  num_experts: int
  """Routed experts per layer; 1 is a dense model. Default: 1."""

  num_experts_per_tok: int
  """Routed experts that each token goes to. Default: 1."""

  num_generations: int
  """Responses sampled per prompt, the group that GRPO compares. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 2."""

  num_hidden_layers_for_vit: int
  """Layers of the vision encoder. Not supported yet: models take text only for now. Default: 34."""

  num_iterations: int
  """Policy updates from each batch of rollouts. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: 1."""

  num_layers_per_pipeline_stage: int
  """Consecutive layers each stage runs before passing activations on. Default: 1."""

  num_mel_bins_for_audio: int
  """Mel frequency bands of the input spectrogram. Not supported yet: models take text only for now. Default: 128."""

  num_pipeline_microbatches: int
  """Parts the batch is split into; -1 takes the smallest that fills the stages. Default: -1."""

  num_pipeline_repeats: int
  """Passes of a microbatch around the stages; -1 derives it from layers and stages. Default: -1."""

  num_position_embeddings_for_vit: int
  """Rows of the vision encoder's learned position table. Not supported yet: models take text only for now. Default:
  1024."""

  num_samplers_slices: int
  """Slices that generate rollouts; -1 splits by sampler_devices_fraction. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: -1."""

  num_slices: int
  """Slices that the devices form; -1 takes what the hardware says. Default: -1."""

  num_test_batches: int
  """Batches used to evaluate the RL model. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo) and
  distill yet. Default: 5."""

  num_trainer_slices: int
  """Slices that train the policy; -1 splits by trainer_devices_fraction. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: -1."""

  num_vocab_tiling: int
  """Pieces in which logits are computed, to save memory. Default: 1."""

  off_policy_steps: int
  """Steps by which rollouts may lag the policy; 0 is on-policy. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 0."""

  offline_data_dir: str | None
  """Folder of saved teacher outputs, read instead of other data; None runs the teacher. Default: None."""

  olmo_apply_ngram_filter: bool
  """True leaves sequences with long repeated n-grams out of the loss. Default: True."""

  olmo_index_path: str
  """JSON index of the tokenized numpy files, built beforehand; needed for olmo_grain. Default: ''."""

  olmo_path_remap_from: str
  """Path prefix in the index to replace by olmo_path_remap_to; '' is no change. Default: ''."""

  olmo_path_remap_to: str
  """Path prefix put in place of olmo_path_remap_from, such as a local mount. Default: ''."""

  opt_type: OptimizerType | Literal["adamw", "adam_pax", "sgd", "muon"]
  """Optimizer. Default: 'adamw'."""

  optimize_mesh_for_tpu_v6e: bool
  """True orders devices in rings that suit the TPU v6e topology. Not supported yet: devices have the order that JAX
  chooses for their torus; allow_split_physical_axes=true gives it more freedom. Default: False."""

  optimizer_memory_host_offload: bool
  """True keeps the optimizer state in host memory between updates. Default: False."""

  original_max_position_embeddings: int
  """Length the model was first trained on. Default: 4096."""

  out_hidden_size_for_vit: int
  """Width of vision tokens after the patch merger. Not supported yet: models take text only for now. Default: 512."""

  out_proj: RematLocation | Literal["remat", "device", "offload"]
  """Attention output projection (custom). Default: 'remat'."""

  output_dim_for_audio: int
  """Width of audio tokens into the decoder. Not supported yet: models take text only for now. Default: 512."""

  override_logical_axis_rules: bool
  """True replaces the base logical axis rules with the given ones, not a merge. Default: False."""

  override_model_config: bool
  """Allow keys of the named model to be changed. Default: False."""

  packing: bool
  """True puts several documents in one sequence, each attending to itself only. Default: True."""

  padded_base_moe_mlp_dim: int | None
  """Expert hidden width after padding for the kernels; None is no padding. Not supported yet: the kernels fit their
  tiles to the experts' width without padding. Default: None."""

  pagedattn_head_dim_alignment: int
  """Multiple that the head width is padded to in the paged cache. Default: 128."""

  pagedattn_max_pages_per_group: int
  """Most pages for one sequence; -1 works it out from the longest length. Default: -1."""

  pagedattn_num_pages: int
  """Pages in the key-value cache. Default: 64."""

  pagedattn_pages_per_compute_block: int
  """Pages the kernel handles in one block. Default: 4."""

  pagedattn_tokens_per_page: int
  """Tokens held by one cache page. Default: 32."""

  param_scan_axis: int
  """Axis of stacked weights that runs over scanned layers. Default: 1."""

  parameter_memory_host_offload: bool
  """True keeps the weights in host memory and copies them in when needed. Default: False."""

  partial_rotary_factor: float
  """Share of each head's width with rotary position; 1 is all. Default: 1.0."""

  patch_size_for_vit: int
  """Side in pixels of one image patch. Not supported yet: models take text only for now. Default: 14."""

  penalty_incorrect_answer: float
  """Score, below 0, for a wrong answer. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo) and
  distill yet. Default: -1.0."""

  penalty_incorrect_format: float
  """Score, below 0, for each format tag missing or repeated. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: -0.5."""

  per_device_batch_size: int | float
  """Sequences per device; may be a fraction. Default: 12."""

  per_device_batch_size_increment: float
  """Sequences per device added at each ramp-up stage. Default: 2.0."""

  per_device_batch_size_start: float
  """Sequences per device at the start of the batch ramp-up. Default: 4.0."""

  pipeline_delay_activation_forwarding: bool
  """True sends activations one iteration late, to overlap transfer with compute. Default: False."""

  pipeline_fsdp_ag_once: bool
  """True gathers sharded weights once per step: less traffic, more memory. Default: False."""

  pipeline_fsdp_ag_per_repeat: bool
  """True gathers sharded weights once per pipeline repeat, ahead of use. Not supported yet: stages are at different
  repeats in the same iteration; weights are gathered in each, or once with pipeline_fsdp_ag_once=true. Default:
  False."""

  pipeline_parallel_layers: int
  """Layers that go in the pipeline, the rest run outside; -1 is all. Default: -1."""

  pixel_shuffle_ratio_for_vit: float
  """Scale of the patch grid's sides before projection; 0.5 quarters the tokens. Not supported yet: models take text
  only for now. Default: 0.5."""

  posemb_type_for_vit: str
  """Kind of position embedding in the vision encoder; 'learn' is trained. Not supported yet: models take text only
  for now. Default: 'learn'."""

  position_id_per_seconds: int
  """Time positions per second of video or audio (use_mrope). Not supported yet: models take text only for now.
  Default: 25."""

  precompute_ref_log_probs: bool
  """True computes the reference model's log-probabilities once, on disk; false keeps a copy in memory. Default:
  True."""

  prefill_cache_axis_order: str
  """Stored axis order of the prompt cache, over batch, sequence, heads, head width. Not supported yet: caches have
  one order of dimensions, and the compiler chooses their memory layout. Default: '1,2,0,3'."""

  prefill_cache_dir: str
  """Folder where prompt caches are saved and read; '' is none. Default: ''."""

  prefill_chunk_size: int
  """Tokens per piece of the prompt, with use_chunked_prefill. Default: 256."""

  prefill_slice: str
  """Accelerator slice type for prefill when the two phases are split. Not supported yet: prefill and decoding run in
  one server on one mesh: `maxtext serve`. Default: 'v5e-16'."""

  prefix_caching_dram_byte: int
  """Host memory for cached prompt beginnings, in bytes. Default: 100000000000."""

  prefix_caching_hbm_byte: int
  """Device memory for cached prompt beginnings, in bytes. Default: 10000000000."""

  prefuse_moe_weights: bool
  """True stores the experts' gate and up weights joined in advance. Not supported yet: the experts' gate and up
  projections are separate weights and separate matmuls. Default: False."""

  profile_cleanly: bool
  """True waits for the devices at both ends of the trace, so steps are whole. Default: True."""

  profile_periodically_period: int
  """Steps from one trace to the next; -1 traces once. Default: -1."""

  profile_power_events: bool
  """True records TPU power and firmware events, as set by the xprof_* keys. Not supported yet: metrics go to the
  console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  profiler: ProfilerType | Literal["", "xplane", "nsys"]
  """Trace tool: '' is none, 'xplane' is JAX's own, 'nsys' is NVIDIA Nsight. Not supported yet: only profiler=xplane
  is implemented yet. Default: ''."""

  profiler_steps: int
  """Steps in one trace. Default: 5."""

  projector_dropout_for_vit: float
  """Dropout rate in the vision projector; 0 is none. Not supported yet: models take text only for now. Default: 0.0."""

  projector_input_dim_for_vit: int
  """Width of the features into the vision projector. Not supported yet: models take text only for now. Default:
  4096."""

  projector_output_dim_for_vit: int
  """Width of the features out of the vision projector. Not supported yet: models take text only for now. Default:
  4096."""

  prometheus_port: int
  """Port of the Prometheus metrics server; 0 starts none. Default: 0."""

  prompt: str
  """Text that decoding continues. Default: 'I love to'."""

  pure_nnx: bool
  """True builds the model and train state in NNX throughout, without Linen. Default: False."""

  pure_nnx_decoder: bool
  """True builds the decoder in NNX with no Linen wrapper. Default: False."""

  q_lora_rank: int
  """Width of the compressed query; 0 is a direct projection. Default: 0."""

  qk_clip_threshold: float
  """Largest attention logit before use_qk_clip shrinks the weights. Default: 100.0."""

  qk_nope_head_dim: int
  """Query and key width per head without rotary position (MLA). Default: 128."""

  qk_norm_with_scale: bool
  """True gives query and key norms a learned scale. Default: True."""

  qk_rope_head_dim: int
  """Query and key width per head with rotary position (MLA). Default: 64."""

  qkv_proj: RematLocation | Literal["remat", "device", "offload"]
  """Query, key and value projections, all three at once (custom). Default: 'remat'."""

  quant_cfg_path: str
  """File of per-layer settings for mixed-precision quantization; '' is none. Default: ''."""

  quantization: QuantizationType | Literal[
    "", "int4", "int8", "intmp", "fp8", "nanoo_fp8", "fp8_nanoo", "fp8_gpu", "fp8_full", "te_fp8_delayedscaling",
    "te_fp8_currentscaling", "te_mxfp8", "te_nvfp4", "te_nvfp4_no_rht",
  ] | None
  """Format of quantized matmuls (int8, fp8...); empty is none. Not supported yet: it is of TransformerEngine or of
  one kind of GPU; int8, int4, intmp, fp8 and fp8_full run on every platform. Default: ''."""

  quantization_local_shard_count: int
  """Shards that each find their own scale range; -1 takes the slice count. Default: -1."""

  quantize_kvcache: bool
  """True stores the key-value cache as kv_quant_dtype. Default: False."""

  query_proj: RematLocation | Literal["remat", "device", "offload"]
  """Query projection (custom). Default: 'remat'."""

  query_wa_proj: RematLocation | Literal["remat", "device", "offload"]
  """Query down-projection of latent attention (custom). Default: 'remat'."""

  ragged_block_size: int
  """Most cache tokens per block in ragged attention. Default: 256."""

  ragged_buffer_factor: float
  """Token buffer over an even share per device; -1 sizes it for the worst case. Default: -1.0."""

  reasoning_end_token: str
  """Tag that closes the reasoning in a response. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: '</reasoning>'."""

  reasoning_start_token: str
  """Tag that opens the reasoning in a response. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: '<reasoning>'."""

  record_internal_nn_metrics: int
  """Statistics of inner activations among the metrics when above 0; 0 is none. Not supported yet: metrics go to the
  console, the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: 0."""

  reduce_scatter_gradients: bool
  """True sums gradients of layers over one part of a TPU's torus after the other, so that its compiler reduce-
  scatters them instead of summing them whole on every device. Default: False."""

  reference_log_probs_path: str
  """Folder of precomputed reference log-probabilities, which runs can share; '' is the run's own. Default: ''."""

  remat_policy: str
  """A policy's name; several, separated by commas, take turns over the layers. Default: 'full'."""

  remat_policy_for_vit: str
  """Remat policy of the vision encoder's layers. Not supported yet: no layer has this tensor yet. Default:
  'minimal'."""

  remove_size_one_mesh_axis_from_type: bool
  """True leaves mesh axes of size one out of JAX array types. Default: True."""

  replicate_quant_scale: bool
  """True copies quantization scales to all devices rather than sharding them. Default: False."""

  replicator_backup_interval_minutes: int
  """Minutes between the replicator's copies to the bucket; 0 is unset. Not supported yet: there is no replicator
  service here: enable_emergency_checkpoint=true keeps replicas on local disks by itself. Default: 0."""

  report_heartbeat_metric_for_gcp_monitoring: bool
  """True sends a regular sign of life to Google Cloud Monitoring. Not supported yet: metrics go to the console, the
  run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  report_performance_metric_for_gcp_monitoring: bool
  """True sends a performance metric to Google Cloud Monitoring. Not supported yet: metrics go to the console, the
  run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  reshape_q: bool
  """True reshapes the query to suit the cache layout in generation steps. Not supported yet: caches have one order
  of dimensions, and the compiler chooses their memory layout. Default: False."""

  reshard_chunk_size: int | None
  """Arrays moved at once from trainer to sampler; None moves all together. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: None."""

  return_log_prob: bool
  """True returns the log probability of each token with the output. Default: False."""

  reuse_example_batch: int
  """1 trains on the first batch over and over, for speed tests; 0 reads on. Default: 0."""

  reward_exact_answer: float
  """Reward for an answer equal to the reference. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 5.0."""

  reward_exact_format_match: float
  """Reward for a response that follows the format exactly. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 3.0."""

  reward_partial_format_match: float
  """Reward for each format tag that appears exactly once. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 0.5."""

  reward_ratio_guess_to_answer_high: float
  """Reward for a number close to the answer (about 10%). Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 0.5."""

  reward_ratio_guess_to_answer_low: float
  """Reward for a number fairly close to the answer (about 20%). Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 0.25."""

  reward_white_space_format_match: float
  """Reward for an answer right but for surrounding white space. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 1.5."""

  rl: RL | dict[str, Any]
  """Settings of reinforcement learning as one group. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet."""

  rollout_data_parallelism: int
  """Model copies among the sampler devices; -1 takes what the others leave. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: -1."""

  rollout_expert_parallelism: int
  """Sampler devices that split the experts; 1 is no split. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 1."""

  rollout_micro_batch_size: int
  """Prompts per generation call; -1 is the whole batch. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: -1."""

  rollout_tensor_parallelism: int
  """Sampler devices that split each layer; -1 takes what the others leave. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: -1."""

  rope_attention_scaling: bool
  """True multiplies rotated queries and keys by YaRN's attention factor. Default: False."""

  rope_factor: int
  """How many times longer positions are stretched. Default: 40."""

  rope_interleave: bool
  """True rotates neighbouring dimensions as pairs; false pairs the two halves. Default: True."""

  rope_linear_scaling_factor: float
  """Divisor of rotary frequencies for longer context; 1 is no change. Default: 1.0."""

  rope_max_timescale: int
  """Base of the rotary frequencies (theta). Default: 10000."""

  rope_min_timescale: int
  """Shortest rotary wavelength scale, in positions. Default: 1."""

  rope_theta_for_vit: int
  """Base of the rotary frequencies in the vision encoder. Not supported yet: models take text only for now. Default:
  10000."""

  rope_truncate: bool
  """True rounds the YaRN ramp's bounds to whole dimensions. Default: True."""

  rope_type: RopeType | Literal["default", "llama3.1", "yarn"]
  """Scaling of rotary frequencies. Default: 'default'."""

  rope_use_scale: bool
  """True applies the Llama 3.1 long-context frequency scaling. Default: True."""

  routed_bias: bool
  """True adds a per-expert bias to router scores when choosing experts. Default: False."""

  routed_bias_update_rate: float
  """Step size of routed_bias toward even load; 0 leaves it fixed. Default: 0.0."""

  routed_scaling_factor: float
  """Multiplier on the routed experts' weights. Default: 1.0."""

  routed_score_func: str
  """Router score function, e.g. sigmoid; '' is softmax. Default: ''."""

  run_name: str
  """Name of the run; empty: the recipe, file or model, and the time. Default: ''."""

  sa_block_kv: int
  """Key block held in memory, forward. Default: 512."""

  sa_block_kv_compute: int
  """Key block per matmul, forward. Default: 512."""

  sa_block_kv_dkv: int
  """Key block held in memory, gradient of keys and values. Default: 512."""

  sa_block_kv_dkv_compute: int
  """Key block per matmul, gradient of keys and values. Default: 512."""

  sa_block_kv_dq: int
  """Key block, gradient of queries. Default: 512."""

  sa_block_q: int
  """Query block, forward. Default: 512."""

  sa_block_q_dkv: int
  """Query block, gradient of keys and values. Default: 512."""

  sa_block_q_dq: int
  """Query block, gradient of queries. Default: 512."""

  sa_k_layout: str
  """Key memory layout: HEAD_DIM_MINOR or SEQ_MINOR. Default: 'HEAD_DIM_MINOR'."""

  sa_q_layout: str
  """Query memory layout: HEAD_DIM_MINOR or SEQ_MINOR. Default: 'HEAD_DIM_MINOR'."""

  sa_use_fused_bwd_kernel: bool
  """One kernel for the whole backward pass. Default: False."""

  sa_v_layout: str
  """Value memory layout: HEAD_DIM_MINOR or SEQ_MINOR. Default: 'HEAD_DIM_MINOR'."""

  sample_prompts: list[str] | tuple[str, ...]
  """Prompts that the model continues, or with use_sft answers, every eval_interval steps; [] is none. Default: []."""

  sampler_devices_fraction: float
  """Share of the devices that generate rollouts (0 to 1). Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: 0.5."""

  save_checkpoint_on_completion: bool
  """True saves a last checkpoint when training ends. Default: True."""

  save_config_to_gcs: bool
  """True writes the resolved configuration to the run's bucket folder. Default: False."""

  save_quantized_params_path: str
  """Where weights are written after quantization at load; '' is nowhere. Default: ''."""

  scale_embedding_for_audio: bool
  """True multiplies audio embeddings by the square root of the width. Not supported yet: models take text only for
  now. Default: True."""

  scan_layers: bool
  """Compile one layer and loop over it, instead of every layer. Default: True."""

  scan_layers_per_stage: bool
  """True runs the layers inside one stage as a scan. Not supported yet: a pipeline is one scan over its iterations,
  and its layers follow scan_layers and remat_policy; leave it out. Default: False."""

  scan_pipeline_iterations: bool
  """True runs pipeline iterations as a scan, which shortens compilation. Not supported yet: a pipeline is one scan
  over its iterations, and its layers follow scan_layers and remat_policy; leave it out. Default: True."""

  scan_pipeline_repeats: bool
  """True runs pipeline repeats as a scan over the repeats. Not supported yet: a pipeline is one scan over its
  iterations, and its layers follow scan_layers and remat_policy; leave it out. Default: True."""

  set_remat_policy_on_layers_per_stage: bool
  """True applies the remat policy around each layer inside a stage. Not supported yet: a pipeline is one scan over
  its iterations, and its layers follow scan_layers and remat_policy; leave it out. Default: False."""

  set_remat_policy_on_pipeline_iterations: bool
  """True applies the remat policy around each pipeline iteration. Not supported yet: a pipeline is one scan over its
  iterations, and its layers follow scan_layers and remat_policy; leave it out. Default: True."""

  sft_train_on_completion_only: bool
  """True counts the loss on completion tokens only, not on the prompt. Default: False."""

  shard_exp_on_fsdp: bool
  """True splits expert weights over FSDP by expert, not by width. Default: False."""

  shard_mode: ShardMode | Literal["auto", "explicit"]
  """Who places arrays: auto is the compiler, explicit is the program's types. Default: 'auto'."""

  shard_optimizer_over_data: bool
  """True splits optimizer state over the data axis (ZeRO-1). Default: False."""

  sharding_strategy: Literal["experimental"] | None
  """Alternative set of sharding rules; None is the standard one. Not supported yet: logical_axis_rules defines all
  shardings; write that. Default: None."""

  sharding_tolerance: float
  """Largest share of parameters that may stay whole on every device. Default: 0.02."""

  shardy: bool
  """True partitions with Shardy, false with GSPMD. Default: True."""

  share_kv_projections: bool
  """True uses one projection for both keys and values. Default: False."""

  shared_experts: int
  """Experts that every token passes through; 0 is none. Default: 0."""

  simpo_gamma: float
  """Margin of the simpo loss between chosen and rejected answer. Default: 0.5."""

  sinkhorn_iterations: int
  """Row and column normalizations that make the stream mixing doubly stochastic. Default: 20."""

  skip_first_n_steps_for_profiler: int
  """Steps before the trace starts, past compilation and warm-up. Default: 1."""

  skip_jax_distributed_system: bool
  """True leaves out JAX's multi-host start-up. Default: False."""

  skip_step_interval: int
  """Recent steps that give the mean and deviation for skip_step_on_spikes. Default: 128."""

  skip_step_on_spikes: bool
  """True drops updates whose loss or gradient norm is far above its recent mean. Default: False."""

  skip_step_scaling_factor: float
  """Standard deviations above the mean that count as a spike. Default: 6.0."""

  sliding_window_size: int
  """Window of local_sliding attention, in tokens. Default: 0."""

  solution_end_token: str
  """Tag that closes the final answer in a response. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: '</answer>'."""

  solution_start_token: str
  """Tag that opens the final answer in a response. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: '<answer>'."""

  source_checkpoint_layout: Literal["orbax", "safetensors"]
  """Format of the checkpoint that is read: orbax or safetensors. Default: 'orbax'."""

  sparse_matmul: bool
  """True multiplies only the routed tokens; false uses dense matmuls. Default: True."""

  spatial_merge_size_for_vit: int
  """Patches per side that are merged into one vision token. Not supported yet: models take text only for now.
  Default: 2."""

  stack_prefill_result_cache: bool
  """True stacks the layers' prompt caches in one array, for cheaper transfer. Not supported yet: caches have one
  order of dimensions, and the compiler chooses their memory layout. Default: False."""

  stack_trace_interval_seconds: int
  """Seconds between stack traces. Default: 600."""

  stack_trace_to_cloud: bool
  """True sends stack traces to cloud logging, false to the console. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  step_deviation_interval_seconds: int
  """Seconds between step-time deviation uploads. Not supported yet: metrics go to the console, the run's folder,
  metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: 30."""

  steps: int
  """Optimizer steps; -1 takes learning_rate_schedule_steps. Default: 150001."""

  stop_strings: list[str] | tuple[str, ...] | None
  """Texts that end a response when generated; None is only the end token. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: None."""

  student_overrides: dict[str, Any]
  """Keys of the student alone, which win over all others. Default: {}."""

  student_params_to_update: list[Any] | tuple[Any, ...] | None
  """Regular expressions of paths of the student's weights that train; None trains all. Default: None."""

  subslice_shape: str
  """Part of the slice to use, as sizes with commas (single controller); '' is all. Not supported yet: it needs
  Pathways, one process that controls all hosts; here every host runs its own process. Default: ''."""

  swap_space_vllm_gb: int
  """Host memory per device for swapped KV cache, in GB. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 2."""

  system_prompt: str
  """Text put before every prompt; '' is none. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: ''."""

  target_eval_loss: float
  """Evaluation loss at which training stops early; 0 is no target. Default: 0.0."""

  teacher_overrides: dict[str, Any]
  """Keys of the teacher alone: model_name, load_parameters_path. Empty: no teacher. Default: {}."""

  temperature_tuning: bool
  """True scales queries by position in layers without rotary position. Default: False."""

  temporal_patch_size_for_vit: int
  """Video frames in one patch. Not supported yet: models take text only for now. Default: 2."""

  test_batch_start_index: int
  """First test batch to evaluate, counted from 0. Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 0."""

  tile_size_for_vit: int
  """Side in pixels of the tiles that a large image is cut into. Not supported yet: models take text only for now.
  Default: 336."""

  tokenize_eval_data: bool
  """True tokenizes evaluation text on the fly; false expects token ids in the data. Default: True."""

  tokenize_train_data: bool
  """True tokenizes training text on the fly; false expects token ids in the data. Default: True."""

  tokenizer_path: str | None
  """File, folder or Hugging Face name of the vocabulary; prepared data needs none. Default: None."""

  tokenizer_type: TokenizerType | Literal["sentencepiece", "huggingface", "tiktoken"]
  """Library that reads tokenizer_path: sentencepiece, huggingface or tiktoken. Default: 'sentencepiece'."""

  topk_routing_group: int
  """Groups a token may choose experts from; -1 is no limit. Default: -1."""

  tpu_num_chips_to_profile_per_task: int
  """TPU chips traced per host process. Not supported yet: metrics go to the console, the run's folder, metrics_file,
  prometheus_port, TensorBoard and gcs_metrics. Default: 1."""

  tpu_num_sparse_core_tiles_to_trace: int
  """Tiles traced in each SparseCore. Not supported yet: metrics go to the console, the run's folder, metrics_file,
  prometheus_port, TensorBoard and gcs_metrics. Default: 1."""

  tpu_num_sparse_cores_to_trace: int
  """SparseCores traced per TPU chip. Not supported yet: metrics go to the console, the run's folder, metrics_file,
  prometheus_port, TensorBoard and gcs_metrics. Default: 2."""

  train_data_columns: list[str] | tuple[str, ...]
  """Data columns that hold the training text, in order. Default: ['text']."""

  train_fraction: float
  """Share of the batches for training, the rest for validation; 1 is all. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: 1.0."""

  train_image_column: str | list[str] | tuple[str, ...]
  """Data column or columns that hold the training images. Not supported yet: data is text, and every process reads
  the rows of its devices. Default: 'image'."""

  train_micro_batch_size: int
  """Examples per gradient computation; -1 is the whole batch. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: -1."""

  train_split: str
  """Split of the dataset that training reads. Default: 'train'."""

  trainable_parameters_mask: list[str] | tuple[str, ...]
  """Patterns of parameter names that train, the rest frozen; empty trains all. Default: []."""

  trainable_position_size: int
  """Rows of the learned position table; -1 is no table. Default: -1."""

  trainer_devices_fraction: float
  """Share of the devices that train the policy (0 to 1). Not supported yet: runs only pre-train, fine-tune (use_sft,
  use_dpo) and distill yet. Default: 0.5."""

  upload_all_profiler_results: bool
  """True saves traces from every host; false from the first only. Default: False."""

  use_2d_fsdp_sharding: bool
  """True splits expert weights on both widths, over fsdp and fsdp_transpose. Default: False."""

  use_agentic_rollout: bool
  """True generates rollouts asynchronously, by the agent loop. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: False."""

  use_audio: bool
  """True adds the audio encoder to the model and its inputs. Not supported yet: models take text only for now.
  Default: False."""

  use_audio_in_video: bool
  """True also reads the sound track of input videos. Not supported yet: models take text only for now. Default:
  False."""

  use_batch_split_schedule: bool
  """True splits the batch to overlap communication with computation. Not supported yet: tokens and expert weights
  are gathered whole, by XLA's own collectives. Default: False."""

  use_chat_template: bool
  """True wraps the prompt in the tokenizer's chat format before decoding. Default: False."""

  use_chunked_prefill: bool
  """True processes the prompt in pieces of prefill_chunk_size tokens. Default: False."""

  use_custom_sort_vjp: bool
  """True uses a hand-written gradient for sorting tokens by expert. Default: True."""

  use_dora: bool
  """True trains the magnitudes of adapted weights beside LoRA (DoRA). Default: False."""

  use_dpo: bool
  """True trains on preference pairs with the DPO loss. Default: False."""

  use_gather_mosaic_kernel: bool
  """True gathers tokens for the experts with a Mosaic kernel. Not supported yet: tokens and expert weights are
  gathered whole, by XLA's own collectives. Default: False."""

  use_grpo: bool | None
  """True trains with GRPO from sampled, rewarded completions; None is unset. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: None."""

  use_indexer: bool
  """True has a small scorer choose the tokens each query attends to. Default: False."""

  use_iota_embed: bool
  """True looks tokens up by a one-hot matmul instead of a gather. Default: False."""

  use_jax_splash: bool
  """True uses the plain JAX version of splash attention, with no kernel. Default: False."""

  use_manual_quantization: bool
  """True quantizes by hand-written code in the batch-split layers. Not supported yet: it belongs to
  use_batch_split_schedule. Default: False."""

  use_max_logit_estimate: int
  """Fixed guess of the largest logit, in place of a running one; -1 is none. It has no effect on JAX's own splash
  attention and grouped matmuls, which take the place of Tokamax's at the same blocks. Default: -1."""

  use_mrope: bool
  """True uses rotary positions in three axes: time, height and width. Not supported yet: models take text only for
  now. Default: False."""

  use_multimodal: bool
  """True adds the image (and video) encoder to the model and its inputs. Not supported yet: models take text only
  for now. Default: False."""

  use_pathways: bool
  """True runs RL under Pathways, one controller for all hosts. Not supported yet: runs only pre-train, fine-tune
  (use_sft, use_dpo) and distill yet. Default: True."""

  use_post_attn_norm: bool
  """True normalizes the attention output before the residual sum. Default: False."""

  use_post_ffw_norm: bool
  """True normalizes the feed-forward output before the residual sum. Default: False."""

  use_qk_clip: bool
  """True shrinks query and key weights when logits pass qk_clip_threshold. Default: False."""

  use_qk_norm: bool
  """True normalizes queries and keys in attention. Default: False."""

  use_qk_norm_in_gdn: bool
  """True applies L2 norm to queries and keys in linear attention. Default: True."""

  use_qwix_quantization: bool
  """Either value: one implementation does what Qwix and AQT do. Default: False."""

  use_ragged_attention: bool
  """True reads the cache in blocks when decoding, up to what is used of it, on any device. Default: False."""

  use_random_routing: bool
  """True sends tokens to random experts, for benchmarks and debugging. Default: False."""

  use_replicator_service: bool
  """True has a replicator service copy emergency checkpoints between nodes. Not supported yet: there is no
  replicator service here: enable_emergency_checkpoint=true keeps replicas on local disks by itself. Default: False."""

  use_ring_of_experts: bool
  """True gathers tokens on every expert shard and reduce-scatters the results; false sends each token only to its
  experts. Default: False."""

  use_rslora: bool
  """True divides lora_alpha by the root of the rank instead (rsLoRA). Default: False."""

  use_sft: bool
  """True does supervised fine-tuning on prompt and completion or chat data. Default: False."""

  use_splash_scheduler: bool
  """True turns on the experimental scheduler in the splash kernel (Tokamax). It has no effect on JAX's own splash
  attention and grouped matmuls, which take the place of Tokamax's at the same blocks. Default: False."""

  use_standalone_converter: bool
  """True turns trainer weights into vLLM's layout by a separate converter. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: False."""

  use_tokamax_gmm: bool
  """True runs the experts' grouped matmuls with Tokamax. It has no effect on JAX's own splash attention and grouped
  matmuls, which take the place of Tokamax's at the same blocks. Default: False."""

  use_tokamax_splash: bool
  """True uses Tokamax's splash attention kernel. It has no effect on JAX's own splash attention and grouped matmuls,
  which take the place of Tokamax's at the same blocks. Default: False."""

  use_truncation: bool
  """True cuts long documents at the target length; false splits them into chunks. Default: True."""

  use_tunix_gradient_accumulation: bool
  """True leaves gradient accumulation to the Tunix trainer. Not supported yet: accumulation is part of the train
  step; set gradient_accumulation_steps. Default: False."""

  use_untrainable_positional_embedding: bool
  """True adds fixed sinusoidal positions to the token embeddings. Default: False."""

  use_vertex_tensorboard: bool
  """True uploads TensorBoard events to Vertex AI. Not supported yet: metrics go to the console, the run's folder,
  metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  v_head_dim: int
  """Value width per head (MLA). Default: 128."""

  v_norm_with_scale: bool
  """True gives the value norm a learned scale. Default: True."""

  value_proj: RematLocation | Literal["remat", "device", "offload"]
  """Value projection (custom). Default: 'remat'."""

  vertex_tensorboard_project: str | None
  """Cloud project of the Vertex TensorBoard; '' is the gcloud default. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: ''."""

  vertex_tensorboard_region: str | None
  """Cloud region of the Vertex TensorBoard; needed to upload to it. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: ''."""

  video_path: str
  """Video file for decoding, several separated by commas; '' is none. Not supported yet: models take text only for
  now. Default: ''."""

  video_placeholder: str
  """Text that marks a video's place in the prompt. Not supported yet: models take text only for now. Default:
  '<|video|>'."""

  vision_output_dim_for_vit: int
  """Width of the vision encoder's output features. Not supported yet: models take text only for now. Default: 4096."""

  vision_output_length: int
  """Vision tokens per image; -1 leaves it to the model. Not supported yet: models take text only for now. Default:
  -1."""

  vllm_additional_config: dict[str, Any]
  """Extra options passed on to vLLM's backend. Not supported yet: runs only pre-train, fine-tune (use_sft, use_dpo)
  and distill yet. Default: {}."""

  vllm_hf_config_path: str
  """Folder of the Hugging Face configuration for vLLM; '' is the model's own. Not supported yet: runs only pre-
  train, fine-tune (use_sft, use_dpo) and distill yet. Default: ''."""

  vllm_hf_overrides: dict[str, Any]
  """Hugging Face configuration fields replaced when vLLM loads the model. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: {}."""

  vllm_load_format: str
  """How vLLM gets its first weights; 'dummy' is random, to be replaced. Not supported yet: runs only pre-train,
  fine-tune (use_sft, use_dpo) and distill yet. Default: 'dummy'."""

  vocab_size: int
  """Entries of the vocabulary. Default: 32000."""

  warmup_steps_fraction: float
  """Share of the schedule that rises. Default: 0.1."""

  weight_block_size: int
  """Inputs that share a scale of weight_format; 0 is the format's own, -1 all inputs. Default: 0."""

  weight_dtype: DType | Literal["bfloat16", "float32", "float16"]
  """Weights as they are stored. Default: 'float32'."""

  weight_format: Literal["", "int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"]
  """Few-bit format in which weights are stored: for inference, and below LoRA adapters (QLoRA). Without adapters,
  training rounds to it (QAT). '' stores weight_dtype. Default: ''."""

  weight_format_targets: list[str] | tuple[str, ...]
  """Patterns of paths of modules whose weights have weight_format, among linear layers, experts and head. The
  embedding has it where 'embedding' is one of them. Default: ['layers/']."""

  weight_quantization_calibration_method: str
  """How the range of weights is found, such as absmax, fixed or delayed. Default: 'absmax'."""

  weight_sparsity_m: int | None
  """Group size for weight_sparsity_n; None is dense. Default: None."""

  weight_sparsity_n: int | None
  """Weights kept of every weight_sparsity_m; None is dense. Default: None."""

  weight_sparsity_start_step: int
  """First step with sparse weights; dense before it. Default: 50."""

  weight_sparsity_update_step: int
  """Steps between updates of the sparsity mask. Default: 10."""

  wi_tile_dlhs_batch_seq: int
  """Expert input matmul, activation gradient: tile in tokens. Default: 512."""

  wi_tile_dlhs_embed_dim: int
  """Expert input matmul, activation gradient: tile in embedding width. Default: 1024."""

  wi_tile_dlhs_mlp_dim: int
  """Expert input matmul, activation gradient: tile in hidden width. Default: 1024."""

  wi_tile_drhs_batch_seq: int
  """Expert input matmul, weight gradient: tile in tokens. Default: 512."""

  wi_tile_drhs_embed_dim: int
  """Expert input matmul, weight gradient: tile in embedding width. Default: 1024."""

  wi_tile_drhs_mlp_dim: int
  """Expert input matmul, weight gradient: tile in hidden width. Default: 1024."""

  wi_tile_fwd_batch_seq: int
  """Expert input matmul, forward: tile in tokens. Default: 512."""

  wi_tile_fwd_embed_dim: int
  """Expert input matmul, forward: tile in embedding width. Default: 1024."""

  wi_tile_fwd_mlp_dim: int
  """Expert input matmul, forward: tile in hidden width. Default: 1024."""

  wo_tile_dlhs_batch_seq: int
  """Expert output matmul, activation gradient: tile in tokens. Default: 512."""

  wo_tile_dlhs_embed_dim: int
  """Expert output matmul, activation gradient: tile in embedding width. Default: 1024."""

  wo_tile_dlhs_mlp_dim: int
  """Expert output matmul, activation gradient: tile in hidden width. Default: 1024."""

  wo_tile_drhs_batch_seq: int
  """Expert output matmul, weight gradient: tile in tokens. Default: 512."""

  wo_tile_drhs_embed_dim: int
  """Expert output matmul, weight gradient: tile in embedding width. Default: 1024."""

  wo_tile_drhs_mlp_dim: int
  """Expert output matmul, weight gradient: tile in hidden width. Default: 1024."""

  wo_tile_fwd_batch_seq: int
  """Expert output matmul, forward: tile in tokens. Default: 512."""

  wo_tile_fwd_embed_dim: int
  """Expert output matmul, forward: tile in embedding width. Default: 1024."""

  wo_tile_fwd_mlp_dim: int
  """Expert output matmul, forward: tile in hidden width. Default: 1024."""

  wsd_decay_steps_fraction: float
  """Share of the schedule spent in the final decay of warmup-stable-decay, 0 to 1. Default: 0.1."""

  wsd_decay_style: WsdDecayStyle | Literal["linear", "cosine"]
  """Shape of the final decay of warmup-stable-decay: linear or cosine. Default: 'linear'."""

  xprof_e2e_enable_fw_power_level_event: bool
  """True records firmware power-level changes in the trace. Not supported yet: metrics go to the console, the run's
  folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  xprof_e2e_enable_fw_thermal_event: bool
  """True records firmware temperature events in the trace. Not supported yet: metrics go to the console, the run's
  folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  xprof_e2e_enable_fw_throttle_event: bool
  """True records firmware throttling events in the trace. Not supported yet: metrics go to the console, the run's
  folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: False."""

  xprof_tpu_power_trace_level: XProfTPUPowerTraceMode | Literal[0, 1, 2]
  """Detail of TPU power readings in the trace: none, normal or SPI. Not supported yet: metrics go to the console,
  the run's folder, metrics_file, prometheus_port, TensorBoard and gcs_metrics. Default: 0."""

  z_loss_multiplier: float
  """Weight of the squared log-partition in the loss. Default: 0.0."""
