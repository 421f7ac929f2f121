"""The experts that all layers of a decoder select for a token, as one vector of numbers.

A vector has K numbers for each layer of every group that has experts, in the order of the layers. A number is negative
in the place of a layer without experts, and where it is not known.

Shapes: B batch, S sequence, N numbers of a vector, R repeats of a cycle of layers, L layers of a group, K experts of a
token.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxtext.layers.router import ROUTED_EXPERTS
from maxtext.layers.stack import Report
from maxtext.models.spec import Group

DTYPE = jnp.int16


def vector_size(groups: Sequence[Group]) -> int:
  """Numbers of a vector; 0 where no layer has experts."""
  return sum(layers * experts for layers, experts in map(_shape, groups))


def as_vectors(auxiliary: Sequence[Sequence[Report]]) -> jax.Array:
  """The vectors [B,S,N] of tokens, from the auxiliary outputs of a decoder with `keep_routed_experts`."""
  found = []
  for cycle in auxiliary:
    selected = [layer.get(ROUTED_EXPERTS) for layer in cycle]
    known = next((one for one in selected if one is not None), None)  # [R,B,S,K]
    if known is not None:
      layers = jnp.stack([jnp.full_like(known, -1) if one is None else one for one in selected], axis=1)
      found.append(jnp.moveaxis(layers, (2, 3), (0, 1)).reshape(*known.shape[1:3], -1))
  return jnp.concatenate(found, axis=-1).astype(DTYPE)


def of_groups(groups: Sequence[Group], vectors: jax.Array) -> list[jax.Array | None]:
  """The experts [B,S,L,K] of each group; None for one without experts."""
  found: list[jax.Array | None] = []
  first = 0
  for layers, experts in map(_shape, groups):
    own = vectors[..., first : first + layers * experts]
    found.append(own.reshape(*own.shape[:2], layers, experts) if experts else None)
    first += layers * experts
  return found


def _shape(group: Group) -> tuple[int, int]:
  """Layers of a group, and the experts that each of them selects for a token."""
  counts = {getattr(layer.feed_forward, "experts_per_token", 0) for layer in group.cycle} - {0}
  assert len(counts) <= 1, "the layers of a cycle select equally many experts"
  return group.repeats * len(group.cycle), counts.pop() if counts else 0
