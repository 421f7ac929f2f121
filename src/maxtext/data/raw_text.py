"""Raw text: which documents there are, and how they are read. Text files, JSON lines and Parquet, also compressed.

A text file is one document. One that is all of the text, or too large for that, is cut into many at ends of paragraphs
and lines; joined, they are the file. Files are cut into spans that a worker reads alone. Paths go through fsspec, so
`gs://` and `s3://` need only its package for that store. Nothing here knows of tokens.
"""

import gzip
import json
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from maxtext.configs import ConfigError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_LARGEST_TEXT = 1 << 28  # bytes of a text file that is one document
_LEAST_CUT, _MOST_CUT = 1 << 10, 1 << 14  # bytes of the documents of a file that is cut
_BLOCK = 1 << 20


class File(NamedTuple):
  """Raw text in some format.

  Attributes:
    path: of the file.
    size: in bytes.
    document_size: most bytes of a document, if the file is a text that is cut into several; 0 where it is not.
  """

  path: str
  size: int
  document_size: int = 0


@dataclass(frozen=True)
class TextSpan:
  """Consecutive documents of one file."""

  path: str
  begin: int  # of bytes, or of rows
  end: int
  documents: int
  size: int  # bytes of text, roughly
  document_size: int = 0  # of its file


OnBadRecord = Callable[[ConfigError], None]
"""Called with the error of a bad record; if it returns, the record is left out."""


class SpanLimits(NamedTuple):
  """Limits of one span; a larger document is a span of its own."""

  documents: int
  size: int


def find_files(sources: Sequence[str], suffixes: Sequence[str] = ()) -> list[File]:
  """The files in the order of their sources; a folder means all visible ones below it, sorted by path.

  Args:
    sources: files and folders.
    suffixes: what the names of files in folders must end in, where given.
  """
  from fsspec.core import url_to_fs

  found = []
  for source in sources:
    fs, root = url_to_fs(source)
    there = fs.find(root, detail=True)
    if not there and not fs.exists(root):
      raise ConfigError(f"--from {source}: no such file or folder.")
    if root in there and there[root]["type"] != "file":
      raise ConfigError(f"--from {source} is a pipe or a device: write its text to a file first.")
    scheme = "" if "file" in fs.protocol else source.split("://")[0] + "://"
    for path, facts in sorted(there.items()):
      below = _relative_parts(path, root)
      if path == root or (not any(part.startswith(".") for part in below) and path.endswith(tuple(suffixes) or "")):
        found.append(File(scheme + path, facts["size"]))
  return found


def standard_library() -> list[File]:
  """The source files of this Python's own library, without its tests: real text that is on every machine."""
  root = sysconfig.get_paths()["stdlib"]
  return [file for file in find_files([root], [".py"]) if not _NOT_LIBRARY & set(_relative_parts(file.path, root))]


