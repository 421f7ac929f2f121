"""Configurations that are planned to beat published runs: what counts as a win, and what is written of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planned_run import CompiledPart, PlannedRun
from benchmarks.wins import (
  AIM,
  NOT_OF_THE_STEP,
  RECIPES,
  SPARE,
  Attempt,
  Contest,
  contests,
  recipe_text,
  table,
  tried_table,
)
from maxtext.configs.loader import resolve
from maxtext.planner.calibration import CALIBRATION
from maxtext.planner.published_runs import published_run
from maxtext.planner.schedule import Schedule, Work

RUN = published_run("v6e-8-mistral-7b-8k-bf16-20250321")
MEMORY = 31.25 * 2**30
OF_A_PLAN = {"compile_topology", "compile_topology_num_slices", "compile_xla_flags"}


def planned(run, seconds, share=0.5):
  """A run whose step takes so long, by the planner's constants."""
  host = Work("host transfer", "", "host", "", "host", 3e9, transfer="a", starts=True, ends=True)
  took = CALIBRATION[run.chip].host
  matmul = Work("fusion", "", "compute", "", "matmul", (seconds - 3e9 / took) * CALIBRATION[run.chip].matmul)
  return PlannedRun(run, [CompiledPart(1.0, 1, int(share * MEMORY), 60.0, Schedule(1, [host, matmul]))], quick=True)


def attempt(name, seconds, share=0.5, tokens=RUN.tokens):
  made = Attempt(replace(RUN, id=f"{RUN.id}-{name}", tokens=tokens), {"steps": 1}, "it is small")
  made.__dict__["planned"] = planned(made.run, seconds, share)
  return made


def contest(*attempts):
  made = Contest(RUN, "", attempts)
  made.__dict__["theirs"] = planned(RUN, 6.0)
  return made


def test_the_fastest_that_leaves_memory_free_wins():
  quick, slow, full = attempt("a", 5.0), attempt("b", 5.5), attempt("c", 4.0, 1 - SPARE / 2)
  found = contest(slow, full, quick)
  assert found.best is quick
  assert found.gain(quick) == pytest.approx(0.2)
  assert found.gain_on_publication(quick) == pytest.approx(RUN.step_seconds / 5 - 1)
  assert found.winner is quick
  assert "+20.0%" in table([found])
  assert "it is small" in table([found])
  assert tried_table([found]).count("`steps=1`") == 3


def test_what_is_not_faster_does_not_win():
  assert contest(attempt("a", 6.5)).best is None
  near = contest(attempt("a", 6.0 / (1 + AIM / 2)))
  assert near.best
  assert not near.winner


def test_times_are_those_of_as_many_tokens():
  half = attempt("half", 3.5, tokens=RUN.tokens // 2)
  assert contest(half).seconds(half) == pytest.approx(7)
  assert contest(half).best is None


def test_the_page_and_the_recipes_are_those_of_what_is_kept():
  every, page = contests(), Path("docs/planner-wins.md").read_text()
  assert table(every) in page
  assert tried_table(every) in page
  for one in every:
    assert one.attempts or one.limit, one.run.id
    assert all(tried.planned for tried in one.attempts), one.run.id
    if one.recipe:
      assert one.winner, one.run.id
      assert (RECIPES / f"{one.recipe}.yml").read_text() == recipe_text(one, one.winner)


@pytest.mark.parametrize("recipe", [one.recipe for one in contests() if one.recipe])
def test_a_recipe_is_what_was_planned(recipe):
  (best,) = (one.best for one in contests() if one.recipe == recipe)
  ours, planned_ = resolve(recipe, values={"dataset_type": "synthetic"}).config, best.run.planned_keys
  theirs = resolve(values=planned_).config
  of_the_step = planned_.keys() - OF_A_PLAN - NOT_OF_THE_STEP
  if theirs.num_experts == 1:
    of_the_step -= {"use_hidden_router_gradient"}
  assert not {key for key in of_the_step if getattr(ours, key) != getattr(theirs, key)}
