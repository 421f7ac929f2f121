"""Options that training and evaluation data have separately."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SplitName = Literal["train", "eval"]


@dataclass(frozen=True)
class Split:
  """What is read, and how, for training or for evaluation.

  Attributes:
    name: which of the two.
    columns: of the data that hold text or tokens, in order.
    image_columns: of the data that hold images, in order; it may lack them.
    tokenize: whether they hold text.
    epochs: passes over the data.
    shuffle: whether each pass has an order of its own.
    rows_per_device: of a batch.
    pad: whether rows that have ended are padded until the last one has, or all end with the first.
    workers: reader processes; 0 is none, -1 as many as seem good.
    buffer: batches that each of them keeps ready.
    threads: shards that each of them reads at a time.
    read_ahead: documents that each of them reads at a time.
    grain_files: the key of the files that `grain` reads, and its value.
    mixture: a file with several of them.
    held_out: whether the held-out documents of these prepared corpora are read, instead of the others.
    hf_files: files of `hf`.
    hf_split: split of `hf`.
    tfds_name: data set of `tfds`.
    tfds_split: its split.
  """

  name: SplitName
  columns: Sequence[str]
  image_columns: Sequence[str]
  tokenize: bool
  epochs: int
  shuffle: bool
  rows_per_device: float
  pad: bool
  workers: int
  buffer: int
  threads: int
  read_ahead: int
  grain_files: tuple[str, str]
  mixture: str
  held_out: bool
  hf_files: str | None
  hf_split: str | None
  tfds_name: str
  tfds_split: str