def cut_texts(files: Sequence[File]) -> list[File]:
  """The files, of which a text file that is alone, or that has more than 256 MiB, is to be cut into documents.

  One document could be neither shuffled nor held out. Documents have a 64th of the file, but 1 to 16 KiB.
  """
  alone = sum(file.size > 0 for file in files) == 1

  def cut(file: File) -> File:
    if _format(file.path) is not _TEXT or not (alone or file.size > _LARGEST_TEXT):
      return file
    return file._replace(document_size=min(max(file.size // 64, _LEAST_CUT), _MOST_CUT))

  return [cut(file) for file in files]


def needs_scan(file: File) -> bool:
  """Whether splitting this file requires reading it."""
  return bool(file.document_size) or _format(file.path).needs_scan


def raise_bad_record(bad: ConfigError) -> None:
  """Raises the error of a bad record; the default of `on_bad`."""
  raise bad


def split_file(file: File, column: str, most: SpanLimits, on_bad: OnBadRecord = raise_bad_record) -> Iterator[TextSpan]:
  """The spans of a file, in order; an empty one has none. A wrong column shows here, before any work is done."""
  if file.size:
    with _undamaged(file.path):
      yield from _format(file.path).split(file, column, most, on_bad)


def documents(span: TextSpan, column: str, on_bad: OnBadRecord = raise_bad_record) -> Iterator[str]:
  """The texts of a span, in order; `on_bad` is called for bad records."""
  with _undamaged(span.path):
    yield from _format(span.path).read(span, column, on_bad)


@contextmanager
def _undamaged(path: str) -> Iterator[None]:
  """Raises `ConfigError` for a damaged compressed file, whose records cannot be separated."""
  try:
    yield
  except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
    raise ConfigError(f"{path} is damaged, or not compressed as its name says: {error}.") from None


def _relative_parts(path: str, root: str) -> list[str]:
  return path.removeprefix(root).strip("/").split("/")


def _split_text(file: File, column: str, most: SpanLimits, on_bad: OnBadRecord) -> Iterator[TextSpan]:
  if not file.document_size:
    yield TextSpan(file.path, 0, file.size, 1, file.size)
    return
  begin = end = count = 0
  with _open(file.path) as content:
    for document in _cut(content, file.document_size):
      if count and (count == most.documents or end + len(document) - begin > most.size):
        yield TextSpan(file.path, begin, end, count, end - begin, file.document_size)
        begin, count = end, 0
      count, end = count + 1, end + len(document)
  if count:
    yield TextSpan(file.path, begin, end, count, end - begin, file.document_size)


def _read_text(span: TextSpan, column: str, on_bad: OnBadRecord) -> Iterator[str]:
  with _open(span.path) as file:
    file.seek(place := span.begin)
    for content in _cut(file, span.document_size) if span.document_size else [file.read()]:
      if place >= span.end and span.document_size:
        return
      try:
        text = content.decode("utf-8")
      except UnicodeDecodeError as error:
        where = f"{span.path} is not UTF-8 text (byte {place + error.start})"
        on_bad(ConfigError(f"{where}: say which files to take with --suffix, such as .txt, or convert it."))
      else:
        yield text
      place += len(content)
  if place < span.end and span.document_size:
    raise ConfigError(f"{span.path} became shorter while it was read.")


def _cut(file: BinaryIO, size: int) -> Iterator[bytes]:
  """The rest of a text in documents of at most `size` bytes. A cut depends only on the one before."""
  block, begin = b"", 0
  while True:
    while len(block) - begin <= size and (more := file.read(_BLOCK)):
      block, begin = block[begin:] + more, 0
    if len(block) - begin <= size:
      if len(block) > begin:
        yield block[begin:]
      return
    end = _last_break(block, begin + size // 2, begin + size)
    yield block[begin:end]
    begin = end


def _last_break(text: bytes, first: int, last: int) -> int:
  """Where to cut: after the last empty line that ends in [first, last], else the last line, word or character."""
  for breaks in ((b"\n\n", b"\n\r\n"), (b"\n",), (b" ",)):
    ends = [found + len(mark) for mark in breaks if (found := text.rfind(mark, first, last)) >= 0]
    if ends:
      return max(ends)
  inside = (place for place in range(last, last - 4, -1) if text[place] & 0xC0 != 0x80)
  return next(inside, last)


def _split_lines(file: File, column: str, most: SpanLimits, on_bad: OnBadRecord) -> Iterator[TextSpan]:
  path = file.path
  begin = end = count = 0
  with _open(path) as lines:
    for line in lines:
      if count and (count == most.documents or end + len(line) - begin > most.size):
        yield TextSpan(path, begin, end, count, end - begin)
        begin, count = end, 0
      if line.strip():
        if not count and not begin:
          _read_or_skip(on_bad, _text_of, line, column, path, end)
        count += 1
      end += len(line)
  if count:
    yield TextSpan(path, begin, end, count, end - begin)


def _read_lines(span: TextSpan, column: str, on_bad: OnBadRecord) -> Iterator[str]:
  with _open(span.path) as file:
    file.seek(place := span.begin)
    while place < span.end:
      line = file.readline()
      if not line:
        raise ConfigError(f"{span.path} became shorter while it was read.")
      if line.strip() and (text := _read_or_skip(on_bad, _text_of, line, column, span.path, place)) is not None:
        yield text
      place += len(line)


def _text_of(line: bytes, column: str, path: str, place: int) -> str:
  where = f"{path}, line at byte {place}"
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    raise ConfigError(f"{where}: not a JSON object.") from None
  if not isinstance(row, dict) or not isinstance(row.get(column), str):
    has = f" It has {', '.join(map(repr, row))}." if isinstance(row, dict) else ""
    raise ConfigError(f"{where}: no text under '{column}'.{has} Choose with --column.")
  if not _is_text(row[column]):
    raise ConfigError(f"{where}: half of a surrogate pair, which no text has.")
  return row[column]


def _read_or_skip(on_bad: OnBadRecord, read: Callable[..., str], *record: Any) -> str | None:
  """A record's text; None if it is bad and left out."""
  try:
    return read(*record)
  except ConfigError as bad:
    on_bad(bad)
    return None


def _is_text(found: str) -> bool:
  """Whether a string can be encoded; JSON can escape half of a surrogate pair."""
  try:
    found.encode()
  except UnicodeEncodeError:
    return False
  return True


def _split_rows(file: File, column: str, most: SpanLimits, on_bad: OnBadRecord) -> Iterator[TextSpan]:
  path = file.path
  with _open(path) as content:
    table = _parquet(content, path)
    names = table.schema_arrow.names
    if column not in names:
      raise ConfigError(f"{path}: no column '{column}'. It has {', '.join(map(repr, names))}. Choose with --column.")
    rows = table.metadata.num_rows
    groups = (table.metadata.row_group(number) for number in range(table.metadata.num_row_groups))
    parts = (group.column(number) for group in groups for number in range(group.num_columns))
    whole = sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)
    size = max(1, whole // max(rows, 1))
  step = max(1, min(most.documents, most.size // size))
  for begin in range(0, rows, step):
    count = min(step, rows - begin)
    yield TextSpan(path, begin, begin + count, count, count * size)


def _read_rows(span: TextSpan, column: str, on_bad: OnBadRecord) -> Iterator[str]:
  with _open(span.path) as file:
    table = _parquet(file, span.path)
    row = 0
    for group in range(table.metadata.num_row_groups):
      rows = table.metadata.row_group(group).num_rows
      if row < span.end and row + rows > span.begin:
        yield from _rows(table, group, column, span, row, on_bad)
      row += rows


def _rows(table: Any, group: int, column: str, span: TextSpan, row: int, on_bad: OnBadRecord) -> Iterator[str]:
  """Those of one row group that lie in the span; in batches, since groups can be large."""
  for batch in table.iter_batches(1024, row_groups=[group], columns=[column]):
    if row >= span.end:
      return
    for place, text in enumerate(batch.column(0).to_pylist(), start=row):
      if span.begin <= place < span.end:
        if isinstance(text, str):
          yield text
        else:
          on_bad(ConfigError(f"{span.path}, row {place}: no text under '{column}'. Choose with --column."))
    row += batch.num_rows


def _parquet(file: BinaryIO, path: str) -> Any:
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError:
    raise ConfigError(f"{path}: Parquet needs pyarrow: pip install 'maxtext[prepare]'.") from None
  try:
    return pyarrow.parquet.ParquetFile(file)
  except pyarrow.ArrowInvalid:
    raise ConfigError(f"{path} is not a Parquet file.") from None


def _open(path: str) -> BinaryIO:
  import fsspec

  return fsspec.open(path, "rb", compression="infer").open()


class _Format(NamedTuple):
  suffixes: tuple[str, ...]
  needs_scan: bool
  split: Callable[[File, str, SpanLimits, OnBadRecord], Iterator[TextSpan]]
  read: Callable[[TextSpan, str, OnBadRecord], Iterator[str]]


_FORMATS = (
  _Format((".jsonl", ".ndjson", ".jsonl.gz", ".json.gz"), True, _split_lines, _read_lines),
  _Format((".parquet",), False, _split_rows, _read_rows),
)
_TEXT = _Format((), False, _split_text, _read_text)


def _format(path: str) -> _Format:
  return next((form for form in _FORMATS if path.endswith(form.suffixes)), _TEXT)
