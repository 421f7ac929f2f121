"""`dataset_type=tfds` and `c4_mlperf`: data sets of TensorFlow Datasets, prepared as ArrayRecord; needs no TensorFlow.

`c4_mlperf` differs only in packing: documents are concatenated and split, as that benchmark defines.
"""

from maxtext.configs import ConfigError
from maxtext.data.documents import DataSource
from maxtext.data.options import DataOptions
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.encoding import make_encoding
from maxtext.data.splits import Split


def open_tfds(options: DataOptions, split: Split) -> list[DataSource]:
  """Opens a split of a data set in `dataset_path`; nothing is downloaded."""
  try:
    import tensorflow_datasets as tfds
  except ImportError:
    kind = options.kind.value
    raise ConfigError(f"dataset_type={kind} needs the extra: pip install 'maxtext[tfds]'.") from None
  key = "dataset_name" if split.name == "train" else "eval_dataset_name"
  what = f"{key}={split.tfds_name} in dataset_path={options.tfds_folder or tfds.core.constants.DATA_DIR}"
  try:
    data = tfds.builder(split.tfds_name, data_dir=options.tfds_folder or None).as_data_source(split=split.tfds_split)
  except (
    ValueError,
    NotImplementedError,
    OSError,
    AssertionError,
    LookupError,
    tfds.core.DatasetNotFoundError,
  ) as error:
    reason = str(error).strip().splitlines()[0]
    raise ConfigError(
      f"{what} cannot be read: {reason} It must be prepared, with file_format='array_record', for random access."
    ) from None
  encoding = make_encoding(options, split)
  if missing := set(encoding.columns) - set(data[0]):
    raise ConfigError(f"{what} has no {', '.join(sorted(missing))}; it has {', '.join(sorted(data[0]))}.")
  documents = ColumnDocuments(
    lambda numbers: [
      [*(row[column] for column in encoding.columns), *map(row.get, encoding.image_columns)]
      for row in data.__getitems__(list(numbers))
    ],
    encoding,
    [len(data)],
    {"tfds": split.tfds_name, "split": split.tfds_split},
    lambda number: f"{what}, row {number}",
  )
  return [DataSource(documents)]
