"""What this machine has for a run: versions, extras, devices, memory, disk, and the speed of a matmul."""

import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maxtext.mesh.memory import device_memory, host_memory
from maxtext.observe.run_directory import library_versions, nearest_folder

# What each extra brings, by a module that only it needs.
EXTRAS = {
  "tpu": "libtpu",
  "cuda": "jax_cuda13_plugin",
  "serve": "uvicorn",
  "hf": "transformers",
  "gcs": "gcsfs",
  "tfds": "tensorflow_datasets",
  "prepare": "apache_beam",
  "rl": "math_verify",
  "eval": "lm_eval",
  "wandb": "wandb",
  "mlflow": "mlflow",
  "multimodal": "soundfile",
  "video": "av",
}
_MATMUL_SECONDS = 2.0
_WIDTH = 1024


@dataclass(frozen=True)
class Finding:
  """One line of the examination; `advice` says what to do about it, and is empty where nothing is wrong."""

  subject: str
  text: str
  advice: str = ""


def examine(folder: Path) -> Iterator[Finding]:
  """Findings, each as soon as it is known; the last ones load JAX. Runs would be written to `folder`."""
  versions = library_versions()
  yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
  yield Finding("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
  for extra, module in EXTRAS.items():
    there = importlib.util.find_spec(module) is not None
    yield Finding(f"extra {extra}", "installed" if there else f"not installed: pip install 'maxtext[{extra}]'")
  yield Finding("host memory", f"{host_memory() / 1e9:.1f} GB")
  yield _disk(folder)
  yield from _devices()


def _disk(folder: Path) -> Finding:
  there = nearest_folder(folder)
  free = shutil.disk_usage(there).free
  if not os.access(there, os.W_OK):
    return Finding("disk", f"{there} cannot be written", "set base_output_directory to a folder that you may write to")
  advice = "set base_output_directory to a larger disk" if free < 1e9 else ""
  return Finding("disk", f"{free / 1e9:.1f} GB free in {there}", advice)


def _devices() -> Iterator[Finding]:
  import jax

  try:
    devices = jax.devices()
  except RuntimeError as error:
    advice = "set JAX_PLATFORMS=cpu to run without it, or end the process that holds it"
    yield Finding("devices", str(error).splitlines()[0], advice)
    return
  kinds = sorted({device.device_kind for device in devices})
  yield Finding("devices", f"{len(devices)} {devices[0].platform} ({', '.join(kinds)})")
  if limit := device_memory(devices[0]):
    yield Finding("device memory", f"{limit / 1e9:.1f} GB each")
  for dtype in ("float32", "bfloat16"):
    yield Finding(f"matmul {dtype}", f"{_matmul_flops(dtype) / 1e12:.3g} TFLOP/s on one device ({_WIDTH} x {_WIDTH})")


def _matmul_flops(dtype: str) -> float:
  import jax
  import jax.numpy as jnp

  multiply = jax.jit(jnp.matmul)
  x = jnp.ones((_WIDTH, _WIDTH), dtype)
  multiply(x, x).block_until_ready()
  start, count = time.perf_counter(), 0
  while time.perf_counter() - start < _MATMUL_SECONDS:
    multiply(x, x).block_until_ready()
    count += 1
  return 2 * _WIDTH**3 * count / (time.perf_counter() - start)
