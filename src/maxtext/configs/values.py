"""Values of keys: defaults, how they are written, and which values exist."""

from enum import Enum
from typing import Any

from maxtext.configs.types import MaxTextConfig, RematPolicy

ATTENTION_KERNELS = ("autoselected", "dot_product", "chunked", "flash", "cudnn_flash_jax", "paged")
"""Values of `attention`."""

ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid")
"""Values of `mlp_activations`; `layers/mlp.py` has their functions."""

MESH_AXES = (
  "data", "fsdp", "fsdp_transpose", "tensor", "tensor_transpose", "tensor_sequence", "sequence", "context", "expert",
  "pipeline", "diloco",
)  # fmt: skip
"""Axes that a mesh can have, as `ici_*_parallelism` and `dcn_*_parallelism` name them."""

STORES = ("gs",)
"""Schemes of the buckets that Orbax reads and writes."""


def default_of(key: str) -> Any:
  """The default of a key."""
  return MaxTextConfig.model_fields[key].get_default(call_default_factory=True)


def plain_value(value: Any) -> Any:
  """A value as the user writes it."""
  return value.value if isinstance(value, Enum) else value


def in_bucket(path: str) -> bool:
  """Whether a path is in an object store (`gs://...`) and not on a file system."""
  return "://" in path


def policy_names(remat_policy: str) -> list[str]:
  """The names that `remat_policy` lists, known or not."""
  return [name.strip() for name in remat_policy.split(",")]


def remat_policies(remat_policy: str) -> tuple[RematPolicy, ...]:
  """The policies that take turns over the layers, from the value of the key."""
  return tuple(RematPolicy(name) for name in policy_names(remat_policy))
