"""What the compiler and the data sheets do not say, per chip; `docs/planner.md` has the runs that they come from."""

from collections.abc import Mapping

from maxtext.plan.estimate import Calibration

CALIBRATION: Mapping[str, Calibration] = {
  "v4": Calibration(),
  "v5e": Calibration(),
  # The compiler's cycles are a little high: with this factor Llama2-70B on v5p-128 comes to the published 65 %.
  "v5p": Calibration(compute=0.88),
  "v6e": Calibration(),
  "tpu7x": Calibration(),
}
