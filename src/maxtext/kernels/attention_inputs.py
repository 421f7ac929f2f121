"""The arrays that self-attention takes, and how they are sharded, as the kernels pass them on.

Shapes: B batch, S sequence, H query heads, K key heads, D head dim.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention_mask import Tokens


class AttentionInputs(NamedTuple):
  """Queries, keys and values of the same tokens. A pytree.

  Attributes:
    q: [B,S,H,D]; `k` and `v`: [B,S,K,D].
    tokens: positions, segments and spans of the tokens, [B,S] each.
    sinks: [H] a learned logit per head; None for a model without attention sinks.
    selected: [B,1 or H,S,S] whether a query may see a key; None lets it see all that the mask allows.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  tokens: Tokens
  sinks: jax.Array | None = None
  selected: jax.Array | None = None


@dataclass(frozen=True)
class AttentionSharding:
  """The mesh, and the partition of queries and of keys and values over it."""

  mesh: Mesh
  q_spec: PartitionSpec
  kv_spec: PartitionSpec

  @property
  def output(self) -> NamedSharding:
    """The sharding of the output, which is that of the queries."""
    return NamedSharding(self.mesh, self.q_spec)

  def partition(self, inputs: AttentionInputs) -> Any:
    """A partition in the place of each array, as `in_specs` of `shard_map`; not for selected keys."""
    assert inputs.selected is None
    tokens = jax.tree.map(lambda _: PartitionSpec(*self.q_spec[:2]), inputs.tokens)
    sinks = None if inputs.sinks is None else PartitionSpec(self.q_spec[2])
    specs: list[Any] = [self.q_spec, self.kv_spec, self.kv_spec, tokens, sinks]
    return AttentionInputs(*specs)


def match_kv_heads(inputs: AttentionInputs, sharding: AttentionSharding) -> tuple[AttentionInputs, AttentionSharding]:
  """The same with key heads sharded like the query heads.

  Where there are too few key heads to be sharded over as many devices, each query head gets a copy of its own.
  """
  if sharding.q_spec[2] == sharding.kv_spec[2]:
    return inputs, sharding
  k, v = (jnp.repeat(x, inputs.q.shape[2] // x.shape[2], axis=2) for x in (inputs.k, inputs.v))
  return inputs._replace(k=k, v=v), replace(sharding, kv_spec=sharding.q_spec)
