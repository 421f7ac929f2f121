"""Eight CPU devices for every test; a test that wants one takes the first."""

import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests run tiny programs once: compiling them in a fifth of the time matters more than how fast they run.
_QUICK = ["--xla_backend_optimization_level=0"]
if version("jax").startswith("0.10."):  # later ones have no other emitters, and end on a flag that they do not know
  _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(["--xla_force_host_platform_device_count=8", *_QUICK])
