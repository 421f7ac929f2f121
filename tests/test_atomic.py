"""Files and folders appear whole or not at all, and are on the disk before they count."""

import os
import re

import pytest
from etils import epath

from maxtext.storage.atomic import atomic_file, atomic_folder, commit_file, create_atomically, write_atomically


@pytest.fixture
def events(monkeypatch):
  """Files and folders synced, and what was renamed, in order."""
  found, fsync, replace, rename = [], os.fsync, os.replace, os.rename

  def noted_fsync(descriptor):
    found.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
    fsync(descriptor)

  def noting(call):
    def noted(source, target, **kwargs):
      found.append(("rename", os.path.basename(target)))
      call(source, target, **kwargs)

    return noted

  monkeypatch.setattr(os, "fsync", noted_fsync)
  monkeypatch.setattr(os, "replace", noting(replace))
  monkeypatch.setattr(os, "rename", noting(rename))
  return found


@pytest.mark.parametrize("kind", [epath.Path, type(None)])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, events, kind):
  file = (tmp_path if kind is type(None) else kind(tmp_path)) / "a"
  write_atomically(file, b"old")
  assert events == [("sync", "a.unfinished"), ("rename", "a"), ("sync", tmp_path.name)]
  write_atomically(file, b"new", durable=False)
  assert file.read_bytes() == b"new"
  assert events[3:] == [("rename", "a")]
  assert os.listdir(tmp_path) == ["a"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
  file = tmp_path / "a"
  write_atomically(file, b"old")

  def half():
    with atomic_file(file, unfinished=tmp_path / ".mine") as target:
      target.write(b"ne")
      assert sorted(os.listdir(tmp_path)) == [".mine", "a"]
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    half()
  assert file.read_bytes() == b"old"
  assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("links", [True, False])
def test_only_one_creates_a_file(tmp_path, monkeypatch, links):
  def no_links(*_):
    raise PermissionError(1, "no links here")

  if not links:
    monkeypatch.setattr(os, "link", no_links)
  file = tmp_path / "a"
  assert create_atomically(file, b"first", tmp_path / ".1")
  assert not create_atomically(file, b"second", tmp_path / ".2")
  assert file.read_bytes() == b"first"
  assert os.listdir(tmp_path) == ["a"]


def test_a_file_made_elsewhere_is_moved_to_its_place(tmp_path, events):
  made = tmp_path / "scratch"
  made.write_bytes(b"content")
  commit_file(made, f"{tmp_path}/a")
  assert (tmp_path / "a").read_bytes() == b"content"
  assert events == [("sync", "scratch"), ("rename", "a"), ("sync", tmp_path.name)]


def test_a_folder_appears_with_all_its_files(tmp_path, events):
  with atomic_folder(epath.Path(tmp_path) / "7") as folder:
    (folder / "in").write_text("it")
    assert os.listdir(tmp_path) == ["7.unfinished"]
  assert (tmp_path / "7" / "in").read_text() == "it"
  assert events == [("sync", "in"), ("sync", "7.unfinished"), ("rename", "7"), ("sync", tmp_path.name)]
  with pytest.raises(OSError, match=re.escape("not empty")), atomic_folder(tmp_path / "7") as folder:
    (folder / "other").write_text("it")
  assert os.listdir(tmp_path) == ["7"]


def test_a_store_of_objects_needs_neither_names_nor_waiting(events):
  class Stored:
    def __str__(self):
      return "gs://bucket/a"

    def write_bytes(self, content):
      self.content = content

  stored = Stored()
  write_atomically(stored, b"content")
  assert stored.content == b"content"
  assert events == []
