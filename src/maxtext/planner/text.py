"""A plan as text for a terminal."""

from collections.abc import Sequence

from maxtext.planner.plan import Plan
from maxtext.planner.published_runs import PublishedRun, note

_GIB = 2**30


def as_text(plan: Plan) -> str:
  """The plan as a few lines of text."""
  if not plan.compiled:
    return "\n".join([*_head(plan), *_memory(plan), *_lower_bound(plan)])
  return "\n".join(
    [*_head(plan), *_memory(plan), *_time(plan), *_rollouts(plan), f"compiled here in {plan.compile_seconds:.0f} s"]
  )


def compared_with(plan: Plan, run: PublishedRun, changed: Sequence[str] = ()) -> list[str]:
  """Lines that set a plan beside the published run that it is of, of which the user may have `changed` keys."""
  about = f" ({found})" if (found := note(run)) else ""
  lines = [
    f"published    {run.step_seconds:.2f} s, {run.tokens_per_second_per_chip:,.0f} tokens/s/chip{about}: {run.source}"
  ]
  if plan.estimate and plan.tokens == run.tokens:
    ratio = plan.estimate.seconds / run.step_seconds
    other = f", with other {', '.join(changed)}" if changed else ""
    lines.append(f"             the planned step is {abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'}{other}")
  elif plan.estimate:
    lines.append(f"             of {run.tokens:,} tokens a step: not the plan's batch, so the times do not compare")
  if run.other_keys:
    lines.append(f"             without keys that are not of MaxText's specification: {', '.join(run.other_keys)}")
  return lines


def _head(plan: Plan) -> list[str]:
  axes = " x ".join(f"{name}={size}" for name, size in plan.axes.items()) or "one device"
  return [f"{plan.model} on {plan.topology}: {plan.chips:,} chips ({axes}), {plan.tokens:,} tokens a step"]


def _memory(plan: Plan) -> list[str]:
  m = plan.memory
  bound, fits = ("", "fits") if plan.compiled else ("at least ", "may fit")
  verdict = (
    fits if m.peak <= m.there else "DOES NOT FIT: more chips, fewer sequences per device, or a stricter remat_policy"
  )
  parts = {"parameters": m.parameters, "optimizer": m.optimizer, "batch": m.batch, "temporaries": m.temporaries}
  return [
    f"memory       {bound}{m.peak / _GIB:.1f} of {m.there / _GIB:.1f} GiB per device: {verdict}",
    "             " + ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items()),
  ]


def _lower_bound(plan: Plan) -> list[str]:
  speed = plan.tokens / plan.chips / plan.least_seconds
  unit, scale = _unit(plan.least_seconds)
  return [
    f"time a step  at least {plan.least_seconds * scale:.2f} {unit}, at most {speed:,.0f} tokens/s/chip: the model's "
    f"{plan.model_flops:.3g} operations a step and chip at {plan.peak_flops / 1e12:,.0f} TFLOP/s (bfloat16)",
    f"not compiled: there is no compiler for {plan.topology} here (pip install 'maxtext[cuda]'); memory is what "
    "shapes say of state, gradients and tensors that layers keep, and recomputation and collectives take time besides",
  ]


def _time(plan: Plan) -> list[str]:
  e = plan.estimate
  if e is None:
    return []
  unit, scale = _unit(e.seconds)
  kinds = {kind: seconds * scale for kind, seconds in e.seconds_by_kind().items()}
  host = f", for the host {kinds['host']:.2f}" if kinds["host"] else ""
  lines = [
    f"time a step  {e.seconds * scale:.2f} {unit}: compute {kinds['compute']:.2f}, kernels {kinds['kernel']:.2f}, "
    f"waiting for collectives {kinds['collective']:.2f}{host}; {e.recomputed_share:.1%} is recomputation",
    f"speed        {plan.tokens_per_second_per_chip:,.0f} tokens/s/chip, {plan.mfu:.1%} of "
    f"{plan.peak_flops / 1e12:,.0f} TFLOP/s (bfloat16), the model's {plan.model_flops:.3g} operations a step and chip",
    *([f"accuracy     {plan.accuracy.as_text()}"] if plan.accuracy else []),
    "collectives  bytes a step and chip",
  ]
  for (kind, axes), moved in plan.collectives().items():
    lines.append(f"  {moved / 1e9:9.2f} GB  {kind} over {', '.join(axes) or 'all'}")
  lines.append("most expensive")
  operations = plan.most_expensive()
  label, name = (max((len(getattr(o, field)) for o in operations), default=0) for field in ("label", "name"))
  for o in operations:
    share = f"{o.seconds * scale:7.3f} {unit}  {o.seconds / e.seconds:5.1%}"
    lines.append(f"  {share}  {o.label:{label}}  {o.name:{name}}  {o.source}".rstrip())
  if advice := plan.advice():
    lines += ["advice       by these numbers; --search tries such changes", *(f"  {sentence}" for sentence in advice)]
  return lines


def _rollouts(plan: Plan) -> list[str]:
  r = plan.rollouts
  if r is None:
    return []
  verdict = "fits" if r.fits else "DOES NOT FIT: fewer answers at once (max_num_seqs), or more devices that generate"
  where = f"on {r.devices} devices of their own" if r.separate_devices else "on the same devices, beside the state"
  needed, there, cache = (size / _GIB for size in (r.needed_bytes, r.memory_bytes, r.cache))
  sync = f"{r.sync_bytes / 1e9:.2f} GB to each device, {r.sync_seconds:.3f} s" if r.separate_devices else "none"
  turns = "at the same time" if r.overlaps else "in turns"
  idle = f"trainer idle {r.trainer_idle:.0%}, sampler idle {r.sampler_idle:.0%}"
  return [
    f"rollouts     {r.answers:,} answers of {r.answer_tokens:,} tokens, {r.slots:,} at once, {where}",
    f"             {needed:.1f} of {there:.1f} GiB per device: {verdict}; KV cache {cache:.2f}",
    f"             {r.seconds:.2f} s: {r.decode_step_seconds * 1e3:.2f} ms a token, prompts {r.prefill_seconds:.2f} s",
    f"weight sync  {sync}",
    f"a batch      {r.batch_seconds:.2f} s, {turns}: {idle}; not calibrated",
  ]


def _unit(seconds: float) -> tuple[str, float]:
  """The unit for the times of a step that takes so long, and how many there are in a second."""
  return ("s", 1.0) if seconds >= 0.05 else ("ms", 1e3)
