"""The tokenizer that a run keeps beside its checkpoints, so that its folder is all that decoding, serving and
converting need: paths of the machine that trained it mean nothing elsewhere."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from etils import epath

from maxtext.checkpoint.location import FOLDER as CHECKPOINTS
from maxtext.checkpoint.location import absolute, failures, locate
from maxtext.configs import ConfigError
from maxtext.configs.types import DatasetType, TokenizerType
from maxtext.data.options import DataOptions, TokenizerOptions
from maxtext.data.output_folder import UNFINISHED, OutputFolder
from maxtext.data.prepared_corpus import MANIFEST, read_manifest
from maxtext.data.safe_paths import resolve_inside
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer

FOLDER = "tokenizer"  # of a run, or of exported parameters
SIDE_FOLDER = "hugging_face"  # of parameters that came from there: what stood beside the weights
KEPT_KEYS = ("tokenizer_path", "chat_template_path")  # what the copy stands for
TEMPLATE = "chat_template.jinja"


def keep_tokenizer(data: DataOptions, parameters: str, folder: str) -> str | None:
  """Copies the tokenizer that a run is trained with into its folder, here or in a store.

  Args:
    data: what it is trained on.
    parameters: the path of those that it starts with, whose tokenizer is the next choice; empty where it has none.
    folder: the run's.

  Returns:
    Why there is no copy: the run names a tokenizer that its training does not need and that cannot be opened, or the
    folder cannot be written.
  """
  try:
    with open_data_tokenizer(data, parameters) as tokenizer:
      if tokenizer is None:
        return None
      content = {name: file.read_bytes() for name, file in tokenizer.vocabulary.files.items()}
    if tokenizer.chat_template not in (None, tokenizer.vocabulary.chat_template):
      content[TEMPLATE] = tokenizer.chat_template.encode()
    target = OutputFolder(f"{folder}/{FOLDER}")
    for name, text in content.items():
      if target.read(name) != text:
        target.write(name, text)
    target.remove(UNFINISHED)
  except failures() as error:  # a mistake in the configuration is one of them
    return str(error)
  return None


def copy_tokenizer(source: str, target: epath.Path) -> None:
  """Copies what is kept with one checkpoint to another, if anything is."""
  if found := find_tokenizer(source):
    (target / FOLDER).mkdir(exist_ok=True)
    for file in found.iterdir():
      if _own(file).is_file():
        (target / FOLDER / file.name).write_bytes(file.read_bytes())


def find_tokenizer(path: str) -> epath.Path | None:
  """The folder of the tokenizer that is kept with a run, with a checkpoint, or in a folder of Hugging Face's form."""
  given = absolute(path)
  if kind_of(given):
    return given
  try:
    step = locate(path)
  except ConfigError:
    return None
  run = [step.parent.parent / FOLDER] if step.parent.name == CHECKPOINTS else []
  return next((folder for folder in (step / FOLDER, *run, step / SIDE_FOLDER) if kind_of(folder)), None)


def kind_of(folder: epath.Path | Path) -> TokenizerType | None:
  """What a folder's vocabulary is, by its content: both other libraries call their file the same."""
  if (folder / "tokenizer.json").exists():
    return TokenizerType.HUGGINGFACE
  if not (folder / "tokenizer.model").exists():
    return None
  with _own(epath.Path(folder) / "tokenizer.model").open("rb") as file:
    words = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", file.read(4096))
  return TokenizerType.TIKTOKEN if words else TokenizerType.SENTENCEPIECE


@contextmanager
def open_tokenizer(data: DataOptions, path: str) -> Iterator[TextTokenizer | None]:
  """The tokenizer of a model that answers: the one that is named, the one that is kept at `path`, or the corpus's.

  Its files may be gone when the context ends.
  """
  other = None if path and find_tokenizer(path) else _of_corpus(data)
  with _opened(_named(data) or other, data.tokenizer, path) as tokenizer:
    yield tokenizer


@contextmanager
def open_data_tokenizer(data: DataOptions, path: str) -> Iterator[TextTokenizer | None]:
  """The tokenizer that made the tokens of the training data: the corpus's, the one that is named, or the one at `path`.

  Its files may be gone when the context ends.
  """
  named = None if data.kind == DatasetType.SYNTHETIC else _of_corpus(data) or _named(data)
  with _opened(named, data.tokenizer, path) as tokenizer:
    yield tokenizer


@contextmanager
def _opened(named: TokenizerOptions | None, own: TokenizerOptions, path: str) -> Iterator[TextTokenizer | None]:
  """The one that is named, else the one that is kept at `path`, if any."""
  kept = find_tokenizer(path) if path and named is None else None
  with tempfile.TemporaryDirectory() as scratch:
    chosen = _in_folder(own, _brought(kept, Path(scratch))) if kept else named
    yield None if chosen is None else load_tokenizer(chosen)


def _named(data: DataOptions) -> TokenizerOptions | None:
  return data.tokenizer if data.tokenizer.path else None


def _of_corpus(data: DataOptions) -> TokenizerOptions | None:
  """Of the first prepared corpus that a run is trained on."""
  if data.kind != DatasetType.GRAIN:
    return None
  from maxtext.data.sources.grain import source_paths

  try:
    found = source_paths(data.train)
  except ConfigError:  # a list of sources that was left behind
    return None
  for place in found:
    folder = Path(place).expanduser()
    kind = read_manifest(folder)["tokenizer"].get("kind") if (folder / MANIFEST).exists() else None
    if kind is not None:  # a corpus of token ids says of none
      return replace(data.tokenizer, path=str(folder), kind=TokenizerType(kind))
  return None


def _in_folder(own: TokenizerOptions, folder: Path) -> TokenizerOptions:
  template, kind = resolve_inside(folder, TEMPLATE), kind_of(epath.Path(folder))
  assert kind is not None, "the folder was found by its vocabulary"
  if template.exists() and not (own.chat_template or own.chat_template_path):
    own = replace(own, chat_template_path=str(template))
  return replace(own, path=str(folder), kind=kind)


def _own(file: epath.Path) -> epath.Path:
  """A file that is in its folder, which may be a stranger's; stores have no links."""
  if "://" not in str(file):
    resolve_inside(Path(file.parent), file.name)
  return file


def _brought(folder: epath.Path, scratch: Path) -> Path:
  """A folder of this machine with the same files: libraries read vocabularies from disks."""
  if "://" not in str(folder):
    return Path(folder)
  for file in folder.iterdir():
    if not file.is_dir():
      (scratch / file.name).write_bytes(file.read_bytes())
  return scratch
