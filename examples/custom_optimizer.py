"""An optimizer of your own: any Optax gradient transformation.

python examples/custom_optimizer.py
"""

import optax

import maxtext

config = maxtext.load_config(
  run_name="lion",
  base_emb_dim=32,
  base_mlp_dim=64,
  base_num_decoder_layers=1,
  base_num_query_heads=2,
  base_num_kv_heads=2,
  head_dim=16,
  vocab_size=64,
  max_target_length=32,
  per_device_batch_size=4,
  dataset_type="synthetic",
  dtype="float32",
  gradient_clipping_threshold=1.0,  # before the optimizer; 0 leaves clipping to it
  steps=40,
  log_period=20,
)

# It replaces opt_type, learning_rate and everything else of the configured optimizer. Parameters are a flat dict
# {path: array}, so masks go by path. The state of a parameter is sharded like the parameter, and is in checkpoints: a
# run resumes with an optimizer of the same state.
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=5, decay_steps=config.steps)
optimizer = optax.chain(
  optax.lion(schedule, weight_decay=0.1, mask=lambda params: {path: "norm" not in path for path in params}),
)
maxtext.train(config, optimizer=optimizer)
