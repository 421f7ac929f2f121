"""The keys that training data and evaluation data each have their own of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from maxtext.configs import MaxTextConfig

Name = Literal["train", "eval"]


@dataclass(frozen=True)
class Split:
  """What is read, and how, for training or for evaluation.

  Attributes:
    name: which of the two.
    columns: of the data that hold text or tokens, in order.
    tokenize: whether they hold text.
    epochs: passes over the data.
    shuffle: whether each pass has an order of its own.
    pad: whether rows that have ended are padded until the last one has, or all end with the first.
    workers: reader processes; 0 is none, -1 as many as seem good.
    buffer: batches that each of them keeps ready.
    threads: shards that each of them reads at a time.
    read_ahead: documents that each of them reads at a time.
    grain_files: the key of the files that `grain` reads, and its value.
    mixture: a file with several of them.
    hf_files: files of `hf`.
    hf_split: split of `hf`.
    tfds_name: data set of `tfds`.
    tfds_split: its split.
  """

  name: Name
  columns: Sequence[str]
  tokenize: bool
  epochs: int
  shuffle: bool
  pad: bool
  workers: int
  buffer: int
  threads: int
  read_ahead: int
  grain_files: tuple[str, str]
  mixture: str
  hf_files: str | None
  hf_split: str | None
  tfds_name: str
  tfds_split: str


def split_of(config: MaxTextConfig, name: Name) -> Split:
  """The keys of one of the two."""
  return _SPLITS[name](config)


def _train(config: MaxTextConfig) -> Split:
  return Split(
    name="train",
    columns=config.train_data_columns,
    tokenize=config.tokenize_train_data,
    epochs=config.num_epoch,
    shuffle=config.enable_data_shuffling,
    pad=config.generate_padding_batch_train,
    workers=config.grain_worker_count,
    buffer=config.grain_per_worker_buffer_size,
    threads=config.grain_num_threads,
    read_ahead=config.grain_prefetch_buffer_size,
    grain_files=("grain_train_files", config.grain_train_files),
    mixture=config.grain_train_mixture_config_path,
    hf_files=config.hf_train_files,
    hf_split=config.train_split,
    tfds_name=config.dataset_name,
    tfds_split=config.train_split,
  )


def _eval(config: MaxTextConfig) -> Split:
  """Evaluation goes once through the data, as it stands."""
  return Split(
    name="eval",
    columns=config.eval_data_columns,
    tokenize=config.tokenize_eval_data,
    epochs=1,
    shuffle=False,
    pad=config.generate_padding_batch_eval,
    workers=config.grain_worker_count_eval,
    buffer=config.grain_per_worker_buffer_size_eval,
    threads=config.grain_num_threads_eval,
    read_ahead=config.grain_prefetch_buffer_size_eval,
    grain_files=("grain_eval_files", config.grain_eval_files),
    mixture="",
    hf_files=config.hf_eval_files,
    hf_split=config.hf_eval_split,
    tfds_name=config.eval_dataset_name,
    tfds_split=config.eval_split,
  )


_SPLITS: dict[Name, Callable[[MaxTextConfig], Split]] = {"train": _train, "eval": _eval}
