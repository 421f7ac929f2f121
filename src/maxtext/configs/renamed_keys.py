"""Keys of older versions of the specification, and what to write instead."""

from collections.abc import Iterable

from maxtext.configs.errors import did_you_mean


def renamed_hint(key: str, known: Iterable[str]) -> str:
  """What to write instead of an unknown key, as the end of a sentence; empty if nothing is known."""
  return f" It is a key of older versions: {RENAMED_KEYS[key]}." if key in RENAMED_KEYS else did_you_mean(key, known)


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
