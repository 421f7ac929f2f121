"""Peak numbers of accelerators, from their data sheets; all are per chip, FLOP/s are dense bfloat16 but for those of
eight bits.

A link of a TPU is one direction of one cable of the torus; each dimension of the torus has two. A GPU has one link to
all GPUs of its node: its NVLinks together, in one direction.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
  """An accelerator.

  Attributes:
    kind: JAX's `device_kind` of its devices, or a prefix of it.
    flops: operations per second.
    hbm_bytes: memory that a program may use; for TPUs what their compiler allows, for GPUs what their driver reports.
    devices: devices that JAX sees in one chip.
    cores: cores that share the work of one device.
    clock: cycles per second of the matrix units.
    hbm_bandwidth: bytes per second between the chip and its memory.
    link_bandwidth: bytes per second of one link.
    eight_bit_flops: operations per second on operands of eight bits that its matrix units take, by the beginning of
      XLA's name of their dtype.
  """

  kind: str
  flops: float
  hbm_bytes: int
  devices: int = 1
  clock: float = 0.0
  hbm_bandwidth: float = 0.0
  link_bandwidth: float = 0.0
  cores: int = 1
  eight_bit_flops: Mapping[str, float] = field(default_factory=dict)

  def peak(self, dtypes: Iterable[str]) -> float:
    """Operations per second on operands of these dtypes, by XLA's names: those of eight bits only if all are."""
    fitting = [next((f for name, f in self.eight_bit_flops.items() if d.startswith(name)), self.flops) for d in dtypes]
    return min(fitting, default=self.flops)


CHIPS = {
  "v4": Chip("TPU v4", 275e12, int(30.75 * 2**30), 1, 1.05e9, 1.2e12, 45e9, 2),
  "v5e": Chip("TPU v5 lite", 197e12, int(15.75 * 2**30), 1, 1.5e9, 0.82e12, 45e9, eight_bit_flops={"s8": 394e12}),
  "v5p": Chip("TPU v5", 459e12, 102_803_439_616, 1, 1.75e9, 2.77e12, 90e9, 2, {"s8": 918e12}),
  "v6e": Chip("TPU v6 lite", 918e12, int(31.25 * 2**30), 1, 1.75e9, 1.64e12, 90e9, eight_bit_flops={"s8": 1836e12}),
  "tpu7x": Chip("TPU7x", 2307e12, 192 * 2**30, 2, 2.2e9, 7.38e12, 100e9, eight_bit_flops={"f8": 4614e12}),
  "a100": Chip("NVIDIA A100", 312e12, 85_100_068_864, 1, 1.41e9, 2.039e12, 300e9, eight_bit_flops={"s8": 624e12}),
  "h100": Chip(
    "NVIDIA H100", 989e12, 84_942_979_072, 1, 1.98e9, 3.352e12, 450e9, eight_bit_flops={"s8": 1979e12, "f8": 1979e12}
  ),
  "h200": Chip(
    "NVIDIA H200", 989e12, 151_397_597_184, 1, 1.98e9, 4.8e12, 450e9, eight_bit_flops={"s8": 1979e12, "f8": 1979e12}
  ),
  "b200": Chip(
    "NVIDIA B200", 2250e12, 191_514_411_008, 1, 1.965e9, 7.672e12, 900e9, eight_bit_flops={"s8": 4500e12, "f8": 4500e12}
  ),
}


def find_chip(device_kind: str) -> Chip | None:
  """The chip of a device kind; None where its peak is not known, as for a CPU."""
  fitting = [chip for chip in CHIPS.values() if device_kind.lower().startswith(chip.kind.lower())]
  return max(fitting, key=lambda chip: len(chip.kind), default=None)
