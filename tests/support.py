"""The tiny Llama that most tests share, and short ways to run it."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext import MaxTextConfig, load_config
from maxtext.data.batch import Batch
from maxtext.mesh.devices import make_mesh
from maxtext.training.callbacks.base import Callback
from maxtext.training.loop import run_loop
from maxtext.training.program import Program

TINY: dict[str, Any] = {
  "vocab_size": 128,
  "base_emb_dim": 48,
  "base_mlp_dim": 80,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "normalization_layer_epsilon": 1e-5,
  "rope_type": "llama3.1",
  "rope_max_timescale": 500000,
  "rope_factor": 8,
  "original_max_position_embeddings": 32,
  "max_target_length": 32,
  "per_device_batch_size": 8,
  "dataset_type": "synthetic",
  "dtype": "float32",
  "jax_cache_dir": "",
  "enable_checkpointing": False,
  "base_output_directory": str(Path(tempfile.gettempdir()) / "maxtext-tests"),
}


def tiny(**changes: Any) -> MaxTextConfig:
  return load_config(**(TINY | changes))


def program(config: MaxTextConfig, devices: int = 1) -> Program:
  return Program.of(config, make_mesh(config, jax.devices()[:devices]))


class History(Callback):
  """Keeps what every step reported."""

  def __init__(self) -> None:
    self.figures: list[dict[str, float]] = []

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    self.figures.append(figures)

  @property
  def losses(self) -> np.ndarray:
    return np.array([f["loss"] for f in self.figures])


def losses(config: MaxTextConfig, devices: int = 1) -> np.ndarray:
  p, history = program(config, devices), History()
  run_loop(p.step, p.init(), p.feed(), range(config.steps), [history])
  return history.losses


def random_batch(config: MaxTextConfig, rows: int = 2, seed: int = 0, segments: np.ndarray | None = None) -> Batch:
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, config.vocab_size, (rows, config.max_target_length + 1), dtype=np.int32)
  positions = np.broadcast_to(np.arange(config.max_target_length, dtype=np.int32), (rows, config.max_target_length))
  weights = rng.uniform(0.5, 1.5, positions.shape).astype(np.float32)
  return Batch(tokens[:, :-1], tokens[:, 1:], positions, segments, weights)
