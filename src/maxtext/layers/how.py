"""How a run executes a model, beside what the model is: number formats, placement, kernels, rematerialisation."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention import Attention
from maxtext.layers.cache import Rounding
from maxtext.layers.dispatch import Dispatch
from maxtext.layers.matmul import Matmul
from maxtext.layers.pages import Pages
from maxtext.layers.pipeline import Pipeline
from maxtext.layers.weight_format import PlainFormat, WeightFormat
from maxtext.mesh.explicit import is_explicit
from maxtext.mesh.rules import Rules


@dataclass(frozen=True)
class Remat:
  """What one layer keeps for its backward pass, by the names given in the layers; the rest is computed again."""

  saved: tuple[str, ...] = ()
  offloaded: tuple[str, ...] = ()


@dataclass(frozen=True)
class How:
  """Everything a layer must know of the run. Hashable: it is part of what a compiled program depends on."""

  mesh: Mesh
  rules: Rules
  dtype: Any = jnp.float32
  weight_dtype: Any = jnp.float32
  precision: str = "default"
  activations_in_float32: bool = False
  logits_dot_in_float32: bool = False
  cast_logits_to_float32: bool = True
  attention: Attention = field(default_factory=Attention)
  experts: Dispatch = field(default_factory=Dispatch)
  remat: tuple[Remat, ...] = (Remat(),)  # takes turns over the layers of a stack
  scan: bool = True
  pipelines: tuple[Pipeline | None, ...] = ()  # of the first, second, ... group of layers; none is none
  init_scale: float = 1.0
  one_hot_embedding: bool = False
  matmul: tuple[Matmul, ...] = ()  # what every matmul passes through, the first of them first
  weight_format: WeightFormat = field(default_factory=PlainFormat)
  cache_rounding: Rounding | None = None
  cache_pages: Pages | None = None  # of rings that reach all the way back; None gives each row its own
  cache_kernel: bool = False  # steps of one token per row read and write the cache by the kernel for TPUs
  cache_block: int | None = None  # most places that a step reads at once, as far as rows have come; None is any number
  cache_ahead: int = 0  # tokens behind the last of a text that a cache may hold and that others take the place of

  def partition(self, shape: tuple[int, ...], *axes: str | None) -> PartitionSpec:
    """How an array with these named dimensions is split over the mesh."""
    return self.rules.partition(self.mesh, axes, shape)

  def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the compiler where an activation lives, or moves it there where shardings are types."""
    if self.mesh.size == 1:
      return x
    place = jax.sharding.reshard if self.explicit else jax.lax.with_sharding_constraint
    return place(x, NamedSharding(self.mesh, self.partition(x.shape, *axes)))

  @property
  def fused_attention(self) -> str | None:
    """The setting by which a kernel does attention's matmuls itself; None is none."""
    if self.attention.fused:
      return f"attention kernel {self.attention.kernel!r}"
    if self.cache_kernel:
      return "How.cache_kernel"
    return "How.cache_pages.kernel" if self.cache_pages is not None and self.cache_pages.kernel else None

  @property
  def explicit(self) -> bool:
    """Whether shardings are part of types."""
    return is_explicit(self.mesh)
