"""What data and tokenizers need of a run's configuration. This module alone reads its keys for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import DatasetType, TokenizerType
from maxtext.data.conversation_media import MediaOptions, TowerRoom
from maxtext.data.media import AUDIO, TOWERS, VISION
from maxtext.data.splits import Split, SplitName
from maxtext.media.positions import RotaryAxes
from maxtext.media.processed import MediaProcessor, SlotShape
from maxtext.media.video import Videos, VideosWithSound


@dataclass(frozen=True)
class TokenizerOptions:
  """Which tokenizer, and what it adds to a text.

  Attributes:
    path: of a vocabulary, or its name on Hugging Face; None where none is named.
    kind: what the vocabulary is.
    vocab_size: of the model, which must have an embedding for each token.
    add_bos: a document begins with the token for that.
    add_eos: a document ends with the token for that.
    chat_template: as a Jinja text; empty takes the file's, or the tokenizer's own.
    chat_template_path: a file of one.
    access_token: for Hugging Face.
    training_characters: of text, at most, that a tokenizer is trained on.
  """

  path: str | None
  kind: TokenizerType
  vocab_size: int
  add_bos: bool
  add_eos: bool
  chat_template: str
  chat_template_path: str
  access_token: str | None = field(repr=False)
  training_characters: int


@dataclass(frozen=True)
class HubOptions:
  """A data set that the `datasets` library reads: its name or form, its subset and folder, and who reads it."""

  path: str
  name: str | None
  data_dir: str | None
  access_token: str | None = field(repr=False)


@dataclass(frozen=True)
class OlmoOptions:
  """An index of token files, how the folders in it have moved, and whether repetitive sequences are left out."""

  index_path: str
  remap_from: str
  remap_to: str
  ngram_filter: bool


@dataclass(frozen=True)
class ConversationOptions:
  """How rows become conversations for supervised fine-tuning, or pairs of them for preference optimization.

  Attributes:
    completion_only: only answers count in the loss.
    chat: texts of prompt and completion are turns of the chat template.
    formatting_func: import path of a function that turns a row into messages, or prompt and completion; '' is none.
    formatting_kwargs: its other arguments.
    method: the key that chose this, for messages.
    pairs: a row has a chosen and a rejected answer.
    labelled: instead of pairs, a row has one answer and a label, whether it is desirable.
    reference_log_probs: the file of the reference model's log-probabilities and the digest of that model; None where
      the data does not bring them.
    media: how media in them train; None where there are none.
  """

  completion_only: bool
  chat: bool
  formatting_func: str
  formatting_kwargs: Mapping[str, Any]
  method: str = "use_sft"
  pairs: bool = False
  labelled: bool = False
  reference_log_probs: tuple[str, str] | None = None
  media: MediaOptions | None = None


@dataclass(frozen=True)
class RampupOptions:
  """A batch that grows: rows per device at first, what each stage adds, and at last; and samples until then."""

  start: float
  increment: float
  last: float
  samples: int


@dataclass(frozen=True)
class DataOptions:
  """What a run is fed with.

  Attributes:
    kind: where documents come from.
    train: what is read, and how, for training.
    evaluation: the same for evaluation.
    tokenizer: of text.
    truncate: text is cut after a row's tokens.
    vocab_size: tokens must be below it.
    length: of a row.
    seed: of the order of documents.
    pack: rows hold several documents.
    packing_kind: how they are chosen.
    max_segments: documents in a row, at most; -1 is no limit.
    accumulation: micro-batches of a batch.
    rampup: how the batch grows at first; None where it does not.
    reuse_batch: every batch is the first one.
    shuffle_buffer: documents that are shuffled together where data is best read in order.
    open_threads: sources that are opened at a time.
    worker_megabytes: for reader processes, where their number is left open.
    file_type: of globs of files.
    hub: of `hf`.
    tfds_folder: of `tfds`; empty is its own.
    olmo: of `olmo_grain`.
    conversations: of fine-tuning; None where rows are documents.
  """

  kind: DatasetType
  train: Split
  evaluation: Split
  tokenizer: TokenizerOptions
  truncate: bool
  vocab_size: int
  length: int
  seed: int
  pack: bool
  packing_kind: Literal["first_fit", "best_fit", "concat_then_split"]
  max_segments: int
  accumulation: int
  rampup: RampupOptions | None
  reuse_batch: bool
  shuffle_buffer: int
  open_threads: int
  worker_megabytes: int
  file_type: str
  hub: HubOptions
  tfds_folder: str
  olmo: OlmoOptions
  conversations: ConversationOptions | None = None

  @property
  def has_documents(self) -> bool:
    """Whether the data is text, or was; synthetic data is random tokens."""
    return self.kind != DatasetType.SYNTHETIC

  @property
  def media(self) -> MediaOptions | None:
    """How media train; None where rows have none."""
    return None if self.conversations is None else self.conversations.media

  def split(self, name: SplitName) -> Split:
    """Of training or of evaluation."""
    return self.train if name == "train" else self.evaluation


def tokenizer_options(config: MaxTextConfig) -> TokenizerOptions:
  """From a run's keys."""
  return TokenizerOptions(
    path=config.tokenizer_path,
    kind=config.tokenizer_type,
    vocab_size=config.vocab_size,
    add_bos=config.add_bos,
    add_eos=config.add_eos,
    chat_template=config.chat_template,
    chat_template_path=config.chat_template_path,
    access_token=config.hf_access_token,
    training_characters=config.max_corpus_chars,
  )


