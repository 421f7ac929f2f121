"""`dataset_type=grain`: prepared corpora and record files, one source or a weighted mixture of several."""

import glob
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.data.documents import DataSource, Documents
from maxtext.data.options import DataOptions
from maxtext.data.prepared_corpus import MANIFEST, PreparedCorpus, held_out_documents, read_manifest
from maxtext.data.sources.conversation_encoding import ConversationEncoding
from maxtext.data.sources.encoding import Encoding, make_encoding
from maxtext.data.sources.files import FORMATS, open_files
from maxtext.data.sources.preference_encoding import PreferenceEncoding
from maxtext.data.splits import Split
from maxtext.data.tokenizers import check_vocab_size

Part = tuple[str, float]  # a folder or glob, and its weight

_NO_CORPUS = "write the folder of a prepared corpus, or a glob of files"


def open_grain(options: DataOptions, split: Split) -> list[DataSource]:
  """Opens all parts of the mixture, several at a time; for held-out documents, the parts that have any."""
  parts = [part for part in _parts(split) if not split.held_out or _holds_out(part[0])]
  if not parts:
    raise ConfigError(f"dataset_type=grain needs grain_eval_files to evaluate: {lacks_held_out(split) or _NO_CORPUS}.")
  encoding = cache(
    partial(make_encoding, options, split)
  )  # loads the tokenizer at most once, and only for data that is not tokenised
  with ThreadPoolExecutor(max(1, options.open_threads)) as pool:
    opened = pool.map(lambda part: _open(options, split, encoding, part[0]), parts)
    return [DataSource(documents, weight) for documents, (_, weight) in zip(opened, parts, strict=True)]


def lacks_held_out(split: Split) -> str | None:
  """Why there is nothing to read, if the split is the held-out documents of prepared corpora that have none."""
  if not split.held_out:
    return None
  places = source_paths(split)
  if any(not _is_prepared(place) or _holds_out(place) for place in places):
    return None
  return f"nothing is held out in {', '.join(places)} (`maxtext data prepare` holds out a hundredth of a text)"


def source_paths(split: Split) -> list[str]:
  """The folders and globs of the split."""
  return [place for place, _ in _parts(split)]


def _parts(split: Split) -> Sequence[Part]:
  return _mixture_parts(split.mixture) if split.mixture else _file_parts(*split.grain_files)


def _is_prepared(place: str) -> bool:
  return (Path(place).expanduser() / MANIFEST).exists()


def _holds_out(place: str) -> bool:
  return _is_prepared(place) and held_out_documents(read_manifest(Path(place).expanduser())) > 0


def _open(options: DataOptions, split: Split, encoding: Callable[[], Encoding], place: str) -> Documents:
  folder = Path(place).expanduser()
  if _is_prepared(place):
    if options.conversations is not None:
      raise ConfigError(
        f"{options.conversations.method}=true: {split.grain_files[0]}: {place} is a prepared corpus of tokens; give "
        f"files of conversations."
      )
    prepared = PreparedCorpus(folder, split.threads, split.held_out)
    check_vocab_size(options.vocab_size, prepared.vocab_size, f"{split.grain_files[0]}: {place}")
    return prepared
  kind, key = options.file_type, split.grain_files[0]
  if kind not in FORMATS:
    raise ConfigError(f"grain_file_type={kind} must be one of {', '.join(FORMATS)}.")
  paths = sorted(glob.glob(str(folder)))
  if not paths or any(Path(path).is_dir() for path in paths):
    raise ConfigError(
      f"{key}: {place} is neither the folder of a prepared corpus, with its {MANIFEST}, nor a glob of files. "
      f"`maxtext data prepare` makes such a folder."
    )
  making = encoding()
  if isinstance(making, ConversationEncoding | PreferenceEncoding):
    folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
    making = making.in_folder(folders.pop() if len(folders) == 1 else None)
  documents = open_files(paths, kind, making, options.shuffle_buffer, split.threads)
  if not sum(documents.sizes):
    raise ConfigError(f"{key}: {place} holds no records.")
  return documents


def _file_parts(key: str, value: str) -> Sequence[Part]:
  """Parses `glob`, or `glob,weight;glob,weight`."""
  if not value:
    raise ConfigError(f"dataset_type=grain needs {key}: {_NO_CORPUS}.")
  if ";" not in value and "," not in value:
    return [(value, 1.0)]
  try:
    parts = [(place, float(weight)) for place, weight in (part.rsplit(",", 1) for part in value.split(";"))]
  except ValueError:
    raise ConfigError(f"{key}={value} must be one glob, or several with weights: glob,0.7;glob,0.3.") from None
  return _checked(key, parts)


def _mixture_parts(path: str) -> Sequence[Part]:
  """Reads a file {"name": {"path": glob, "weight": number}, ...}."""
  key, expected = f"grain_train_mixture_config_path={path}", '{"name": {"path": "glob", "weight": 0.7}, ...}'
  try:
    listed = json.loads(Path(path).expanduser().read_text())
    parts = [(str(part["path"]), float(part["weight"])) for part in listed.values()]
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    raise ConfigError(f"{key} must be a file of the form {expected}: {error!r}.") from None
  return _checked(key, parts)


def _checked(key: str, parts: list[Part]) -> list[Part]:
  if not parts or any(not weight > 0 for _, weight in parts):
    raise ConfigError(f"{key} must name at least one source, and every weight must be above 0.")
  return parts
