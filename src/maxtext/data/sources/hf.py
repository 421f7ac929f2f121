"""`dataset_type=hf`: files that the `datasets` library reads, at random, from a memory-mapped copy that it keeps."""

from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.secrets import redacted_text
from maxtext.data.documents import Source
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.encoding import Encoding
from maxtext.data.splits import Split


def open_hf(config: MaxTextConfig, split: Split) -> list[Source]:
  """A split that is, or is made, a table on this machine's disk."""
  data, encoding = load(config, split, streaming=False), Encoding.of(config, split)
  if missing := set(encoding.columns) - set(data.column_names):
    raise ConfigError(
      f"{_what(config, split)} has no {', '.join(sorted(missing))}; it has {', '.join(data.column_names)}."
    )
  table = data.select_columns(list(encoding.columns))

  def read(numbers: Any) -> list[list[Any]]:
    found = table[list(numbers)]
    return [list(row) for row in zip(*(found[column] for column in encoding.columns), strict=True)]

  about = {"hf": [config.hf_path, config.hf_name, config.hf_data_dir, split.hf_split], "bytes": data.info.dataset_size}
  return [Source(ColumnDocuments(read, encoding, [len(data)], about, lambda n: f"{_what(config, split)}, row {n}"))]


def is_remote(config: MaxTextConfig, split: Split) -> bool:
  """Whether the data is elsewhere, and therefore streamed: a name on the hub, or files with a protocol (`gs://`)."""
  if split.hf_files:
    return "://" in split.hf_files
  return not Path(config.hf_path).expanduser().exists()


def load(config: MaxTextConfig, split: Split, streaming: bool) -> Any:
  """The library's data set."""
  if not config.hf_path:
    raise ConfigError(
      "dataset_type=hf needs hf_path: write json or parquet beside hf_train_files, or a name on the hub."
    )
  try:
    import datasets
  except ImportError:
    raise ConfigError("dataset_type=hf needs the extra: pip install 'maxtext[hf]'.") from None
  try:
    return datasets.load_dataset(
      config.hf_path,
      config.hf_name,
      data_dir=config.hf_data_dir,
      data_files=split.hf_files,
      split="train" if split.hf_files else split.hf_split,  # files without names are one split, which is called so
      token=config.hf_access_token,
      streaming=streaming,
    )
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    reason = redacted_text(str(error).strip().splitlines()[0], config.hf_access_token)
    raise ConfigError(f"{_what(config, split)} cannot be read: {reason}") from None


def _what(config: MaxTextConfig, split: Split) -> str:
  return f"hf_path={config.hf_path}" + (f" with {split.hf_files}" if split.hf_files else f", split {split.hf_split}")
