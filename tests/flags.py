"""How XLA compiles what tests run; of use before JAX is imported, and for processes that a test starts."""

from importlib.metadata import version

# Tests run tiny programs once: compiling them in a fifth of the time matters more than how fast they run.
_QUICK = ["--xla_backend_optimization_level=0"]
if version("jax").startswith("0.10."):  # later ones have no other emitters, and end on a flag that they do not know
  _QUICK.append("--xla_cpu_use_fusion_emitters=false")


def flags(devices: int = 1) -> dict[str, str]:
  """The variable of the environment for so many CPU devices."""
  return {"XLA_FLAGS": " ".join([f"--xla_force_host_platform_device_count={devices}", *_QUICK])}
