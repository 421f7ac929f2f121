"""What is fed to the model."""

from typing import Literal

from pydantic import Field, field_serializer

from maxtext.configs.secrets import redact_value
from maxtext.configs.types.enums import DatasetType, TokenizerType
from maxtext.configs.types.section import Section


class Tokenizer(Section):
  """Text to tokens."""

  vocab_size: int = Field(32000, description="Entries of the vocabulary.")
  tokenizer_path: None | str = Field(
    None, description="File, folder or Hugging Face name of the vocabulary; prepared data needs none."
  )
  tokenizer_type: TokenizerType = Field(
    TokenizerType.SENTENCEPIECE,
    description="Library that reads tokenizer_path: sentencepiece, huggingface or tiktoken.",
  )
  use_chat_template: bool = Field(
    False, description="True wraps the prompt in the tokenizer's chat format before decoding."
  )
  chat_template_path: str = Field(
    "", description="File with a chat format that replaces the tokenizer's; '' keeps its own."
  )
  chat_template: str = Field("", description="Chat format as a Jinja string; '' keeps the tokenizer's own.")
  tokenize_train_data: bool = Field(
    True, description="True tokenizes training text on the fly; false expects token ids in the data."
  )
  tokenize_eval_data: bool = Field(
    True, description="True tokenizes evaluation text on the fly; false expects token ids in the data."
  )
  add_bos: bool = Field(True, description="True puts the beginning-of-sequence token before each document.")
  add_eos: bool = Field(True, description="True puts the end-of-sequence token after each document.")
  use_truncation: bool = Field(
    True, description="True cuts long documents at the target length; false splits them into chunks."
  )
  num_vocab_tiling: int = Field(1, description="Pieces in which logits are computed, to save memory.")


class DatasetGeneral(Section):
  """Source, size and packing of batches."""

  dataset_type: DatasetType = Field(DatasetType.TFDS, description="Source of the data.")
  per_device_batch_size: int | float = Field(12, description="Sequences per device; may be a fraction.")
  eval_per_device_batch_size: int | float = Field(
    0.0, description="Evaluation sequences per device; 0 takes per_device_batch_size."
  )
  max_corpus_chars: int = Field(10000000, description="Most characters of text read when a tokenizer is trained.")
  train_data_columns: list[str] = Field(["text"], description="Data columns that hold the training text, in order.")
  train_image_column: str | list[str] = Field(
    "image", description="Data column or columns that hold the training images."
  )
  image_slots_per_row: int = Field(
    -1,
    ge=-1,
    description="Images, tiles or, of any size, image tokens that a training row has room for; 0: text alone, -1: all.",
  )
  eval_data_columns: list[str] = Field(["text"], description="Data columns that hold the evaluation text, in order.")
  eval_image_column: str | list[str] = Field(
    "image", description="Data column or columns that hold the evaluation images."
  )
  packing: bool = Field(True, description="True puts several documents in one sequence, each attending to itself only.")
  grain_packing_type: Literal["first_fit", "best_fit", "concat_then_split"] = Field(
    "first_fit", description="How Grain packs documents: first_fit, best_fit or concat_then_split."
  )
  max_segments_per_seq: int = Field(-1, description="Most documents packed in one sequence; -1 is no limit.")
  num_epoch: int = Field(1, description="Passes over the training data before it ends.")
  expansion_factor_real_data: float = Field(
    -1.0, description="Hosts per host that reads data, the others feed placeholders; -1: all hosts read."
  )
  reuse_example_batch: int = Field(
    0, description="1 trains on the first batch over and over, for speed tests; 0 reads on."
  )
  generate_padding_batch_train: bool = Field(
    False, description="True feeds empty batches to hosts whose training data ran out before the others'."
  )
  generate_padding_batch_eval: bool = Field(
    False, description="True feeds empty batches to hosts whose evaluation data ran out first."
  )
  enable_rampup_batch_size: bool = Field(
    False, description="True starts with a small batch and grows it to per_device_batch_size."
  )
  per_device_batch_size_start: float = Field(4.0, description="Sequences per device at the start of the batch ramp-up.")
  per_device_batch_size_increment: float = Field(2.0, description="Sequences per device added at each ramp-up stage.")
  global_rampup_samples: int = Field(
    500, description="Sequences, over all devices, that the whole batch ramp-up lasts."
  )
  colocated_python_data_input: bool = Field(
    False, description="True reads data on the accelerator hosts under a single controller (Pathways)."
  )


