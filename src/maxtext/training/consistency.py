"""What the processes of a run must have in common, compared before step 1: those that differ would train on."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import DerivedValues
from maxtext.data.batch import BatchWithState
from maxtext.distributed.agreement import agree
from maxtext.observe.run_directory import library_versions
from maxtext.training.program import Program

# Keys that each host may have to itself, and why. None of them reaches the step or the data: a test looks.
MAY_DIFFER = {
  "local_checkpoint_directory": "a folder on the host's own disk",
  "jax_cache_dir": "a folder on the host's own disk",
  "dump_hlo_local_dir": "a folder on the host's own disk",
  "dump_jaxpr_local_dir": "a folder on the host's own disk",
  "metrics_file": "process 0 alone writes it",
  "prometheus_port": "processes of one machine cannot share a port",
  "jax_profiler_port": "processes of one machine cannot share a port",
  "collect_stack_trace": "one host may be watched",
  "stack_trace_interval_seconds": "one host may be watched",
  "grain_worker_count": "hosts may have other numbers of cores, and rows do not depend on it",
  "grain_worker_count_eval": "hosts may have other numbers of cores, and rows do not depend on it",
  "hf_access_token": "it says who reads, not what is read, and is not to be shown",
}
_PATIENCE = 600  # seconds for the slowest process to trace the step and to open its data


def agree_on_start(config: MaxTextConfig) -> None:
  """Compares configuration and libraries, right after joining: processes that differ may fail, or wait, anywhere."""
  agree("start", configuration_values(config) | library_versions(), config.jax_distributed_initialization_timeout)


def agree_on_step(
  program: Program, feed: Iterator[BatchWithState], compares_data: bool = True
) -> Iterator[BatchWithState]:
  """Compares the step as it was lowered, which the first call uses, and the data's description; returns the feed. Data
  that the policy makes from tasks is not drawn for that: whoever opens the tasks compares them."""
  if jax.process_count() == 1:
    return feed
  if not compares_data:
    agree("step", step_values(program), _PATIENCE)
    return feed
  first = next(feed, None)
  agree("step", step_values(program) | data_values(first), _PATIENCE)
  return feed if first is None else itertools.chain([first], feed)


def configuration_values(config: MaxTextConfig) -> dict[str, str]:
  """Every key that must be the same everywhere; derived values follow from them."""
  values = config.model_dump(mode="json", exclude={*MAY_DIFFER, *DerivedValues.model_fields})
  return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def step_values(program: Program) -> dict[str, str]:
  """The lowered step by its digest: two texts of some megabytes would say less."""
  return {"the lowered step": hashlib.sha256(program.lower().as_text().encode()).hexdigest()[:16]}


def data_values(fed: BatchWithState | None) -> dict[str, str]:
  """What the data says of itself, by its names; synthetic data is described by its keys alone."""
  about = None if fed is None else fed.iterator_state().get("about")
  return {} if about is None else description_values(json.loads(np.asarray(about).tobytes()))


def description_values(about: Any) -> dict[str, str]:
  """A description of data, by names."""
  return dict(_flat("data", about))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
  if isinstance(value, dict) and value:
    for key, inner in value.items():
      yield from _flat(f"{name}.{key}", inner)
  elif isinstance(value, list) and value:
    for i, inner in enumerate(value):
      yield from _flat(f"{name}[{i}]", inner)
  else:
    yield name, json.dumps(value)
