"""Groups of answers as the arrays of a batch: one answer a row, after its prompt.

Tokens that the policy did not write have no weight.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Batch
from maxtext.data.images import ImageOptions, ImageRows
from maxtext.data.media import VISION
from maxtext.data.options import image_options
from maxtext.models.media import TowerInputs
from maxtext.rl.advantages import ADVANTAGE_FUNCTIONS, SHARE_FUNCTIONS, is_degenerate
from maxtext.rl.answers import AnswerGroup
from maxtext.training.objectives.policy import ADVANTAGES, SAMPLED, SHARES

Arrays = dict[str, np.ndarray]
_IMAGES, _FEATURES = "images", "image_features"  # inputs of the tower, and the feature of each token
_TOKENS = ("inputs", "targets", "positions", "segments", "weights")


def policy_arrays(config: MaxTextConfig, groups: Sequence[AnswerGroup], advantages: np.ndarray) -> Arrays:
  """The arrays of a batch, padded to `max_target_length`."""
  shares = _shares(config, groups)
  shape = shares.size, config.max_target_length
  numbers = ("weights", ADVANTAGES, SHARES, SAMPLED)
  arrays: Arrays = {name: np.zeros(shape, np.float32 if name in numbers else np.int32) for name in (*_TOKENS, *numbers)}
  answers = (answer for group in groups for answer in group.answers)
  for row, (answer, advantage, share) in enumerate(zip(answers, advantages.flat, shares.flat, strict=True)):
    prompt, tokens = answer.prompt_token_ids, np.array([*answer.prompt_token_ids, *answer.token_ids], np.int32)
    used, own, mask = len(tokens) - 1, slice(len(prompt) - 1, len(tokens) - 1), np.array(answer.is_generated, bool)
    arrays["inputs"][row, :used], arrays["targets"][row, :used] = tokens[:-1], tokens[1:]
    arrays["positions"][row, :used], arrays["segments"][row, :used] = np.arange(used), 1
    for name, values in (("weights", 1.0), (ADVANTAGES, advantage), (SHARES, share), (SAMPLED, answer.logprobs)):
      arrays[name][row, own] = np.where(mask, values, 0.0)
  options = image_options(config)
  return arrays if options is None else arrays | _images(options, groups, shape)


def policy_advantages(config: MaxTextConfig, groups: Sequence[AnswerGroup]) -> np.ndarray:
  """The advantage of each answer [groups, answers]."""
  return ADVANTAGE_FUNCTIONS[config.rl_advantage](np.array([group.rewards for group in groups]))


def as_batch(arrays: Arrays) -> Batch:
  """Arrays by name as a batch of the objective."""
  values: dict[str, Any] = dict(arrays)
  tokens = {name: values.pop(name) for name in _TOKENS}
  media = {VISION: TowerInputs(values.pop(_IMAGES), values.pop(_FEATURES))} if _IMAGES in values else {}
  return Batch(**tokens, extra=values, media=media)


def _images(options: ImageOptions, groups: Sequence[AnswerGroup], shape: tuple[int, int]) -> Arrays:
  """What the engine was given of the images of each prompt, in the row of the answer."""
  rows = ImageRows.empty(options, *shape)
  for row, answer in enumerate(answer for group in groups for answer in group.answers):
    if answer.media is not None:
      inputs = np.concatenate([medium.inputs for _, medium in answer.media.media])
      rows.inputs[row, : len(inputs)] = inputs
      rows.indices[row, : len(answer.media.indices)] = answer.media.indices
  return {_IMAGES: rows.inputs, _FEATURES: rows.indices}


def _shares(config: MaxTextConfig, groups: Sequence[AnswerGroup]) -> np.ndarray:
  """The share of every token of an answer in the loss, times the number of answers."""
  lengths = np.array([group.lengths for group in groups])
  useless = is_degenerate(np.array([group.rewards for group in groups])) & config.degenerate_group_masking
  shares = np.zeros(lengths.shape)
  if not useless.all():
    own = SHARE_FUNCTIONS[config.rl_aggregation](lengths[~useless].ravel(), config.max_target_length)
    shares[~useless] = own.reshape(-1, lengths.shape[1])
  return shares * shares.size
