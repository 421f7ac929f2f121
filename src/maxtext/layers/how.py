"""How a run executes a model, beside what the model is: number formats, placement, kernels, rematerialisation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention import Attention
from maxtext.layers.cache import Rounding
from maxtext.layers.dispatch import Dispatch
from maxtext.layers.make import Make
from maxtext.layers.pages import Pages
from maxtext.layers.pipeline import Pipeline
from maxtext.mesh.explicit import is_explicit
from maxtext.mesh.rules import Rules


@dataclass(frozen=True)
class Remat:
  """What one layer keeps for its backward pass, by the names given in the layers; the rest is computed again."""

  saved: tuple[str, ...] = ()
  offloaded: tuple[str, ...] = ()


Product = Callable[[jax.Array, jax.Array], jax.Array]


class LinearHook(Protocol):
  """Something that changes every product of a weight and an activation: LoRA, quantization.

  Attributes:
    name: stands in the paths of its variables.
  """

  @property
  def name(self) -> str: ...

  def variables(self, make: Make, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> dict[str, nnx.Variable]:
    """Variables to keep beside the weight."""
    ...

  def __call__(self, product: Product, own: Mapping[str, nnx.Variable], x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes the output; `product(x, weight)` is the plain one, or the next hook's. Buffers may be assigned to."""
    ...


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
  linear_hooks: tuple[LinearHook, ...] = ()
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
  def explicit(self) -> bool:
    """Whether shardings are part of types."""
    return is_explicit(self.mesh)
