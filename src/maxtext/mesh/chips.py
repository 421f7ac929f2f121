"""What a chip can do, from its maker's data sheet; figures are per chip, arithmetic is dense bfloat16."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
  """An accelerator.

  Attributes:
    kind: how JAX names a device of it, or how that name begins.
    flops: operations per second.
    hbm_bytes: memory.
    devices: devices that JAX sees in one chip.
  """

  kind: str
  flops: float
  hbm_bytes: int
  devices: int = 1


CHIPS = {
  "v4": Chip("TPU v4", 275e12, 32 * 2**30),
  "v5e": Chip("TPU v5 lite", 197e12, 16 * 2**30),
  "v5p": Chip("TPU v5", 459e12, 102_803_439_616),
  "v6e": Chip("TPU v6 lite", 918e12, 32 * 2**30),
  "tpu7x": Chip("TPU7x", 2307e12, 192 * 2**30, devices=2),
  "a100": Chip("NVIDIA A100", 312e12, 80 * 2**30),
  "h100": Chip("NVIDIA H100", 989e12, 80 * 2**30),
  "h200": Chip("NVIDIA H200", 989e12, 141 * 10**9),
  "b200": Chip("NVIDIA B200", 2250e12, 192 * 10**9),
}


def chip_of(device_kind: str) -> Chip | None:
  """The chip that a device of this kind belongs to; None where its peak is not known, as for a CPU."""
  fitting = [chip for chip in CHIPS.values() if device_kind.lower().startswith(chip.kind.lower())]
  return max(fitting, key=lambda chip: len(chip.kind), default=None)
