"""A run's configuration: typed, validated, frozen. Knows no devices, no environment and no JAX."""

from maxtext.configs.errors import ConfigError
from maxtext.configs.loader import load_config
from maxtext.configs.types import MaxTextConfig

__all__ = ["ConfigError", "MaxTextConfig", "load_config"]
