"""The local tier: what two machines keep on disks of their own, and what is left when one of them is lost."""

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from maxtext import ConfigError, load_config
from maxtext.checkpoint import storage
from maxtext.checkpoint.files import read
from maxtext.checkpoint.local import LocalWriter, local_folder, resume_locally
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import CheckpointMetadata
from maxtext.checkpoint.options import array_storage, local_checkpoint_options
from maxtext.distributed.multihost import INIT_FILE, join
from maxtext.distributed.supervisor import supervise
from tests.flags import flags
from tests.support import TINY, program, tiny

pytestmark = [pytest.mark.chaos, pytest.mark.mesh]

REPLICAS = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2}
NO_REPLICAS = {"ici_fsdp_parallelism": 4}
KEYS = TINY | {
  "steps": 10, "per_device_batch_size": 2, "checkpoint_period": 5, "run_name": "run", "base_num_decoder_layers": 1,
  "enable_checkpointing": True, "enable_emergency_checkpoint": True, "local_checkpoint_period": 2,
}  # fmt: skip


class Machines:
  """Two machines, a process on each, with a disk of its own and a shared one for the run."""

  def __init__(self, folder: Path, mesh: dict[str, int]) -> None:
    self.folder, self.disks = folder, [folder / "disk-0", folder / "disk-1"]
    self.keys = KEYS | mesh | {"base_output_directory": folder / "shared", "jax_cache_dir": folder.parent / "cache"}

  def run(self, killed_after: int = -1) -> str:
    """Runs to its end, or to the kill; returns what the first process said."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
      address = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = [self._start(index, address, killed_after) for index in range(2)]
    said = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0 if killed_after < 0 else -signal.SIGKILL] * 2, said
    return said[0]

  def _start(self, index: int, address: str, killed_after: int) -> subprocess.Popen:
    """The orchestrator's part: a number and an address in a file on each machine."""
    disk = self.disks[index]
    disk.mkdir(parents=True, exist_ok=True)
    (disk / INIT_FILE).write_text(f"{index}\n{address}\n")
    local = [disk / "run" / f"process-{i}" / "6" for i, disk in enumerate(self.disks)]
    saved = ",".join(map(str, [*local, self.folder / "shared" / "run" / "checkpoints" / "5"]))
    words = [f"{key}={value}" for key, value in self.keys.items()]
    env = os.environ | flags(devices=2) | {
      "JAX_NUM_PROCESSES": "2", "M_LOCAL_CHECKPOINT_DIRECTORY": str(disk),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.run_worker", "killed", str(killed_after), saved, *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

  def losses(self) -> list[float]:
    lines = (self.folder / "shared" / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]

  def state(self) -> dict[str, np.ndarray]:
    folder = locate(str(self.folder / "shared" / "run"))
    record = CheckpointMetadata.read(folder)
    assert record.step == KEYS["steps"]
    return read(array_storage(tiny()), folder, dict.fromkeys(record.arrays), record)

  def copy(self, name: str) -> "Machines":
    shutil.copytree(self.folder, self.folder.with_name(name))
    other = Machines(self.folder.with_name(name), {})
    other.keys = self.keys | {"base_output_directory": other.folder / "shared"}
    return other


def same(one: Machines, other: Machines) -> None:
  assert one.losses() == other.losses()
  ours, theirs = one.state(), other.state()
  assert ours.keys() == theirs.keys()
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_local_disks_and_a_lost_one_from_its_peers(tmp_path):
  whole, killed = Machines(tmp_path / "whole", REPLICAS), Machines(tmp_path / "killed", REPLICAS)
  whole.run()
  killed.run(killed_after=7)
  replaced = killed.copy("replaced")
  said = killed.run()
  assert f"resuming from {killed.disks[0]}/run/process-0/6" in said
  assert "peers" not in said
  same(killed, whole)
  shutil.rmtree(replaced.disks[0])
  said = replaced.run()
  assert "maxtext: process 0 gets its parts of step 6 from its peers.\n" in said
  same(replaced, whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_where_nobody_holds_a_lost_part_the_shared_disk_does(tmp_path):
  machines = Machines(tmp_path / "machines", NO_REPLICAS)
  machines.run(killed_after=7)
  before = machines.losses()
  shutil.rmtree(machines.disks[1])
  said = machines.run()
  assert "maxtext: step 6 is not whole on local disks: no other holds what process 1 held.\n" in said
  assert f"resuming from {machines.folder}/shared/run/checkpoints/5" in said
  assert machines.losses()[: len(before)] == before


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
  """A program, and a folder in which one process has kept steps 2 and 4 of three."""
  config = load_config(**KEYS, **REPLICAS, local_checkpoint_directory=str(tmp_path_factory.mktemp("disk")))
  p = program(config, devices=4)
  folder = local_folder(config.local_checkpoint_directory, "run")
  writer = LocalWriter(local_checkpoint_options(config), folder)
  state, position = p.init(), {"rows": jax.device_put(np.arange(8).reshape(4, 2), p.batch.inputs.sharding)}
  for step in (0, 2, 4):
    assert writer.due(step)
    writer.save(step, dataclasses.replace(state, step=jnp.asarray(step, state.step.dtype)), position)
  writer.close()
  assert not writer.due(5)
  return p, state, folder


def copied(folder, tmp_path):
  return epath.Path(shutil.copytree(folder, tmp_path / "disk"))


def test_the_last_two_steps_are_kept_bit_for_bit(kept, tmp_path):
  p, state, folder = kept
  folder = copied(folder, tmp_path)
  (folder / "6.unfinished").mkdir()
  assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "6.unfinished"]
  found = resume_locally(folder, p.state, at_least=3)
  assert int(found.state.step) == 4
  np.testing.assert_array_equal(found.position["rows"], np.arange(8).reshape(4, 2))
  for name, array in state.params.items():
    np.testing.assert_array_equal(found.state.params[name], array, err_msg=name)
    assert found.state.params[name].sharding == array.sharding
  assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
  assert resume_locally(folder, p.state, at_least=5) is None, "the run's own checkpoints are later"
  assert sorted(path.name for path in folder.iterdir()) == ["2.unused", "4.unused"], "renamed, not removed"
  writer = LocalWriter(local_checkpoint_options(p.config), folder)
  for step in (3, 6, 8):
    writer.save(step, state, {})
  writer.close()
  assert sorted(path.name for path in folder.iterdir()) == ["6", "8"], "the run is past them"


def test_a_state_that_is_not_finite_or_leads_nowhere_is_not_taken(kept, tmp_path, capsys):
  p, state, folder = kept
  folder = copied(folder, tmp_path)
  writer = LocalWriter(local_checkpoint_options(p.config), folder)
  bad = {name: array.at[(0,) * array.ndim].set(jnp.inf) for name, array in state.params.items()}
  writer.save(6, dataclasses.replace(state, params=bad), {})
  writer.close()
  assert capsys.readouterr().out == "maxtext: step 6 is not kept on local disks: its state is not finite.\n"
  assert int(resume_locally(folder, p.state, at_least=0, blamed=4).state.step) == 2


def test_what_is_damaged_is_not_taken_and_another_mesh_is_put_together(kept, tmp_path):
  p, _, folder = kept
  folder = copied(folder, tmp_path)
  file = folder / "4" / "parts.npz"
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  found = resume_locally(folder, p.state, at_least=0)
  assert (int(found.state.step), sorted(path.name for path in folder.iterdir())) == (2, ["2", "4.unused"])
  mesh = {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1, "base_num_decoder_layers": 1}
  other = program(tiny(**mesh), devices=8)
  moved = resume_locally(folder, other.state, at_least=0).state
  assert int(moved.step) == 2
  for name, array in moved.params.items():
    np.testing.assert_array_equal(array, found.state.params[name], err_msg=name)
    assert array.sharding == other.state.params[name].sharding


def test_parts_of_two_starts_are_not_mixed(kept, tmp_path):
  """A lost host left its parts of step 4, and the step was saved anew without it: both fit, and are not mixed."""
  p, state, folder = kept
  disk = shutil.copytree(folder.parent, tmp_path / "disk")
  own = epath.Path(disk / "process-0")
  (disk / "process-1").mkdir()
  shutil.move(own / "4", disk / "process-1" / "4")
  writer = LocalWriter(local_checkpoint_options(p.config), own)
  doubled = dataclasses.replace(state, params={name: 2 * array for name, array in state.params.items()})
  writer.save(4, dataclasses.replace(doubled, step=jnp.asarray(4, jnp.int32)), {})
  writer.close()

  file = own / "4" / "parts.npz"
  with np.load(file) as parts:  # of every array that is split, the first part alone is left
    first = {key.rpartition(" ")[0]: key for key in reversed(parts.files)}
    np.savez(file, **{key: parts[key] for key in first.values()})
  found = resume_locally(own, p.state, at_least=0)
  for name, array in state.params.items():
    np.testing.assert_array_equal(found.state.params[name], array, err_msg=name)


def test_a_disk_that_does_not_answer_ends_the_run_and_nothing_is_renamed(kept, tmp_path, monkeypatch):
  p, _, folder = kept
  folder, load = copied(folder, tmp_path), np.load

  def fails(path, *args, **kwargs):
    if Path(path).parent.name == "4":
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return load(path, *args, **kwargs)

  monkeypatch.setattr(np, "load", fails)
  monkeypatch.setattr(storage, "DELAYS", (0.01,))
  with pytest.raises(storage.StorageError, match=r"4 cannot be read: .*Input/output error.* Nothing was changed"):
    resume_locally(folder, p.state, at_least=0)
  assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
  monkeypatch.undo()
  assert int(resume_locally(folder, p.state, at_least=0).state.step) == 4


def test_a_mistyped_size_is_refused_and_nothing_is_touched(kept, tmp_path):
  _, _, folder = kept
  folder = copied(folder, tmp_path)
  other = program(tiny(**REPLICAS, base_num_decoder_layers=1, per_device_batch_size=2, base_mlp_dim=88), devices=4)
  with pytest.raises(ConfigError) as error:
    resume_locally(folder, other.state, at_least=0)
  assert re.search(r"4 has float32\[1, 80, 48\] for .* this run wants float32\[1, 88, 48\]\. Nothing", str(error.value))
  assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]


