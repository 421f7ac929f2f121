"""Held-out loss of quantized training, and of QAT for weights at rest, beside bfloat16, on the quick start's text.

  maxtext data prepare stdlib-llama --stdlib --train-tokenizer --to data/stdlib
  python -m benchmarks.quantization data/stdlib

Every row is the same run of `stdlib-llama` but for its format: the same steps, data and initial values.
"""

import argparse
import tempfile
from typing import Any

from benchmarks.figures import show
from maxtext import Callback, load_config, train

DELAYED = {f"{operand}_quantization_calibration_method": "delayed" for operand in ("act", "weight")}
FORMATS: dict[str, dict[str, Any]] = {
  "bfloat16": {},
  "int8": {"quantization": "int8"},
  "fp8, dynamic": {"quantization": "fp8"},
  "fp8, static": {"quantization": "fp8_full"},
  "fp8, delayed": {"quantization": "fp8"} | DELAYED,
  "QAT, int8 weights": {"weight_format": "int8"},
  "QAT, int4 weights": {"weight_format": "int4", "weight_block_size": 64},  # the model's widths divide by 64
  "QAT, nvfp4 weights": {"weight_format": "nvfp4"},
}


class LastEvaluation(Callback):
  """Keeps the last held-out loss."""

  loss = float("nan")

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    """Called after every step."""
    self.loss = figures.get("eval_loss", self.loss)


def held_out_loss(data: str, steps: int, keys: dict[str, Any]) -> float:
  """After a run with these keys."""
  last = LastEvaluation()
  with tempfile.TemporaryDirectory() as folder:
    run = {"steps": steps, "eval_interval": steps, "enable_checkpointing": False, "dtype": "bfloat16"}
    config = load_config("stdlib-llama", grain_train_files=data, base_output_directory=folder, **run | keys)
    train(config, callbacks=[last])
  return last.loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("data", help="folder of `maxtext data prepare`")
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--only", nargs="*", choices=FORMATS, help="rows")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  args = parser.parse_args()
  rows = {name: FORMATS[name] for name in args.only or FORMATS}
  show({name: held_out_loss(args.data, args.steps, keys) for name, keys in rows.items()}, args.json)


if __name__ == "__main__":
  main()