def data_options(config: MaxTextConfig) -> DataOptions:
  """From a run's keys."""
  c = config
  rampup = RampupOptions(
    c.per_device_batch_size_start, c.per_device_batch_size_increment, c.per_device_batch_size, c.global_rampup_samples
  )
  conversations = ConversationOptions(
    completion_only=c.sft_train_on_completion_only or c.use_dpo,
    chat=c.use_chat_template,
    formatting_func=c.formatting_func_path,
    formatting_kwargs=c.formatting_func_kwargs,
    method="use_dpo" if c.use_dpo else "use_sft",
    pairs=c.use_dpo,
    labelled=c.use_dpo and "kto" in c.dpo_loss_type,
    media=media_options(c),
  )
  return DataOptions(
    kind=c.dataset_type,
    train=_train(c),
    evaluation=_evaluation(c),
    tokenizer=tokenizer_options(c),
    truncate=c.use_truncation,
    vocab_size=c.vocab_size,
    length=c.max_target_length,
    seed=c.data_shuffle_seed,
    pack=c.packing,
    packing_kind=c.grain_packing_type,
    max_segments=c.max_segments_per_seq,
    accumulation=c.gradient_accumulation_steps,
    rampup=rampup if c.enable_rampup_batch_size else None,
    reuse_batch=bool(c.reuse_example_batch),
    shuffle_buffer=c.grain_shuffle_buffer_size,
    open_threads=c.grain_data_source_max_workers,
    worker_megabytes=c.grain_ram_budget_mb,
    file_type=c.grain_file_type,
    hub=HubOptions(c.hf_path, c.hf_name, c.hf_data_dir, c.hf_access_token),
    tfds_folder=c.dataset_path,
    olmo=OlmoOptions(c.olmo_index_path, c.olmo_path_remap_from, c.olmo_path_remap_to, c.olmo_apply_ngram_filter),
    conversations=conversations if c.use_sft or c.use_dpo else None,
  )


def media_options(config: MaxTextConfig) -> MediaOptions | None:
  """How media of conversations train; None where they have none.

  Raises:
    ConfigError: a key does not go with media, or leaves no room for them.
  """
  c = config
  talks = (c.use_sft or c.use_dpo or c.use_grpo) and c.dataset_type != DatasetType.SYNTHETIC
  if not (c.use_multimodal or c.use_audio) or not talks or not c.image_slots_per_row:
    return None
  for key, wrong, what in (
    ("offline_data_dir", True, "what is saved of another model"),
    ("precompute_ref_log_probs", c.use_dpo, "what is saved of another model"),
    ("rl_environment", c.use_grpo, "a conversation with an environment"),
    ("sampler_address", c.use_grpo, "what is sent to another process"),
    ("use_audio_in_video", c.use_multimodal and c.use_audio, "the sound track of a video is not trained on, and this"),
  ):
    if wrong and getattr(c, key):
      raise ConfigError(
        f"{key}={getattr(c, key)}: {what} is for text: leave it out or set it to false, or write image_slots_per_row=0 "
        f"to train on text alone."
      )
  from maxtext.models.build import media_processors  # with JAX, which reader processes of data do without

  processors = {kind: processor for kind, processor in media_processors(c).items() if kind == "image" or not c.use_grpo}
  shapes = {TOWERS[kind]: processor.slot for kind, processor in processors.items()}
  length = c.max_prefill_predict_length if c.use_grpo else c.max_target_length
  rooms = {tower: TowerRoom(shape, _slots(c, tower, shape, length)) for tower, shape in shapes.items()}
  placeholders = {"image": c.image_placeholder, "video": c.video_placeholder, "audio": c.audio_placeholder}
  return MediaOptions(processors, placeholders, rooms, c.max_num_images_per_example, rotary_axes(c, processors))