def test_local_parts_are_on_the_disk_before_they_count(kept, tmp_path, monkeypatch):
  p, state, _ = kept
  synced, fsync = [], os.fsync

  def noted(descriptor):
    synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}"))
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", noted)
  writer = LocalWriter(local_checkpoint_options(p.config), epath.Path(tmp_path))
  writer.save(2, state, {"rows": np.arange(2)})
  writer.close()
  assert sorted(synced[:2]) == ["/2.unfinished/parts.npz", "/2.unfinished/position.npz"]
  assert synced[2:] == ["/2.unfinished", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("size", "chunk"), [(1_000_001, 65536), pytest.param(2_300_000_000, 64 << 20, marks=pytest.mark.nightly)]
)
def test_parts_are_sent_in_chunks_to_those_that_lack_them(size, chunk):
  """Of three processes the last lacks nothing and takes no part; the large one is more than an int32 counts."""
  heard = io.StringIO()
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    command = [sys.executable, "-m", "tests.transfer_worker", str(size), str(chunk)]
    code = thread.submit(supervise, command, 3, environment=flags(devices=1), out=heard).result()
  assert code == 0, heard.getvalue()[-3000:]
  assert f"[1] has {size} bytes as they were\n" in heard.getvalue()
  assert "[2] waited for nobody\n" in heard.getvalue()


