"""Weights in and out: folders of Hugging Face, both ways, whole, interrupted, quantized and straight into a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from maxtext.checkpoint.restore import load_parameters
from maxtext.checkpoint.stream import StreamReader
from maxtext.cli.main import main
from maxtext.configs.loader import load_config
from maxtext.models.build import abstract_model
from maxtext.train.run import train
from maxtext.weights.description import find_model
from maxtext.weights.folder import Folder
from maxtext.weights.incoming import load_in
from maxtext.weights.tensor_files import header, write_whole
from tests.support import program
from tests.test_parity import CASES, RUN, Reference, configure, every_case

pytestmark = pytest.mark.parity
LENGTH = {"max_target_length": RUN["max_target_length"]}


def words(case, **changes):
  return [f"{key}={json.dumps(value)}" for key, value in (CASES[case]["keys"] | LENGTH | changes).items()]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
  found = {}

  def of(case):
    if case not in found:
      found[case] = Reference(case, tmp_path_factory.mktemp(case))
    return found[case]

  return of


@pytest.fixture(scope="session")
def tiny(references):
  """The folder that most tests here convert."""
  return references("llama").folder / "weights"


def contents(folder):
  return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def parameters(folder):
  """Every array of a checkpoint of parameters, whole."""
  reader = StreamReader(epath.Path(folder))
  names = {name.removeprefix("params/"): array for name, array in reader.record.arrays.items()}
  found = {name: reader.read(name, (), len(array.shape)) for name, array in names.items()}
  reader.check(reader.take_sums())
  return found


def write_folder(folder, tensors, config):
  """A folder as others make them."""
  folder.mkdir()
  about = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
  write_whole(folder / "model.safetensors", [header(about), *(tensor.tobytes() for tensor in tensors.values())])
  (folder / "config.json").write_text(json.dumps(config))


@every_case
def test_there_and_back(case, references, tmp_path):
  """transformers loads what goes out and says the same; what comes in again is the same to the bit."""
  transformers = pytest.importorskip("transformers")
  reference = references(case)
  came, went, again = tmp_path / "came", tmp_path / "went", tmp_path / "again"
  assert main(["convert", "from-hf", str(reference.folder / "weights"), str(came), *words(case)]) == 0
  assert main(["convert", "to-hf", str(came), str(went), "--shard-gigabytes", "1e-4"]) == 0
  assert len(list(went.glob("*.safetensors"))) > 1
  model = transformers.AutoModelForCausalLM.from_pretrained(went, attn_implementation="eager", dtype="float32")
  assert type(model).__name__ == CASES[case]["reference"]["model"]
  np.testing.assert_array_equal(reference.run(model.eval()).detach().numpy(), reference.logits)
  assert main(["convert", "from-hf", str(went), str(again), *words(case)]) == 0
  first, second = parameters(came), parameters(again)
  assert first.keys() == second.keys()
  for name, value in first.items():
    assert value.tobytes() == second[name].tobytes(), name


def test_a_run_starts_from_what_was_converted(references, tiny, tmp_path):
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "params"), *words("llama")]) == 0
  config = configure("llama", ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
  model = program(config, 4).model
  found = load_parameters(config, "load_parameters_path", str(tmp_path / "params"), model.params)
  straight = load_in(config, model, str(tiny))
  assert found.keys() == straight.keys()
  for name, value in found.items():
    assert straight[name].sharding == value.sharding == model.struct(name).sharding
    np.testing.assert_array_equal(straight[name], value, err_msg=name)


def test_a_run_starts_from_a_folder(references, tiny, tmp_path):
  """One step from a folder, and the same step from the checkpoint that was made of it."""
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "params"), *words("llama")]) == 0
  after = []
  for path, layout in ((tiny, "safetensors"), (tmp_path / "params", "orbax")):
    keys = {"steps": 1, "enable_checkpointing": False, "base_output_directory": str(tmp_path / layout)}
    start = {"load_parameters_path": str(path), "source_checkpoint_layout": layout}
    after.append(train(configure("llama", ici_fsdp_parallelism=-1, **keys, **start)).params)
  fresh = program(configure("llama")).init().params
  for name, value in after[0].items():
    np.testing.assert_array_equal(value, after[1][name], err_msg=name)
    assert np.abs(np.asarray(value) - np.asarray(fresh[name])).max() > 1e-3, name


def test_a_checkpoint_of_a_run_goes_out(tmp_path):
  """Also one whose layers are not stacked first, and in fewer bits."""
  transformers = pytest.importorskip("transformers")
  config = configure("llama", steps=1, run_name="r", base_output_directory=str(tmp_path))
  state = train(config)
  run = str(tmp_path / "r")
  assert main(["convert", "to-hf", run, str(tmp_path / "hf")]) == 0
  expected = contents(tmp_path / "hf")
  for key in ("force_unroll=true", "param_scan_axis=1"):
    out = tmp_path / key
    assert main(["checkpoint", "export-params", run, str(out), key]) == 0
    assert main(["convert", "to-hf", str(out), str(tmp_path / f"hf {key}")]) == 0
    assert contents(tmp_path / f"hf {key}") == expected
  assert main(["convert", "to-hf", run, str(tmp_path / "low"), "weight_dtype=bfloat16"]) == 0
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype="auto")
  table = model.get_input_embeddings().weight
  assert str(table.dtype) == "torch.bfloat16"
  np.testing.assert_array_equal(
    table.float().detach().numpy(), np.asarray(state.params["embedding/table"]).astype(ml_dtypes.bfloat16).astype("f4")
  )


_STOPPED = """
import os, signal, sys
from maxtext.cli import convert, display, main
class Stops:
  def say(self, line): pass
  def close(self): pass
  def progress(self, count, all_count, size, all_size):
    if 2 * size > all_size: os.kill(os.getpid(), signal.SIGKILL)
convert.open_display = lambda piece: Stops()
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("way", ["from-hf", "to-hf"])
def test_a_killed_conversion_goes_on(way, tiny, tmp_path, capsys):
  """Nothing has the target's name before all of it is there; what was finished is kept; the result is the same."""
  source, extra = tiny, words("llama")
  if way == "to-hf":
    source, extra = tmp_path / "params", ["--shard-gigabytes", "2e-5"]
    assert main(["convert", "from-hf", str(tiny), str(source), *words("llama")]) == 0
  assert main(["convert", way, str(source), str(tmp_path / "whole"), *extra]) == 0
  out = tmp_path / "out"
  command = [sys.executable, "-c", _STOPPED, "convert", way, str(source), str(out), *extra]
  assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
  assert not out.exists()
  unfinished = tmp_path / "out.unfinished"
  kept = {file.name: file.stat().st_mtime_ns for file in unfinished.glob("model-*.safetensors")}
  assert len((unfinished / "journal").read_text().splitlines()) > 1
  with open(unfinished / "journal", "a") as journal:
    journal.write('{"name": "half a li')
  assert main(["convert", way, str(source), str(out), *extra]) == 0
  assert not unfinished.exists()
  if way == "to-hf":
    assert kept
    assert contents(out) == contents(tmp_path / "whole")
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}
  else:
    whole, got = parameters(tmp_path / "whole"), parameters(out)
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in got.items()}