def _slots(c: MaxTextConfig, tower: str, shape: SlotShape, length: int) -> int:
  """Slots of a tower that a row of so many tokens has."""
  fitting, most = length // shape.features, c.max_num_images_per_example if tower == VISION else -1
  if not fitting or not most:
    room = "max_prefill_predict_length" if c.use_grpo else "max_target_length"
    key, least = ("max_num_images_per_example", 1) if fitting else (room, shape.features + 1)
    raise ConfigError(
      f"{key}={getattr(c, key)} leaves no room for {_MEDIA[tower]}: write at least {least}, or image_slots_per_row=0 "
      f"to train on text alone."
    )
  one = c.use_grpo or not c.packing  # conversation in a row
  wanted = shape.most * most if most > 0 and one else fitting
  return min(wanted if tower == AUDIO or c.image_slots_per_row < 0 else c.image_slots_per_row, fitting)


_MEDIA = {VISION: "an image", AUDIO: "a sound"}


def rotary_axes(config: MaxTextConfig, processors: Mapping[str, MediaProcessor]) -> RotaryAxes | None:
  """The axes of media in positions; None without mRoPE."""
  if not (config.use_multimodal and config.use_mrope):
    return None
  videos = processors.get("video")
  videos = videos.videos if isinstance(videos, VideosWithSound) else videos
  interval = round(config.position_id_per_seconds * videos.seconds) if isinstance(videos, Videos) else 1
  return RotaryAxes(config.spatial_merge_size_for_vit, interval)


def _listed(columns: str | Sequence[str]) -> Sequence[str]:
  return [columns] if isinstance(columns, str) else columns


def _train(config: MaxTextConfig) -> Split:
  return Split(
    name="train",
    columns=config.train_data_columns,
    image_columns=_listed(config.train_image_column),
    tokenize=config.tokenize_train_data,
    epochs=config.num_epoch,
    shuffle=config.enable_data_shuffling,
    rows_per_device=config.per_device_batch_size,
    pad=config.generate_padding_batch_train,
    workers=config.grain_worker_count,
    buffer=config.grain_per_worker_buffer_size,
    threads=config.grain_num_threads,
    read_ahead=config.grain_prefetch_buffer_size,
    grain_files=("grain_train_files", config.grain_train_files),
    mixture=config.grain_train_mixture_config_path,
    held_out=False,
    hf_files=config.hf_train_files,
    hf_split=config.train_split,
    tfds_name=config.dataset_name,
    tfds_split=config.train_split,
  )


def _evaluation(config: MaxTextConfig) -> Split:
  """Evaluation goes once through the data, as it stands. Without files of its own, that is what the prepared corpora of
  training hold out: all of it, so the last batch is padded."""
  held_out = config.dataset_type == DatasetType.GRAIN and not config.grain_eval_files
  return Split(
    name="eval",
    columns=config.eval_data_columns,
    image_columns=_listed(config.eval_image_column),
    tokenize=config.tokenize_eval_data,
    epochs=1,
    shuffle=False,
    rows_per_device=config.eval_per_device_batch_size,
    pad=config.generate_padding_batch_eval or held_out,
    workers=config.grain_worker_count_eval,
    buffer=config.grain_per_worker_buffer_size_eval,
    threads=config.grain_num_threads_eval,
    read_ahead=config.grain_prefetch_buffer_size_eval,
    grain_files=(
      ("grain_train_files", config.grain_train_files) if held_out else ("grain_eval_files", config.grain_eval_files)
    ),
    mixture=config.grain_train_mixture_config_path if held_out else "",
    held_out=held_out,
    hf_files=config.hf_eval_files,
    hf_split=config.hf_eval_split,
    tfds_name=config.eval_dataset_name,
    tfds_split=config.eval_split,
  )
