"""Features that keys add to a decoder of any family, as changes of its spec: MoBA, QK-clip, MTP, engrams and others."""

import math
from collections.abc import Callable
from dataclasses import replace

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block, Layer
from maxtext.layers.engram import EngramMemory
from maxtext.layers.hyper_connections import HyperConnections
from maxtext.layers.mla import MLA
from maxtext.layers.moba import MoBA
from maxtext.layers.mtp import MultiTokenPrediction
from maxtext.layers.norm import RMSNormSpec
from maxtext.models.spec import DecoderSpec, Group


def with_features(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  """The spec with all features that the keys enable."""
  for feature in (_with_moba, _with_qk_clip, _with_hyper_connections, _with_mtp, _with_engrams):
    spec = feature(config, spec)
  return spec


def _with_moba(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  if not config.moba:
    return spec
  blocks = MoBA(config.moba_chunk_size, config.moba_topk)

  def change(block: Block) -> Block:
    if not isinstance(block.mixer, GQA):
      raise _incompatible(config, "moba=true", "whose layers do not attend to keys that could be cut into blocks")
    return replace(block, mixer=replace(block.mixer, blocks=blocks))

  return _each_block(config, spec, "moba=true", change)


def _with_qk_clip(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  if not config.use_qk_clip:
    return spec

  def change(block: Block) -> Block:
    mixer = block.mixer
    if not isinstance(mixer, GQA | MLA):
      return block
    if isinstance(mixer, GQA) and (mixer.qk_norm is not None or mixer.fused):
      raise _incompatible(
        config, "use_qk_clip=true", "whose queries and keys are normed, or one matmul with the values"
      )
    return replace(block, mixer=replace(mixer, tracked=True))

  return _each_block(config, spec, "use_qk_clip=true", change)


def _with_hyper_connections(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  count = config.mhc_expansion_rate
  if count == 1:
    return spec
  streams = HyperConnections(count, config.sinkhorn_iterations)
  changed = _each_block(config, spec, f"mhc_expansion_rate={count}", lambda block: replace(block, streams=streams))
  return replace(changed, streams=count)


def _with_mtp(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  count = config.mtp_num_layers
  if count == 0:
    return spec
  last = spec.groups[-1].cycle[-1]
  if spec.streams > 1 and isinstance(last, Block):  # MTP layers take the output of the final norm, which has one stream
    last = replace(last, streams=None)
  return replace(spec, mtp=MultiTokenPrediction(count, last, spec.final_norm))


def _with_engrams(config: MaxTextConfig, spec: DecoderSpec) -> DecoderSpec:
  c, layers = config, sorted(set(config.engram_layers))
  if not layers:
    return spec
  taken: set[int] = set()
  tables = {number: _primes(c.engram_vocab_bases, c.engram_num_heads, taken) for number in layers}

  def change(number: int, layer: Layer) -> Block:
    if not isinstance(layer, Block):
      raise _incompatible(config, f"engram_layers={c.engram_layers}", "whose layers have no place for it")
    seed = c.engram_seed + 10007 * number
    norm = RMSNormSpec(c.normalization_layer_epsilon)
    memory = EngramMemory(tables[number], c.engram_head_dim, c.engram_kernel_size, seed, norm, spec.streams)
    return replace(layer, memory=memory)

  count = sum(len(group.cycle) * group.repeats for group in spec.groups)
  if layers[0] < 0 or layers[-1] >= count:
    raise ConfigError(f"engram_layers={c.engram_layers} must be from 0 to {count - 1}, the model's last layer.")
  return replace(spec, groups=_with_layers(spec.groups, layers, change))


def _with_layers(
  groups: tuple[Group, ...], numbers: list[int], change: Callable[[int, Layer], Block]
) -> tuple[Group, ...]:
  """The groups with some layers changed; consecutive repeats that stay equal remain one group."""
  found: list[Group] = []
  first = 0
  for group in groups:
    for repeat in range(group.repeats):
      numbered = enumerate(group.cycle, first)
      cycle = tuple(change(number, layer) if number in numbers else layer for number, layer in numbered)
      first += len(cycle)
      if repeat and found[-1].cycle == cycle:
        found[-1] = replace(found[-1], repeats=found[-1].repeats + 1)
      else:
        found.append(Group(cycle, 1))
  return tuple(found)


def _primes(bases: list[int], heads: int, taken: set[int]) -> tuple[tuple[int, ...], ...]:
  """For each base, the next `heads` primes from it on that are not taken; adds them to `taken`."""
  tables = []
  for base in bases:
    primes: list[int] = []
    size = base
    while len(primes) < heads:
      if size not in taken and size > 1 and all(size % d for d in range(2, math.isqrt(size) + 1)):
        primes.append(size)
        taken.add(size)
      size += 1
    tables.append(tuple(primes))
  return tuple(tables)


def _each_block(config: MaxTextConfig, spec: DecoderSpec, what: str, change: Callable[[Block], Block]) -> DecoderSpec:
  def changed(layer: Layer) -> Block:
    if not isinstance(layer, Block):
      raise _incompatible(config, what, "whose layers are not two branches beside a residual")
    return change(layer)

  groups = (replace(group, cycle=tuple(map(changed, group.cycle))) for group in spec.groups)
  return replace(spec, groups=tuple(groups))


def _incompatible(config: MaxTextConfig, what: str, why: str) -> ConfigError:
  return ConfigError(f"{what} does not go with decoder_block={config.decoder_block.value}, {why}: leave it out.")
