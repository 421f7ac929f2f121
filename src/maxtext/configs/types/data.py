"""What is fed to the model."""

from pydantic import Field

from maxtext.configs.types.enums import DatasetType
from maxtext.configs.types.section import Section


class Tokenizer(Section):
  """Vocabulary."""

  vocab_size: int = Field(32000, description="Entries of the vocabulary.")
  num_vocab_tiling: int = Field(1, description="Pieces in which logits are computed, to save memory.")


class DatasetGeneral(Section):
  """Source and size of batches."""

  dataset_type: DatasetType = Field(DatasetType.TFDS, description="Source of the data.")
  per_device_batch_size: int | float = Field(12, description="Sequences per device; may be a fraction.")


class InferenceGeneral(Section):
  """Lengths."""

  max_target_length: int = Field(2048, description="Length of a sequence, in tokens.")
