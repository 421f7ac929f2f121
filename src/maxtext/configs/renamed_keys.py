"""Keys that people know from older versions and from other frameworks, and what to write instead."""

from collections.abc import Iterable

from maxtext.configs.errors import did_you_mean


def renamed_hint(key: str, known: Iterable[str]) -> str:
  """What to write instead of an unknown key, as the end of a sentence; empty if nothing is known."""
  if key in RENAMED_KEYS:
    return f" It is a key of older versions: {RENAMED_KEYS[key]}."
  if key in FOREIGN_KEYS:
    return f" Here it is {FOREIGN_KEYS[key]}."
  return did_you_mean(key, known)


RENAMED_KEYS = {
  "activations_dtype": "write dtype",
  "base_num_heads": "write base_num_query_heads and base_num_kv_heads",
  "enable_flash_attention": "write attention=flash",
  "enable_profiler": "write profiler=xplane",
  "fsdp_shard_on_exp": "write shard_exp_on_fsdp",
  "global_batch_size": "write per_device_batch_size; times the devices and gradient_accumulation_steps it is the batch",
  "int8_training": "write quantization=int8",
  "load_full_state_from_path": "write load_full_state_path",
  "load_parameters_from_path": "write load_parameters_path",
  "num_heads": "write base_num_query_heads and base_num_kv_heads",
  "num_layers": "write base_num_decoder_layers",
  "scale": "write global_parameter_scale",
  "tile_batch_seq": "write wi_tile_fwd_batch_seq and its siblings",
  "tile_embed_dim": "write wi_tile_fwd_embed_dim and its siblings",
  "tile_mlp_dim": "write wi_tile_fwd_mlp_dim and its siblings",
  "use_pjrt": "leave it out: JAX has no other runtime any more",
  "weights_dtype": "write weight_dtype",
}

_SIZE_OF_BATCH = "per_device_batch_size, which counts sequences per device"
_LENGTH = "max_target_length"
_DEPTH = "base_num_decoder_layers"
_WIDTH = "base_emb_dim"
_MLP = "base_mlp_dim"
_HEADS = "base_num_query_heads"
_KV_HEADS = "base_num_kv_heads"
_STEPS = "steps"
_CLIP = "gradient_clipping_threshold"
_WARMUP = "warmup_steps_fraction, the share of learning_rate_schedule_steps"
_SEED = "init_weights_seed for parameters and data_shuffle_seed for the data"

# Of Hugging Face's Trainer and config.json, torchtitan, Megatron-LM, nanoGPT and vLLM.
FOREIGN_KEYS = {
  "adam_beta1": "adam_b1",
  "adam_beta2": "adam_b2",
  "adam_epsilon": "adam_eps",
  "beta1": "adam_b1",
  "beta2": "adam_b2",
  "bf16": "dtype=bfloat16, and weight_dtype for parameters",
  "block_size": _LENGTH,
  "context_length": _LENGTH,
  "d_ff": _MLP,
  "d_model": _WIDTH,
  "data_parallel_size": "ici_data_parallelism, or ici_fsdp_parallelism to shard parameters too",
  "epochs": "num_epoch",
  "expert_parallel_size": "ici_expert_parallelism",
  "ffn_hidden_size": _MLP,
  "fp16": "dtype=float16, and weight_dtype for parameters",
  "grad_accum_steps": "gradient_accumulation_steps",
  "grad_clip": _CLIP,
  "gradient_checkpointing": "remat_policy",
  "hidden_size": _WIDTH,
  "intermediate_size": _MLP,
  "logging_steps": "log_period",
  "lr": "learning_rate",
  "lr_scheduler_type": "lr_schedule_type",
  "max_grad_norm": _CLIP,
  "max_iters": _STEPS,
  "max_length": _LENGTH,
  "max_model_len": _LENGTH,
  "max_seq_len": _LENGTH,
  "max_seq_length": _LENGTH,
  "max_steps": _STEPS,
  "micro_batch_size": _SIZE_OF_BATCH,
  "model": "the first argument, or model_name",
  "n_embd": _WIDTH,
  "n_head": _HEADS,
  "n_heads": _HEADS,
  "n_kv_heads": _KV_HEADS,
  "n_layer": _DEPTH,
  "n_layers": _DEPTH,
  "num_attention_heads": _HEADS,
  "num_epochs": "num_epoch",
  "num_hidden_layers": _DEPTH,
  "num_key_value_heads": _KV_HEADS,
  "num_train_epochs": "num_epoch",
  "optim": "opt_type",
  "optimizer": "opt_type",
  "output_dir": "base_output_directory",
  "per_device_eval_batch_size": "eval_per_device_batch_size",
  "per_device_train_batch_size": _SIZE_OF_BATCH,
  "pipeline_parallel_size": "ici_pipeline_parallelism",
  "resume_from_checkpoint": "run_name: a run of the same name resumes; load_full_state_path takes another run's state",
  "rms_norm_eps": "normalization_layer_epsilon",
  "rope_theta": "rope_max_timescale",
  "save_steps": "checkpoint_period",
  "save_total_limit": "max_num_checkpoints_to_keep",
  "seed": _SEED,
  "seq_len": _LENGTH,
  "seq_length": _LENGTH,
  "sliding_window": "sliding_window_size",
  "tensor_model_parallel_size": "ici_tensor_parallelism",
  "tensor_parallel_size": "ici_tensor_parallelism",
  "tie_word_embeddings": "logits_via_embedding",
  "tokenizer": "tokenizer_path, with tokenizer_type",
  "total_steps": _STEPS,
  "train_batch_size": _SIZE_OF_BATCH,
  "train_iters": _STEPS,
  "use_flash_attention": "attention=flash",
  "warmup_iters": _WARMUP,
  "warmup_ratio": _WARMUP,
  "warmup_steps": _WARMUP,
  "weight_decay": "adam_weight_decay",
}
