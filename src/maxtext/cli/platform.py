"""The JAX platform of a command, and the quiet of the libraries below it."""

import importlib.util
import logging
import pkgutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_GOOGLE = "0x1ae0"
_NOT_TPU_DEVICES = {"0x001f", "0x0042"}  # Google's disks and network cards
_TPU_VARIABLES = ("JAX_FORCE_TPU_INIT", "MEGASCALE_", "TPU_")
# Set where there is no TPU too, by JAX and by `quiet_libraries`, and inherited by processes.
_NO_TPU_VARIABLES = ("TPU_SKIP_MDS_QUERY", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")
_GPU_DEVICES = ("dev/nvidia*", "dev/nvhost*", "dev/dxg")  # of servers, of Jetson, of Windows
_LOG_LEVELS = ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")
ERRORS, FATAL = "2", "3"
"""Levels of the C++ libraries below JAX, of which less is not shown."""


def leave_out_absent_accelerators(environment: MutableMapping[str, str], root: Path = Path("/")) -> None:
  """Makes JAX use the CPU at once where there can be no accelerator.

  With libtpu installed for the planner, JAX would search for TPUs for a long time and log warnings; with the CUDA
  plugin, it would log a traceback. Where anything hints at a TPU or a GPU, or another plugin is installed, JAX chooses.
  """
  plugins = _plugins()
  if "JAX_PLATFORMS" in environment or not (plugins or importlib.util.find_spec("libtpu")):
    return
  if any(not name.startswith("xla_cuda") for name in plugins) or any(
    name.startswith(_TPU_VARIABLES) and name not in _NO_TPU_VARIABLES for name in environment
  ):
    return
  if not any(_tpu_hints(root)) and not any(place for glob in _GPU_DEVICES for place in root.glob(glob)):
    environment["JAX_PLATFORMS"] = "cpu"


def quiet_libraries(environment: MutableMapping[str, str], level: str = ERRORS) -> None:
  """Leaves out what libraries write beside what they raise: notes and warnings of XLA, libtpu and gRPC, and the
  tracebacks that gcsfs logs for every request that failed.

  For a command that only compiles, `level` is FATAL: errors of the compiler are raised, and what it logs as errors
  beside them are alarms that it is slow.

  Call it before JAX is imported. Variables that the user has set win (`TF_CPP_MIN_LOG_LEVEL=0` shows XLA's notes), and
  so do `GCSFS_DEBUG` and the levels of loggers that a program has set.
  """
  for name in _LOG_LEVELS:
    environment.setdefault(name, level)
  environment.setdefault("GRPC_VERBOSITY", "ERROR")
  logger = logging.getLogger("gcsfs")
  if logger.level == logging.NOTSET and "GCSFS_DEBUG" not in environment:
    logger.setLevel(logging.CRITICAL)


def _plugins() -> list[str]:
  """The installed plugins of JAX, but for libtpu."""
  found = importlib.util.find_spec("jax_plugins")
  places = found.submodule_search_locations if found else None
  return [module.name for module in pkgutil.iter_modules(places or [])]


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
