"""Eight CPU devices for every test; a test that wants one takes the first."""

import os

from tests.flags import flags

os.environ |= {"JAX_PLATFORMS": "cpu"} | flags(devices=8)
