"""Sixteen CPU devices for every test; a test that wants one takes the first."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests run tiny programs once: compiling them quickly matters more than how fast they run.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