class TfdsDataset(Section):
  """TensorFlow data sets."""

  dataset_path: str = Field(
    "", description="Folder or bucket with the prepared TFDS data; '' is the TFDS default place."
  )
  dataset_name: str = Field("c4/en:3.0.1", description="TFDS training dataset as name/config:version.")
  eval_dataset_name: str = Field("c4/en:3.0.1", description="TFDS evaluation dataset as name/config:version.")
  train_split: str = Field("train", description="Split of the dataset that training reads.")
  eval_split: str = Field("validation", description="Split of eval_dataset_name that evaluation reads.")


class HfDataset(Section):
  """Hugging Face data sets."""

  hf_path: str = Field(
    "", description="Hub dataset name, or a loader such as json or parquet to go with the file keys."
  )
  hf_name: None | str = Field(None, description="Subset (configuration) of the hub dataset; None is its default.")
  hf_data_dir: None | str = Field(None, description="Folder inside the hub dataset to read; None is the whole.")
  hf_train_files: None | str = Field(
    None, description="Training files, path or glob, for the loader in hf_path; None is the dataset's own."
  )
  hf_eval_split: None | str = Field(
    None, description="Split of the hub dataset that evaluation reads; None is no split chosen."
  )
  hf_eval_files: None | str = Field(
    None, description="Evaluation files, path or glob, for the loader in hf_path; None is the dataset's own."
  )
  hf_access_token: None | str = Field(
    None,
    repr=False,
    description="Hugging Face token for gated datasets and tokenizers; None takes HF_TOKEN or that of `hf auth login`.",
  )

  @field_serializer("hf_access_token", when_used="json")
  def _shown_token(self, value: None | str) -> None | str:
    """JSON is written to files; a copy in Python keeps it."""
    return redact_value("hf_access_token", value)


class GrainDataset(Section):
  """Grain."""

  grain_train_files: str = Field(
    "", description="Training file glob, or several with weights; '' leaves it to the mixture file."
  )
  grain_eval_files: str = Field(
    "", description="Evaluation file glob, or several with weights; '' is what prepared training data holds out."
  )
  grain_train_mixture_config_path: str = Field(
    "", description="JSON file that lists training sources and weights; '' uses grain_train_files."
  )
  grain_file_type: str = Field(
    "arrayrecord", description="Format of the Grain files: arrayrecord, tfrecord, jsonl or parquet."
  )
  grain_use_elastic_iterator: bool = Field(
    False, description="True lets a saved data position resume on a different number of hosts."
  )
  grain_worker_count: int = Field(
    1, description="Training reader processes per host; 0 reads in the main process, -1 tunes itself."
  )
  grain_per_worker_buffer_size: int = Field(1, description="Batches each training reader process keeps ready.")
  grain_worker_count_eval: int = Field(
    1, description="Evaluation reader processes per host; 0: in the main process, -1 tunes itself."
  )
  grain_per_worker_buffer_size_eval: int = Field(1, description="Batches each evaluation reader process keeps ready.")
  grain_ram_budget_mb: int = Field(1024, description="Memory in MB allowed when the reader process count tunes itself.")
  grain_num_threads: int = Field(16, description="Reading threads in each training reader process.")
  grain_prefetch_buffer_size: int = Field(500, description="Elements the training reading threads fetch ahead.")
  grain_num_threads_eval: int = Field(16, description="Reading threads in each evaluation reader process.")
  grain_prefetch_buffer_size_eval: int = Field(500, description="Elements the evaluation reading threads fetch ahead.")
  grain_data_source_max_workers: int = Field(
    16, description="Most threads that open the sources of a mixture in parallel."
  )
  grain_shuffle_buffer_size: int = Field(
    100, description="Elements in the shuffle window of formats read in order (tfrecord, parquet)."
  )


class OlmoGrainDataset(Section):
  """Token files of fixed length with an index."""

  olmo_index_path: str = Field(
    "", description="JSON index of the tokenized numpy files, built beforehand; needed for olmo_grain."
  )
  olmo_path_remap_from: str = Field(
    "", description="Path prefix in the index to replace by olmo_path_remap_to; '' is no change."
  )
  olmo_path_remap_to: str = Field(
    "", description="Path prefix put in place of olmo_path_remap_from, such as a local mount."
  )
  olmo_apply_ngram_filter: bool = Field(
    True, description="True leaves sequences with long repeated n-grams out of the loss."
  )
