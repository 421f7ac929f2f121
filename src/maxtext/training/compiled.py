"""A compiled step in a file: made where there is no accelerator, used where there is one.

The file is a zip: `about.json` says what the step was compiled from and for, `executable` is what the compiler made. It
holds machine code, so take it from nobody you would not take a program from.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.training.program import Program

# Where a run is, and what it is called; no step depends on it.
_ELSEWHERE = ("compiled_trainstep_file", "compile_topology", "compile_topology_num_slices", "run_name")


def save(program: Program, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, path: Path) -> None:
  """Writes a step that was lowered from this program."""
  executable, _, _ = serialize_executable.serialize(compiled)
  about = _about(program, lowered) | {"config": _values(program.config)}
  with zipfile.ZipFile(path, "w") as file:
    file.writestr("about.json", json.dumps(about, indent=1))
    file.writestr("executable", executable)


def load(program: Program, path: Path) -> Any:
  """The step, to be called instead of compiling; an error if it was compiled from or for something else."""
  try:
    with zipfile.ZipFile(path) as file:
      about, executable = json.loads(file.read("about.json")), file.read("executable")
  except (OSError, KeyError, zipfile.BadZipFile, json.JSONDecodeError) as error:
    raise ConfigError(f"compiled_trainstep_file={path} cannot be read: {error}") from error
  lowered = program.lower()
  here, there = _about(program, lowered), about
  if different := [
    f"{what}: {there.get(what)} there, {now} here" for what, now in here.items() if there.get(what) != now
  ]:
    raise ConfigError(f"compiled_trainstep_file={path} is another step. {_named(program.config, about, different)}")
  inputs, outputs = jax.tree.structure((program.arguments, {})), lowered.out_tree
  devices = list(program.model.execution.sharding.mesh.devices.flat)
  return serialize_executable.deserialize_and_load(executable, inputs, outputs, execution_devices=devices)


def _about(program: Program, lowered: jax.stages.Lowered) -> dict[str, str]:
  mesh = program.model.execution.sharding.mesh
  device = mesh.devices.flat[0]
  text = re.sub(r"loc\(.*?\)|@jit_\w+", "", lowered.as_text())
  return {
    "devices": f"{mesh.size} x {device.device_kind}",
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "program": hashlib.sha256(text.encode()).hexdigest()[:16],
  }


def _values(config: MaxTextConfig) -> dict[str, Any]:
  return {key: value for key, value in config.model_dump(mode="json").items() if key not in _ELSEWHERE}


def _named(config: MaxTextConfig, about: dict[str, Any], different: list[str]) -> str:
  now, then = _values(config), about.get("config", {})
  keys = [f"{key}={then.get(key)} there, {value} here" for key, value in now.items() if then.get(key) != value]
  return "; ".join([*different, *keys]) + ". Compile it again, or leave compiled_trainstep_file out."
