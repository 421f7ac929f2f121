"""What a whole run takes, beside sums done by hand and a machine that fails by dice."""

import dataclasses

import numpy as np
import pytest

from maxtext.planner.run_estimate import RunEstimate

# One trillion parameters (bfloat16 weights, float32 moments would be 10 bytes each) on all chips of the largest mesh.
RUN = RunEstimate(tokens=20e12, step_seconds=30.0, tokens_per_step=2**27, chips=50_944, checkpoint_bytes=10 * 10**12)


def test_sums_by_hand():
  run = dataclasses.replace(RUN, interruptions_per_chip_hour=1e-12, price=2.0)
  assert run.steps == 149_012
  assert run.write_seconds == 200
  assert run.days == pytest.approx(149_012 * 30 / 86_400, rel=1e-3), "nothing fails"
  assert run.money == pytest.approx(2 * run.days * 24 * 50_944)
  assert RUN.seconds_between_interruptions == pytest.approx(3600 / (419 / (54 * 24 * 16_384) * 50_944))


def test_the_period_is_the_best_and_the_goodput_is_that_of_dice():
  """Plays a year of failures, with saves at several periods: none beats the chosen one, and the share is as said."""

  def played(run, period):
    rng = np.random.default_rng(0)
    cycle = period + run.blocked_share * run.write_seconds
    good = total = 0.0
    for up in rng.exponential(run.seconds_between_interruptions, 20_000):
      # A save counts once it is written; what was trained after the last that did is lost.
      kept = max((up - run.write_seconds) // cycle * period, 0.0)
      good, total = good + kept, total + up + run.restart_seconds + run.write_seconds
    return good / total

  run = dataclasses.replace(RUN, storage_bandwidth=200e9)
  chosen = run.checkpoint_period * run.step_seconds
  assert played(run, chosen) == pytest.approx(run.goodput, abs=0.02)
  assert all(played(run, chosen) > played(run, chosen * factor) - 0.002 for factor in (0.5, 0.75, 1.5, 2))


def test_a_short_run_is_in_hours():
  hour = dataclasses.replace(RUN, tokens=120 * RUN.tokens_per_step, chips=4, interruptions_per_chip_hour=1e-12)
  assert "120 steps, 1.00 hours, 4 chip-hours" in hour.as_text()
  assert f"149,012 steps, {RUN.days:.1f} days" in RUN.as_text()
