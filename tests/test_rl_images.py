"""Rewards of answers about pictures: trainer and engine see the same ones."""

import json

import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.rl import policy_batch
from tests.support import History
from tests.test_image_training import TINY
from tests.test_image_training import folder as pictures_folder
from tests.test_media_training import folder as media_folder_
from tests.test_media_training import keys as media_keys

folder, media_folder = pictures_folder, media_folder_
ASK = {"type": "text", "text": "which?"}
ROWS = [
  {"prompt": [{"role": "user", "content": [{"type": "image", "image": "0.png"}, ASK]}], "answer": "red"},
  {"prompt": "one two", "answer": "two"},
  {"prompt": "which shape?", "answer": "two", "image": ["1.png", "2.png"]},
  {"prompt": [{"role": "user", "content": [ASK, {"type": "image", "image": "3.png"}, ASK]}], "answer": "one"},
]


def keys(folder, output, rows=ROWS, base=None, **changes):
  file = folder / "tasks.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  left_out = ("use_sft", "per_device_batch_size", "grain_worker_count", "grain_worker_count_eval")
  own = {
    "use_grpo": True, "grain_train_files": str(file), "tokenizer_path": str(folder / "tokenizer"),
    "max_prefill_predict_length": 64, "max_target_length": 80, "batch_size": 4, "num_generations": 2, "num_batches": 2,
    "learning_rate": 1e-2, "warmup_steps_fraction": 0.0, "gradient_clipping_threshold": 1.0, "grpo_beta": 0.1,
    "reward_functions": ["exact_match"], "base_output_directory": str(output), "run_name": "run",
  }  # fmt: skip
  return (
    {name: value for name, value in (TINY if base is None else base).items() if name not in left_out} | own | changes
  )


def run(folder, output, **changes):
  history = History()
  maxtext.train(load_config(**keys(folder, output, **changes)), callbacks=[history])
  return [step["mismatch_max"] for step in history.figures]


def test_trainer_and_engine_see_the_same_pictures(folder, tmp_path, monkeypatch):
  assert max(run(folder, tmp_path)) < 1e-5
  media = policy_batch._media

  def swapped(*arguments):
    found = media(*arguments)
    return found | {"vision/inputs": np.roll(found["vision/inputs"], 2, axis=0)}

  monkeypatch.setattr(policy_batch, "_media", swapped)
  assert run(folder, tmp_path, num_batches=1, run_name="swapped")[0] > 1e-3, "pictures of other tasks"


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_omni", "gemma4"])
def test_trainer_and_engine_see_the_same_pictures_of_any_size(media_folder, tmp_path, family):
  """And, with positions of three components, the same ones of the answer."""
  base = media_keys(media_folder, family, use_audio=False)
  assert max(run(media_folder, tmp_path, base=base, max_prefill_predict_length=128, max_target_length=144)) < 1e-5


@pytest.mark.parametrize(
  ("row", "changes", "says"),
  [
    ({"image": "none.png"}, {}, "line 1: image 0: .*none.png"),
    (
      {"image": [f"{n}.png" for n in range(3)]},
      {"image_slots_per_row": 2},
      "3 images, and a row has room for 2",
    ),
    ({"image": "0.png"}, {"max_num_images_per_example": 0}, "max_num_images_per_example=0 leaves no room"),
    ({"image": "0.png"}, {"max_prefill_predict_length": 3}, "max_prefill_predict_length=3 leaves no room"),
    ({"image": "0.png"}, {"max_prefill_predict_length": 8}, "its prompt has .* tokens"),
    ({"image": "0.png"}, {"use_chat_template": False}, "images need use_chat_template=true"),
    (
      {},
      {"sampler_address": "127.0.0.1:1"},
      "sampler_address=127.0.0.1:1: what is sent to another",
    ),
    ({}, {"rl_environment": "a:B"}, "rl_environment=a:B: a conversation with an environment is for text"),
  ],
)
def test_what_does_not_fit_is_named(folder, tmp_path, row, changes, says):
  config = keys(folder, tmp_path, [{"prompt": "which?", "answer": "red"} | row], **changes)
  with pytest.raises(ConfigError, match=says):
    maxtext.train(load_config(**config))
