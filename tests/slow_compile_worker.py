"""A training run in which process 1 takes forty seconds longer than process 0 to compile the step.

python -m tests.slow_compile_worker FOLDER
"""

import sys
import time
from typing import Any

import jax

import maxtext
from tests.support import tiny


def delay(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
  """Sleeps behind the compiler, on process 1; Gloo waits for 30 seconds."""
  if event.endswith("backend_compile_duration") and "train_step" in fun_name and jax.process_index() == 1:
    time.sleep(40)


if __name__ == "__main__":
  jax.monitoring.register_event_duration_secs_listener(delay)
  state = maxtext.train(
    tiny(steps=2, base_num_decoder_layers=1, base_output_directory=sys.argv[1], run_name="run", jax_cache_dir="")
  )
  print(f"ended at step {int(state.step)}")
