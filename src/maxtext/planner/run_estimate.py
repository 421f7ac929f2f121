"""Estimate of a whole run: days, chip-hours, money, goodput, and how often to save a checkpoint."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

# Published for 54 days on 16,384 accelerators: 419 unexpected interruptions (The Llama 3 Herd of Models, 3.3.4).
INTERRUPTIONS_PER_CHIP_HOUR = 419 / (54 * 24 * 16_384)

_HOUR, _DAY = 3600.0, 86_400.0


@dataclass(frozen=True)
class RunEstimate:
  """A run of many steps on hardware with failures.

  Attributes:
    tokens: of the whole run.
    step_seconds, tokens_per_step, chips: from the plan.
    checkpoint_bytes: parameters and optimizer state.
    storage_bandwidth: bytes per second at which all hosts together write or read a checkpoint.
    restart_seconds: from a failure to the first step, but for reading the checkpoint.
    interruptions_per_chip_hour: failures of a chip, or of its host and network, that end the run.
    blocked_share: share of the time to write a checkpoint during which training waits; the rest is asynchronous.
    price: of a chip-hour; None leaves money out.
  """

  tokens: float
  step_seconds: float
  tokens_per_step: int
  chips: int
  checkpoint_bytes: int
  storage_bandwidth: float = 50e9
  restart_seconds: float = 300.0
  interruptions_per_chip_hour: float = INTERRUPTIONS_PER_CHIP_HOUR
  blocked_share: float = 0.05
  price: float | None = None

  @property
  def steps(self) -> int:
    """The number of steps for all tokens."""
    return -int(-self.tokens // self.tokens_per_step)

  @property
  def seconds_between_interruptions(self) -> float:
    """The mean time between interruptions of the whole run."""
    return _HOUR / (self.interruptions_per_chip_hour * self.chips)

  @property
  def write_seconds(self) -> float:
    """Time to write or read one checkpoint."""
    return self.checkpoint_bytes / self.storage_bandwidth

  @property
  def save_every_seconds(self) -> float:
    """The optimal checkpoint period (Young 1974, Daly 2006), but no shorter than a save takes."""
    blocked = self.blocked_share * self.write_seconds
    return max(sqrt(2 * blocked * self.seconds_between_interruptions), self.write_seconds)

  @property
  def checkpoint_period(self) -> int:
    """The optimal checkpoint period in steps."""
    return max(round(self.save_every_seconds / self.step_seconds), 1)

  @property
  def goodput(self) -> float:
    """The share of the time that goes into steps that are not lost.

    An interruption costs half a period, the unfinished save, the restart and the reading of the checkpoint.
    """
    period = self.checkpoint_period * self.step_seconds
    saving = self.blocked_share * self.write_seconds / period
    lost = (period / 2 + 2 * self.write_seconds + self.restart_seconds) / self.seconds_between_interruptions
    return 1 / (1 + saving + lost)

  @property
  def days(self) -> float:
    """From the first step to the last, with interruptions."""
    return self.steps * self.step_seconds / self.goodput / _DAY

  @property
  def chip_hours(self) -> float:
    """Chips times hours, with interruptions."""
    return self.days * 24 * self.chips

  @property
  def money(self) -> float | None:
    """The price of all chip-hours; None without a price."""
    return None if self.price is None else self.chip_hours * self.price

  def as_json(self) -> dict[str, Any]:
    """The estimate as JSON values."""
    return {
      "tokens": self.tokens,
      "steps": self.steps,
      "days": self.days,
      "chip_hours": self.chip_hours,
      "money": self.money,
      "checkpoint_bytes": self.checkpoint_bytes,
      "checkpoint_seconds": self.write_seconds,
      "checkpoint_period": self.checkpoint_period,
      "hours_between_interruptions": self.seconds_between_interruptions / _HOUR,
      "goodput": self.goodput,
    }

  def as_text(self) -> str:
    """The estimate as a few lines of text."""
    cost = "" if self.money is None else f", {self.money:,.0f} at {self.price:g} a chip and hour"
    length = f"{self.days:,.1f} days" if self.days >= 2 else f"{self.days * 24:.2f} hours"
    return "\n".join(
      [
        f"whole run    {self.tokens:.3g} tokens in {self.steps:,} steps, {length}, "
        f"{self.chip_hours:,.0f} chip-hours{cost}",
        f"checkpoints  {self.checkpoint_bytes / 1e9:,.0f} GB, {self.write_seconds:,.0f} s at "
        f"{self.storage_bandwidth / 1e9:g} GB/s; best saved every {self.checkpoint_period:,} steps "
        f"({self.checkpoint_period * self.step_seconds / 60:,.1f} minutes)",
        f"goodput      {self.goodput:.1%}, with an interruption every "
        f"{self.seconds_between_interruptions / _HOUR:,.1f} hours",
      ]
    )
