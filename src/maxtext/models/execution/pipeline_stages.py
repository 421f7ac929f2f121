"""From keys to pipelines: which layers of a model run in pipeline stages, and with which schedule."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import global_batch_size
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.pipeline import AXIS, Pipeline
from maxtext.models.spec import DecoderSpec


def pipelines(config: MaxTextConfig, spec: DecoderSpec, execution: ExecutionConfig) -> tuple[Pipeline | None, ...]:
  """One entry per group of layers. The largest group is pipelined; the others (None) run before and after it."""
  stages = execution.sharding.mesh.shape.get(AXIS, 1)
  if stages == 1:
    return ()
  largest = max(range(len(spec.groups)), key=lambda i: spec.groups[i].repeats * len(spec.groups[i].cycle))
  group = spec.groups[largest]
  pipeline = _pipeline(config, execution, stages, len(group.cycle), group.repeats)
  return tuple(pipeline if i == largest else None for i in range(len(spec.groups)))


def _pipeline(config: MaxTextConfig, execution: ExecutionConfig, stages: int, cycle: int, repeats: int) -> Pipeline:
  c = config
  per_stage, requested = c.num_layers_per_pipeline_stage, c.pipeline_parallel_layers
  layers = cycle * repeats if requested == -1 else requested
  over = f"{stages} stages x num_layers_per_pipeline_stage={per_stage}"
  if per_stage < 1 or per_stage % (cycle * len(execution.remat)):
    raise ConfigError(
      f"num_layers_per_pipeline_stage={per_stage} must be a multiple of {cycle * len(execution.remat)}: this model's "
      f"layers go round a cycle of {cycle}"
      + (f", and {len(execution.remat)} remat policies take turns." if execution.remat[1:] else ".")
    )
  if not 0 < layers <= cycle * repeats or layers % (stages * per_stage):
    raise ConfigError(
      f"pipeline_parallel_layers={requested}: {layers} of {cycle * repeats} layers cannot be dealt to {over} in whole "
      f"rounds; take a multiple of {stages * per_stage} up to {cycle * repeats}."
    )
  rounds = layers // (stages * per_stage)
  if c.num_pipeline_repeats not in (-1, rounds):
    raise ConfigError(f"num_pipeline_repeats={c.num_pipeline_repeats}, but {layers} layers over {over} are {rounds}.")
  delay = 2 if c.pipeline_delay_activation_forwarding else 1
  least, micro = delay * stages, c.num_pipeline_microbatches
  count = least if micro == -1 else micro
  rows = global_batch_size(c, execution.sharding.mesh.size) // c.gradient_accumulation_steps
  groups = execution.sharding.rules.num_shards(execution.sharding.mesh, "activation_batch")
  if count < least:
    raise ConfigError(f"num_pipeline_microbatches={count} must be at least {least}, to keep {stages} stages busy.")
  if rows % (count * groups):
    raise ConfigError(
      f"num_pipeline_microbatches={count}: {rows} sequences of a batch cannot be cut into {count} parts for {groups} "
      f"groups of devices: make per_device_batch_size a multiple of {count * groups / execution.sharding.mesh.size:g}."
    )
  return Pipeline(stages, count, per_stage // cycle, layers // cycle, delay, c.pipeline_fsdp_ag_once)
