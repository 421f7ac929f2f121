"""How a run executes a model, as opposed to what the model is: numerics, sharding, kernels, rematerialization,
pipelines, KV cache, and the implementation of matmuls."""

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention import AttentionKernel
from maxtext.layers.expert_dispatch import ExpertDispatch
from maxtext.layers.kv_cache import KVCacheQuantization
from maxtext.layers.matmul import Matmul
from maxtext.layers.paged_kv_cache import PagedKVCache
from maxtext.layers.pipeline import Pipeline
from maxtext.layers.weight_format import PlainFormat, WeightFormat
from maxtext.mesh.explicit import is_explicit
from maxtext.mesh.reduce_scatter import reduce_scatter_gradient
from maxtext.mesh.rules import LogicalAxis, Rules

# Logical axes of tokens, over whose mesh axes gradients of weights are summed.
_TOKENS: tuple[LogicalAxis, ...] = ("activation_batch", "activation_length")


@dataclass(frozen=True)
class Numerics:
  """Dtypes and precisions.

  Attributes:
    dtype: of activations and matmuls.
    weight_dtype: of stored parameters.
    precision: of matmuls, as `jax.lax` takes it.
    init_scale: multiplies the variance of initial weights.
  """

  dtype: Any = jnp.float32
  weight_dtype: Any = jnp.float32
  precision: str = "default"
  activations_in_float32: bool = False
  logits_dot_in_float32: bool = False
  cast_logits_to_float32: bool = True
  init_scale: float = 1.0


@dataclass(frozen=True)
class Sharding:
  """The device mesh, and the table from logical axes to mesh axes.

  Attributes:
    reduce_scatter: gradients of layers' weights are scattered over one part of the torus after the other.
  """

  mesh: Mesh
  rules: Rules
  reduce_scatter: bool = False

  def partition(self, shape: tuple[int, ...], *axes: str | None) -> PartitionSpec:
    """The partition of an array with these logical axes over the mesh."""
    return self.rules.partition(self.mesh, axes, shape)

  def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation, or reshards it under explicit sharding."""
    if self.mesh.size == 1:
      return x
    place = jax.sharding.reshard if self.explicit else jax.lax.with_sharding_constraint
    return place(x, NamedSharding(self.mesh, self.partition(x.shape, *axes)))

  def with_scattered_gradient(self, weight: jax.Array, *axes: str | None) -> jax.Array:
    """A weight whose gradient is reduce-scattered, if that is asked for."""
    if not self.reduce_scatter or self.mesh.size == 1:
      return weight
    summed = {axis for name in _TOKENS for axis in self.rules.mesh_axes(name)}
    return reduce_scatter_gradient(weight, self.mesh, self.partition(weight.shape, *axes), summed)

  @property
  def explicit(self) -> bool:
    """Whether the mesh has explicit axes, so that shardings are part of types."""
    return is_explicit(self.mesh)


@dataclass(frozen=True)
class Kernels:
  """Which implementation of an operation runs.

  Attributes:
    experts: how tokens reach their experts, with the grouped matmuls.
    one_hot_embedding: embeds tokens by a matmul with one-hot rows instead of a gather.
    decode_attention: steps of one token per row read and write the KV cache by the Pallas kernel for TPUs.
  """

  attention: AttentionKernel = field(default_factory=AttentionKernel)
  experts: ExpertDispatch = field(default_factory=ExpertDispatch)
  one_hot_embedding: bool = False
  decode_attention: bool = False


@dataclass(frozen=True)
class RematSpec:
  """What one layer saves for its backward pass, by the names given in the layers; the rest is recomputed."""

  saved: tuple[str, ...] = ()
  offloaded: tuple[str, ...] = ()


@dataclass(frozen=True)
class KVCacheConfig:
  """How KV caches are stored and read.

  Attributes:
    quantization: of keys and values; None stores them in the dtype of activations.
    pages: the pool that rows share, for layers that attend to all earlier tokens; None gives each row its own ring.
    block: most positions that a decode step reads at once; None reads a row whole.
    parts: of the rows, which a step that reads blocks attends to side by side, if they can be divided so.
    speculative_tokens: slots after a row's last token for draft tokens.
  """

  quantization: KVCacheQuantization | None = None
  pages: PagedKVCache | None = None
  block: int | None = None
  parts: int = 1
  speculative_tokens: int = 0


@dataclass(frozen=True)
class ExecutionConfig:
  """Everything that layers need to know about the run. Hashable: a compiled program depends on it.

  Attributes:
    remat: policies that alternate over the layers of a stack.
    scan_layers: loops over stacked layers by `jax.lax.scan`; otherwise the loop is unrolled.
    batch_split: parts of the batch that each layer runs on (`batch_split.py`); 1 is no split.
    pipelines: of the first, second, ... group of layers; empty without pipeline parallelism.
    matmul: implementations that every matmul passes through, the outermost first.
    weight_format: which arrays are stored for a weight.
    tower_dtype: of activations and matmuls in towers; None is the decoder's.
    tower_remat: what a tower's layers save; None is what the decoder's first do.
    dropout_rate: share of activations zeroed where a call has dropout keys, as in training; 0 is no dropout.
    keep_mixer_outputs: layers return the output of their attention or other mixer as an auxiliary output.
    keep_routed_experts: layers return the experts that their router selected as an auxiliary output.
    measure_activations: layers return the root mean square of what their branches add to the residual, and of the
      residual, as auxiliary outputs.
  """

  sharding: Sharding
  numerics: Numerics = field(default_factory=Numerics)
  kernels: Kernels = field(default_factory=Kernels)
  remat: tuple[RematSpec, ...] = (RematSpec(),)
  scan_layers: bool = True
  batch_split: int = 1
  pipelines: tuple[Pipeline | None, ...] = ()
  kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
  matmul: tuple[Matmul, ...] = ()
  weight_format: WeightFormat = field(default_factory=PlainFormat)
  tower_dtype: Any = None
  tower_remat: RematSpec | None = None
  dropout_rate: float = 0.0
  keep_mixer_outputs: bool = False
  keep_routed_experts: bool = False
  measure_activations: bool = False

  def splits_batch(self, rows: int) -> bool:
    """Whether layers run on parts of a batch of so many rows: if every part has as many rows of each device."""
    shards = self.sharding.rules.num_shards(self.sharding.mesh, "activation_batch")
    return self.batch_split > 1 and rows % (self.batch_split * shards) == 0

  @property
  def fused_attention(self) -> str | None:
    """The setting that selects a fused attention kernel, which does its own matmuls; None if there is none."""
    if self.kernels.attention.fused:
      return f"attention kernel {self.kernels.attention.kernel!r}"
    if self.kernels.decode_attention:
      return "Kernels.decode_attention"
    return "PagedKVCache.kernel" if self.kv_cache.pages is not None and self.kv_cache.pages.kernel else None

  def replace(self, **changes: Any) -> "ExecutionConfig":
    """A copy with other values of its fields, or of fields of its parts, whose names are unique among them."""
    own: dict[str, Any] = {}
    of_parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
      part = _PART_OF.get(name)
      if part is None:
        own[name] = value
      else:
        of_parts.setdefault(part, {})[name] = value
    parts = {part: dataclasses.replace(own.get(part, getattr(self, part)), **inner) for part, inner in of_parts.items()}
    return dataclasses.replace(self, **own | parts)


_PARTS = {"sharding": Sharding, "numerics": Numerics, "kernels": Kernels, "kv_cache": KVCacheConfig}
_PART_OF = {field.name: part for part, kind in _PARTS.items() for field in fields(kind)}
