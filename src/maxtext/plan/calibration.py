"""What the compiler and the data sheets do not say, per chip."""

from maxtext.plan.estimate import Calibration

CALIBRATION = {name: Calibration() for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")}
