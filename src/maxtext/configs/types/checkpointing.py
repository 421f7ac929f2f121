"""What is kept on disk, and what happens when machines are lost."""

from typing import Literal

from pydantic import Field

from maxtext.configs.types.section import Section


class Checkpointing(Section):
  """Saving and restoring."""

  load_parameters_path: str = Field("", description="Checkpoint of weights only to start from; '' is none.")
  lora_input_adapters_path: str = Field(
    "", description="Folder of LoRA adapters to load onto the base weights; '' is none."
  )
  load_full_state_path: str = Field(
    "", description="Checkpoint of weights, optimizer and step to start from; '' is none."
  )
  enable_checkpointing: bool = Field(True, description="True saves checkpoints and resumes from the run's latest.")
  load_checkpoint_only_once: bool = Field(
    False, description="True reads weights once and copies them to the other models (RL actor)."
  )
  async_checkpointing: bool = Field(
    True, description="True writes checkpoints in the background while training continues."
  )
  checkpoint_period: int = Field(10000, description="Steps between checkpoints.")
  max_num_checkpoints_to_keep: int | None = Field(None, description="Most recent checkpoints kept; None keeps all.")
  enable_single_replica_ckpt_restoring: bool = Field(
    False, description="True has one replica read the checkpoint and broadcast it to the rest."
  )
  checkpoint_todelete_subdir: str | None = Field(
    None, description="Subfolder old checkpoints are moved to; None deletes them at once."
  )
  checkpoint_todelete_full_path: str | None = Field(
    None, description="Full path old checkpoints are moved to; None deletes them at once."
  )
  force_unroll: bool = Field(
    False, description="True unstacks scanned layers, one entry each, in a weights-only checkpoint."
  )
  checkpoint_is_quantized: bool = Field(
    False, description="True reads load_parameters_path as already quantized weights."
  )
  save_quantized_params_path: str = Field(
    "", description="Where weights are written after quantization at load; '' is nowhere."
  )
  enable_orbax_v1: bool = Field(False, description="True uses Orbax's version 1 interface.")
  checkpoint_conversion_fn: None | str = Field(
    None, description="Function that maps a foreign checkpoint to this model's tree; None is no change."
  )
  source_checkpoint_layout: Literal["orbax", "safetensors"] = Field(
    "orbax", description="Format of the checkpoint that is read: orbax or safetensors."
  )
  save_checkpoint_on_completion: bool = Field(True, description="True saves a last checkpoint when training ends.")
  enable_continuous_checkpointing: bool = Field(
    False, description="True starts a new save as soon as the last one ends, not by period."
  )
  colocated_python_checkpointing: bool = Field(
    False, description="True saves and restores on the accelerator hosts (Pathways)."
  )
  enable_autocheckpoint: bool = Field(
    False, description="True saves a checkpoint on a preemption or maintenance notice."
  )


class OrbaxStorage(Section):
  """The form of files on disk."""

  checkpoint_storage_target_data_file_size_bytes: int = Field(
    2147483648, description="Size aimed at for each checkpoint data file, in bytes."
  )
  checkpoint_storage_use_ocdbt: bool = Field(True, description="True packs many arrays into few files (OCDBT).")
  checkpoint_storage_use_zarr3: bool = Field(
    True, description="True stores arrays as Zarr version 3, false as version 2."
  )
  checkpoint_storage_concurrent_gb: int = Field(
    96, description="Most data in flight while saving or restoring, in GB per host."
  )


class EmergencyCheckpointing(Section):
  """Frequent saves to local disks beside slower persistent ones."""

  enable_multi_tier_checkpointing: bool = Field(
    False, description="True saves to node-local storage, then to peers and a bucket."
  )
  local_checkpoint_directory: str = Field(
    "", description="Node-local folder for emergency or multi-tier checkpoints; '' is unset."
  )
  local_checkpoint_period: int = Field(0, ge=0, description="Steps between local checkpoints; 0 is unset.")
  multi_tier_checkpointing_backup_interval_minutes: int = Field(
    0, ge=0, description="Minutes between multi-tier copies to the bucket; 0 is unset."
  )
  mtc_data_parallelism: int = Field(
    0, description="Identical replicas for multi-tier checkpoints; 0 takes the slice count."
  )
  enable_emergency_checkpoint: bool = Field(
    False, description="True also saves often to local storage, to recover from a lost slice."
  )
  use_replicator_service: bool = Field(
    False, description="True has a replicator service copy emergency checkpoints between nodes."
  )
  replicator_backup_interval_minutes: int = Field(
    0, ge=0, description="Minutes between the replicator's copies to the bucket; 0 is unset."
  )


class ElasticTraining(Section):
  """Going on with fewer hosts, under `maxtext launch`. A host counts as a slice."""

  elastic_enabled: bool = Field(False, description="True lets training go on after hosts are lost, and come back.")
  elastic_timeout_seconds: int = Field(300, ge=1, description="Seconds to wait for enough hosts before giving up.")
  elastic_max_retries: int = Field(
    10, ge=0, description="Most restarts in a row, without a later saved step between them, before the run fails."
  )
  elastic_min_slice_count: int = Field(-1, ge=-1, description="Fewest live hosts to train on; -1 needs all of them.")
