"""What follows from other keys and the devices."""

from pydantic import Field

from maxtext.configs.types.section import Section


class DerivedValues(Section):
  """Computed when a run starts; never set."""

  emb_dim: None | int = Field(None, description="Model width, from base_emb_dim and global_parameter_scale.")
  mlp_dim: None | int = Field(None, description="Feed-forward width, from base_mlp_dim and global_parameter_scale.")
  moe_mlp_dim: None | int = Field(
    None, description="Expert feed-forward width, from base_moe_mlp_dim and global_parameter_scale."
  )
  num_decoder_layers: None | int = Field(
    None, description="Layers, from base_num_decoder_layers and global_parameter_scale."
  )
  num_kv_heads: None | int = Field(
    None, description="Key and value heads, from base_num_kv_heads and global_parameter_scale."
  )
  num_query_heads: None | int = Field(
    None, description="Query heads, from base_num_query_heads and global_parameter_scale."
  )
  num_diloco_replicas: None | int = Field(
    None, description="DiLoCo copies, the product of the ici and dcn diloco parallelism."
  )
  ici_parallelism: None | list[int] = Field(
    None, description="Mesh sizes within a slice, the ici_*_parallelism keys in axis order."
  )
  dcn_parallelism: None | list[int] = Field(
    None, description="Mesh sizes across slices, the dcn_*_parallelism keys in axis order."
  )
  using_pipeline_parallelism: None | bool = Field(
    None, description="True when ici times dcn pipeline parallelism is above 1."
  )
  context_parallel_size: None | int = Field(
    None, description="Sequence shards, the product of ici and dcn context parallelism."
  )
  num_target_devices: None | int = Field(
    None, description="Devices in the mesh, from compile_topology or those attached."
  )
  global_batch_size_to_train_on: None | int = Field(
    None, description="Sequences per step, from the per-device batch, devices and accumulation."
  )
  global_batch_size_to_eval_on: None | int = Field(
    None, description="Sequences per eval step, from eval_per_device_batch_size and devices."
  )
  global_batch_size_to_load: None | int = Field(
    None, description="Sequences to load per step, from the train batch and real-data expansion."
  )
  global_batch_size_to_load_eval: None | int = Field(
    None, description="Sequences to load per eval step, from its batch and expansion."
  )
  micro_batch_size_to_train_on: None | int = Field(
    None, description="Global train batch divided by gradient_accumulation_steps."
  )
  micro_batch_size_to_eval_on: None | int = Field(
    None, description="Sequences per eval forward pass, from the eval per-device batch."
  )
  checkpoint_dir: None | str = Field(None, description="Checkpoint folder, from base_output_directory and run_name.")
  convert_checkpoint_if_possible: bool = Field(
    False, description="True converts a Hugging Face checkpoint when none of our own is found."
  )
  metrics_dir: None | str = Field(None, description="Metrics folder, from base_output_directory and run_name.")
  tensorboard_dir: None | str = Field(None, description="TensorBoard folder, from base_output_directory and run_name.")
  managed_mldiagnostics_dir: None | str = Field(
    None, description="ML Diagnostics folder, from base_output_directory and run_name."
  )
  rampup_end_step: None | int = Field(
    None, description="Step at which the batch is full size, from the batch ramp-up keys."
  )
  tensors_on_device: None | list[str] = Field(
    None, description="Activations saved in device memory, from remat keys set to 'device'."
  )
  tensors_to_offload: None | list[str] = Field(
    None, description="Activations moved to host memory, from remat keys set to 'offload'."
  )
  global_batch_size_to_load_start: None | int = Field(
    None, description="Sequences loaded at ramp-up start, from per_device_batch_size_start."
  )
  global_batch_size_to_load_increment: None | int = Field(
    None, description="Sequences added per ramp-up stage, from per_device_batch_size_increment."
  )
  rampup_samples_per_increment_to_load: None | float = Field(
    None, description="Samples per ramp-up stage: global_rampup_samples over the stages."
  )
