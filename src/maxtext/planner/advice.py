"""What would make a planned step faster, in words: only what the plan's own numbers support."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from maxtext.planner.plan import Plan

WORTH_MENTIONING = 0.05  # of the step
_PER_WEIGHT = {"data", "fsdp", "fsdp_transpose"}  # axes over which weights and gradients travel, whatever the batch
_PER_TOKEN = {"tensor", "tensor_sequence", "stage"}  # axes over which activations travel; over the others, either


def advice(plan: "Plan") -> list[str]:
  """At most three sentences, that of the largest share first; none if the step does not fit or was not compiled."""
  if plan.estimate is None or not plan.fits:
    return []
  found = sorted((*_collectives(plan), *_recomputation(plan), *_optimizer(plan)), reverse=True)
  return [f"{share:.0%} {text}" for share, text in found if share >= WORTH_MENTIONING][:3]


def _collectives(plan: "Plan") -> Iterator[tuple[float, str]]:
  assert plan.estimate is not None
  waits: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
  for o in plan.estimate.operations:
    if o.kind == "collective":
      what = f"{o.name}, {o.label}"
      waits[o.axes][what] = waits[o.axes].get(what, 0.0) + o.seconds
  if not waits:
    return
  axes, parts = max(waits.items(), key=lambda wait: sum(wait[1].values()))
  way = ""
  if axes and set(axes) <= _PER_WEIGHT:
    way = f": a larger per_device_batch_size{_room(plan)} hides more of them, since their bytes do not grow with it"
  elif axes and set(axes) <= _PER_TOKEN:
    way = f": their bytes grow with the batch, and fall with fewer devices along {' and '.join(axes)}"
  text = (
    f"of the step waits for collectives over {', '.join(axes) or 'all'}, most for {max(parts, key=parts.__getitem__)}"
  )
  yield sum(parts.values()) / plan.estimate.seconds, text + way


def _recomputation(plan: "Plan") -> Iterator[tuple[float, str]]:
  if plan.estimate and plan.policy:
    name, size = plan.policy
    free = plan.memory.there - plan.memory.peak
    yield (
      plan.estimate.recomputed_share,
      f"of the chip's time is recomputation, and {free / 2**30:.3g} GiB are free: remat_policy={name} would keep about "
      f"{size / 2**30:.3g} GiB more in memory",
    )


def _optimizer(plan: "Plan") -> Iterator[tuple[float, str]]:
  if plan.estimate:
    seconds = sum(
      o.seconds for o in plan.estimate.operations if o.label == "optimizer update" and o.kind in ("compute", "kernel")
    )
    yield (
      seconds / plan.estimate.seconds,
      f"of the step is the optimizer update, the same for any batch: a larger per_device_batch_size{_room(plan)} or "
      "gradient_accumulation_steps make it rarer",
    )


def _room(plan: "Plan") -> str:
  """Whether a batch of twice the size has room, if temporaries grow as much."""
  return " (twice fits)" if plan.memory.peak + plan.memory.temporaries <= plan.memory.there else ""
