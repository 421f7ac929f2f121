"""Which of JAX's platforms a command may ask for."""

import importlib.util
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_GOOGLE = "0x1ae0"
_NO_TPU = {"0x001f", "0x0042"}  # Google's disks and network cards
_TOLD = ("JAX_FORCE_TPU_INIT", "MEGASCALE_", "TPU_")
_TOLD_OF_NONE = "TPU_SKIP_MDS_QUERY"  # JAX sets it where it finds no TPU, and processes inherit it


def leave_out_absent_tpu(environment: MutableMapping[str, str], root: Path = Path("/")) -> None:
  """Has JAX take the CPU at once where nothing else can be there.

  With libtpu installed, to plan with, JAX would ask it for devices, which it looks for at length and complains of.
  Where anything hints at a TPU, or another accelerator's plugin is installed, JAX chooses, and says what it has to say.
  """
  if "JAX_PLATFORMS" in environment or importlib.util.find_spec("libtpu") is None:
    return
  if importlib.util.find_spec("jax_plugins") is not None or any(
    name.startswith(_TOLD) and name != _TOLD_OF_NONE for name in environment
  ):
    return
  if not any(_tpu_hints(root)):
    environment["JAX_PLATFORMS"] = "cpu"


def _tpu_hints(root: Path) -> Iterator[bool]:
  yield any(root.glob("dev/accel*"))
  yield any(root.glob("dev/vfio/[0-9]*"))
  for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
    try:
      yield vendor.read_text().strip() == _GOOGLE and (vendor.parent / "device").read_text().strip() not in _NO_TPU
    except OSError:  # whatever it is, it is not said to be none
      yield True
