"""Eight CPU devices for every test; a test that wants one takes the first."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests run tiny programs once: compiling them in a fifth of the time matters more than how fast they run.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
