"""The JAX platform of a command."""

import importlib.util
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_GOOGLE = "0x1ae0"
_NOT_TPU_DEVICES = {"0x001f", "0x0042"}  # Google's disks and network cards
_TPU_VARIABLES = ("JAX_FORCE_TPU_INIT", "MEGASCALE_", "TPU_")
_NO_TPU_VARIABLE = "TPU_SKIP_MDS_QUERY"  # JAX sets it where it finds no TPU, and processes inherit it


def leave_out_absent_tpu(environment: MutableMapping[str, str], root: Path = Path("/")) -> None:
  """Makes JAX use the CPU at once where there can be no accelerator.

  With libtpu installed for the planner, JAX would search for TPUs for a long time and log warnings. Where anything
  hints at a TPU, or another accelerator's plugin is installed, JAX chooses.
  """
  if "JAX_PLATFORMS" in environment or importlib.util.find_spec("libtpu") is None:
    return
  if importlib.util.find_spec("jax_plugins") is not None or any(
    name.startswith(_TPU_VARIABLES) and name != _NO_TPU_VARIABLE for name in environment
  ):
    return
  if not any(_tpu_hints(root)):
    environment["JAX_PLATFORMS"] = "cpu"


def _tpu_hints(root: Path) -> Iterator[bool]:
  yield any(root.glob("dev/accel*"))
  yield any(root.glob("dev/vfio/[0-9]*"))
  for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
    try:
      yield (
        vendor.read_text().strip() == _GOOGLE and (vendor.parent / "device").read_text().strip() not in _NOT_TPU_DEVICES
      )
    except OSError:  # whatever it is, it is not said to be none
      yield True
