"""A callback of your own: keep the losses, and stop when they no longer fall.

python examples/callback.py
"""

from collections.abc import Callable
from typing import Any

import maxtext


class EarlyStopping(maxtext.Callback):
  """Ends the run when the mean loss of `window` steps is no lower than that of the `window` steps before."""

  def __init__(self, window: int) -> None:
    self.window, self.losses = window, list[float]()

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    """After every step, with its metrics; the devices already work on the next one."""
    self.losses.append(metrics["loss"])

  def due(self, step: int) -> bool:
    """Whether `on_update` is called after this step. The devices wait for it, so not after every step."""
    return step % self.window == 0 and step >= 2 * self.window

  def on_update(
    self, step: int, state: maxtext.TrainState, position: Callable[[], Any], metrics: dict[str, float]
  ) -> bool:
    """With the state of this step; its metrics may be added to. True ends the run, with a checkpoint."""
    losses = [*self.losses, metrics["loss"]]  # `on_step` of this step comes after
    before, now = losses[-2 * self.window : -self.window], losses[-self.window :]
    metrics["improvement"] = (sum(before) - sum(now)) / self.window
    return metrics["improvement"] <= 0


stopping = EarlyStopping(window=10)
config = maxtext.load_config(
  run_name="stopped_early",
  base_emb_dim=32,
  base_mlp_dim=64,
  base_num_decoder_layers=1,
  base_num_query_heads=2,
  base_num_kv_heads=2,
  head_dim=16,
  vocab_size=64,
  max_target_length=32,
  per_device_batch_size=4,
  dataset_type="synthetic",
  dtype="float32",
  learning_rate=3e-2,
  steps=500,
)
state = maxtext.train(config, callbacks=[stopping])
print(f"ended after step {int(state.step)} of {config.steps}, loss {stopping.losses[-1]:.3f}")
