"""Calibration for each chip: what the compiler and the data sheets leave out; see `docs/planner.md`."""

from collections.abc import Mapping

from maxtext.planner.estimate import Calibration

CALIBRATION: Mapping[str, Calibration] = {
  "v4": Calibration(),
  "v5e": Calibration(),
  # compute: the compiler counts more cycles than a published run of 65 % of peak on 64 chips can have taken.
  # grouped: a published run of experts at 2,909 tokens/s/chip, if it kept what the recipe for it keeps.
  "v5p": Calibration(compute=0.88, grouped=0.82, measured=True),
  # compute: a published run of 7,207 tokens/s/chip on 256 chips, if it computed all layers again.
  "v6e": Calibration(compute=0.83, measured=True),
  "tpu7x": Calibration(),
  # GPUs: kernel, matmul, memory and link are assumptions. The network is a card for each GPU, of 200 or 400 Gbit/s.
  "a100": Calibration(link=0.8, between_slices=25e9),
  "h100": Calibration(link=0.8, between_slices=50e9),
  "h200": Calibration(link=0.8, between_slices=50e9),
  "b200": Calibration(link=0.8, between_slices=50e9),
}