def test_a_save_that_fails_is_reported_and_the_run_goes_on(kept, tmp_path, capsys):
  p, state, folder = kept
  folder = copied(folder, tmp_path)
  writer = LocalWriter(local_checkpoint_options(p.config), folder)
  (folder / "6.unfinished").write_text("in the way")
  writer.save(6, state, {})
  writer.close()
  assert capsys.readouterr().out == (
    "maxtext: the local checkpoint of step 6 failed on process 0: File exists; it keeps 2, 4.\n"
  )


@pytest.mark.parametrize(("text", "holds"), [(None, "is not there"), ("1\n", "holds '1\\n'")])
def test_an_address_file_that_does_not_come_is_named(tmp_path, monkeypatch, text, holds):
  file = tmp_path / INIT_FILE
  if text:
    file.write_text(text)
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
  config = load_config(**KEYS, local_checkpoint_directory=str(tmp_path), jax_distributed_initialization_timeout=1)
  with pytest.raises(ConfigError) as error:
    join(config)
  assert str(error.value).startswith(f"{file} {holds} after 1 s. The orchestrator writes there the number of this")


MISTAKES = {
  "no folder": ({}, "needs local_checkpoint_directory=... to be a folder"),
  "a bucket": ({"local_checkpoint_directory": "gs://a/b"}, "needs local_checkpoint_directory=gs://a/b to be a folder"),
  "no period": ({"local_checkpoint_directory": "a", "local_checkpoint_period": 0}, "needs local_checkpoint_period"),
  "off": ({"local_checkpoint_directory": "a", "enable_emergency_checkpoint": False}, "no effect without"),
  "nothing kept": ({"local_checkpoint_directory": "a", "enable_checkpointing": False}, "asks for checkpoints"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(change, message):
  with pytest.raises(ConfigError) as error:
    load_config(**(KEYS | change), strict=True)
  assert message in str(error.value)
