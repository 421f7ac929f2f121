"""`dataset_type=hf`: data sets of the `datasets` library, with random access to its memory-mapped cache."""

from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact
from maxtext.data.documents import DataSource
from maxtext.data.options import DataOptions, HubOptions
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.encoding import make_encoding
from maxtext.data.splits import Split


def open_hf(options: DataOptions, split: Split) -> list[DataSource]:
  """Opens a split, which the library stores as a table on the local disk."""
  hub = options.hub
  data, encoding = load(hub, split, streaming=False), make_encoding(options, split)
  if missing := set(encoding.columns) - set(data.column_names):
    raise ConfigError(
      f"{_what(hub, split)} has no {', '.join(sorted(missing))}; it has {', '.join(data.column_names)}."
    )
  columns = (*encoding.columns, *encoding.image_columns)
  table = data.select_columns([column for column in columns if column in data.column_names])

  def read(numbers: Any) -> list[list[Any]]:
    found = table[list(numbers)]
    return [list(row) for row in zip(*(found.get(column, [None] * len(numbers)) for column in columns), strict=True)]

  about = {"hf": [hub.path, hub.name, hub.data_dir, split.hf_split], "bytes": data.info.dataset_size}
  return [DataSource(ColumnDocuments(read, encoding, [len(data)], about, lambda n: f"{_what(hub, split)}, row {n}"))]


def is_remote(hub: HubOptions, split: Split) -> bool:
  """Whether the data is remote and is therefore streamed: a name on the hub, or files with a protocol (`gs://`)."""
  if split.hf_files:
    return "://" in split.hf_files
  return not Path(hub.path).expanduser().exists()


def load(hub: HubOptions, split: Split, streaming: bool) -> Any:
  """Loads the library's data set object."""
  if not hub.path:
    raise ConfigError(
      "dataset_type=hf needs hf_path: write json or parquet beside hf_train_files, or a name on the hub."
    )
  try:
    import datasets
  except ImportError:
    raise ConfigError("dataset_type=hf needs the extra: pip install 'maxtext[hf]'.") from None
  try:
    return datasets.load_dataset(
      hub.path,
      hub.name,
      data_dir=hub.data_dir,
      data_files=split.hf_files,
      split="train" if split.hf_files else split.hf_split,  # the library's name of the only split of plain files
      token=hub.access_token,
      streaming=streaming,
    )
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    reason = redact(str(error).strip().splitlines()[0], hub.access_token)
    raise ConfigError(f"{_what(hub, split)} cannot be read: {reason}") from None


def _what(hub: HubOptions, split: Split) -> str:
  return f"hf_path={hub.path}" + (f" with {split.hf_files}" if split.hf_files else f", split {split.hf_split}")
