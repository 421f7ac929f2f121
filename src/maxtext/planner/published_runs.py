"""Training runs that others published, with their keys, compiler flags and step times: what plans are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from maxtext.configs import ConfigError
from maxtext.configs.errors import did_you_mean
from maxtext.mesh.topology import Topology

# Flags that libtpu 0.0.42 does not take for one program: of the process, or of other releases.
NOT_COMPILER_OPTIONS = frozenset(
  {
    "2a886c8_chip_config_name",
    "TPU_MEGACORE",
    "xla_sc_disjoint_spmem",
    "xla_tpu_impure_enable_packed_bf16_math_ops",
    "xla_tpu_impure_use_lmr_on_gxc",
  }
)


@dataclass(frozen=True)
class PublishedRun:
  """A published run.

  Attributes:
    topology: of one slice, as `compile_topology` names it.
    tokens: per step, of all chips.
    step_seconds: as published, or `derived` from the published speed.
    keys: its configuration.
    flags: what its compiler got.
    other_keys: keys that it had and the specification does not have.
    superseded: its publisher replaced or removed it.
    inconsistent: its published figures contradict each other.
    source: repository, commit and file.
  """

  id: str
  topology: str
  tokens: int
  step_seconds: float
  keys: Mapping[str, Any]
  flags: Mapping[str, Any]
  source: str
  slices: int = 1
  derived: bool = False
  superseded: bool = False
  inconsistent: bool = False
  other_keys: Mapping[str, Any] | None = None

  @property
  def chip(self) -> str:
    """The name of the chip."""
    return Topology.named(self.topology).name

  @property
  def chips(self) -> int:
    """Whole chips, in all slices."""
    return Topology.named(self.topology, self.slices).chips

  @property
  def tokens_per_second_per_chip(self) -> float:
    """Its throughput."""
    return self.tokens / self.step_seconds / self.chips

  @property
  def planned_keys(self) -> dict[str, Any]:
    """The keys with which it is planned."""
    flags = {name: value for name, value in self.flags.items() if name not in NOT_COMPILER_OPTIONS}
    return {
      "use_hidden_router_gradient": False,  # this project's own; what they ran computed the experts' outputs again
      **self.keys,
      "override_model_config": True,
      "dataset_type": "synthetic",
      "compile_topology": self.topology,
      "compile_topology_num_slices": self.slices,
      "compile_xla_flags": " ".join(f"--{name}={_flag_value(value)}" for name, value in flags.items()),
    }

  def as_json(self) -> dict[str, Any]:
    """What was published, as JSON values."""
    return {
      "id": self.id,
      "step_seconds": self.step_seconds,
      "tokens_per_step": self.tokens,
      "tokens_per_second_per_chip": self.tokens_per_second_per_chip,
      "derived": self.derived,
      "superseded": self.superseded,
      "inconsistent": self.inconsistent,
      "source": self.source,
    }


@cache
def published_runs() -> Mapping[str, PublishedRun]:
  """All of them, by id."""
  data = yaml.load((files("maxtext.planner") / "published_runs.yml").read_text(), yaml.CSafeLoader)
  return {
    run["id"]: PublishedRun(**run | {"keys": group["keys"], "flags": data["flags"].get(run.get("flags"), {})})
    for group in data["configurations"]
    for run in group["runs"]
  }


def published_run(name: str) -> PublishedRun:
  """The run with this id; `ConfigError` if there is none."""
  runs = published_runs()
  if name not in runs:
    raise ConfigError(
      f"--published {name} is not a published run.{did_you_mean(name, runs)} `maxtext plan --published` lists them."
    )
  return runs[name]


def as_table() -> str:
  """All runs as lines of text."""
  rows = [("run", "chips", "tokens a step", "step", "tokens/s/chip", "")]
  rows += [
    (r.id, f"{r.chips:,}", f"{r.tokens:,}", f"{r.step_seconds:.2f} s", f"{r.tokens_per_second_per_chip:,.0f}", note(r))
    for r in published_runs().values()
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  return "\n".join(
    "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
    for row in rows
  )


def note(run: PublishedRun) -> str:
  """What must be known of a run's figures; empty if nothing."""
  notes = {
    "superseded": run.superseded,
    "time from the published speed": run.derived,
    "published figures contradict each other": run.inconsistent,
  }
  return ", ".join(note for note, holds in notes.items() if holds)


def _flag_value(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)
