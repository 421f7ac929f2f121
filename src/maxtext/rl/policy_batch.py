"""Groups of answers as the arrays of a batch: one answer a row, after its prompt.

Tokens that the policy did not write have no weight.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Batch
from maxtext.data.conversation_media import MediaOptions
from maxtext.data.media_rows import MediaRows
from maxtext.data.options import media_options
from maxtext.distributed.multihost import gather_bytes
from maxtext.layers.router import ROUTED_EXPERTS
from maxtext.models.media import TowerInputs
from maxtext.rl.advantages import ADVANTAGE_FUNCTIONS, SHARE_FUNCTIONS
from maxtext.rl.answers import AnswerGroup
from maxtext.rl.outcomes import Outcomes
from maxtext.training.objectives.policy import ADVANTAGES, SAMPLED, SHARES, replayed_experts

Arrays = dict[str, np.ndarray]
_ROTARY = "rotary_positions"
_TOKENS = ("inputs", "targets", "positions", "segments", "weights")


def policy_arrays(
  config: MaxTextConfig, groups: Sequence[AnswerGroup], advantages: np.ndarray, shares: np.ndarray
) -> Arrays:
  """The rows of groups, padded to `max_target_length`; advantages and shares are those of their answers."""
  shape = shares.size, config.max_target_length
  numbers = ("weights", ADVANTAGES, SHARES, SAMPLED)
  arrays: Arrays = {name: np.zeros(shape, np.float32 if name in numbers else np.int32) for name in (*_TOKENS, *numbers)}
  answers = (answer for group in groups for answer in group.answers)
  if size := replayed_experts(config):
    arrays[ROUTED_EXPERTS] = np.full((*shape, size), -1, np.int16)
  for row, (answer, advantage, share) in enumerate(zip(answers, advantages.flat, shares.flat, strict=True)):
    prompt, tokens = answer.prompt_token_ids, np.array([*answer.prompt_token_ids, *answer.token_ids], np.int32)
    used, own, mask = len(tokens) - 1, slice(len(prompt) - 1, len(tokens) - 1), np.array(answer.is_generated, bool)
    arrays["inputs"][row, :used], arrays["targets"][row, :used] = tokens[:-1], tokens[1:]
    arrays["positions"][row, :used], arrays["segments"][row, :used] = np.arange(used), 1
    for name, values in (("weights", 1.0), (ADVANTAGES, advantage), (SHARES, share), (SAMPLED, answer.logprobs)):
      arrays[name][row, own] = np.where(mask, values, 0.0)
    if size and answer.routed_experts is not None:
      arrays[ROUTED_EXPERTS][row, : len(answer.routed_experts)] = answer.routed_experts
  options = media_options(config)
  return arrays if options is None else arrays | _media(options, groups, shape)


def policy_advantages(config: MaxTextConfig, outcomes: Outcomes) -> np.ndarray:
  """The advantage of each answer [groups, answers]."""
  return ADVANTAGE_FUNCTIONS[config.rl_advantage](outcomes.rewards)


def policy_shares(config: MaxTextConfig, outcomes: Outcomes) -> np.ndarray:
  """The share of every token of an answer in the loss, times the number of answers [groups, answers] of the batch."""
  lengths, shares = outcomes.lengths, np.zeros(outcomes.lengths.shape)
  useless = outcomes.is_degenerate & config.degenerate_group_masking
  if not useless.all():
    own = SHARE_FUNCTIONS[config.rl_aggregation](lengths[~useless].ravel(), config.max_target_length)
    shares[~useless] = own.reshape(-1, lengths.shape[1])
  return shares * shares.size


def gather_rows(own: Arrays, owners: np.ndarray, answers: int) -> Arrays:
  """The rows of a whole batch, on every process. All of them call it, on the thread that trains.

  Args:
    own: the rows of this process's groups, in their order.
    owners: the process that has each group of the batch.
    answers: rows of a group.
  """
  if jax.process_count() == 1:
    return own
  names = sorted(own)
  rows = (np.bincount(owners, minlength=jax.process_count()) * answers).tolist()
  bytes_of_row = {name: math.prod(own[name].shape[1:]) * own[name].itemsize for name in names}
  told = gather_bytes(b"".join(own[name].tobytes() for name in names), [n * sum(bytes_of_row.values()) for n in rows])
  whole = {name: np.empty((len(owners) * answers, *own[name].shape[1:]), own[name].dtype) for name in names}
  for process, data in enumerate(told):
    places, first = np.repeat(owners == process, answers), 0
    for name in names:
      size = rows[process] * bytes_of_row[name]
      part = np.frombuffer(data[first : first + size], whole[name].dtype)
      whole[name][places] = part.reshape(-1, *whole[name].shape[1:])
      first += size
  return whole


def as_batch(arrays: Arrays) -> Batch:
  """Arrays by name as a batch of the objective."""
  values: dict[str, Any] = dict(arrays)
  tokens = {name: values.pop(name) for name in _TOKENS}
  towers: dict[str, dict[str, Any]] = {}
  for path in [name for name in values if "/" in name]:
    tower, name = path.split("/")
    towers.setdefault(tower, {})[name] = values.pop(path)
  media = {tower: TowerInputs(**inputs) for tower, inputs in towers.items()}
  return Batch(**tokens, rotary_positions=values.pop(_ROTARY, None), extra=values, media=media)


def _media(options: MediaOptions, groups: Sequence[AnswerGroup], shape: tuple[int, int]) -> Arrays:
  """What the engine was given of the images of each prompt, in the row of the answer, by tower and name."""
  rows = MediaRows.empty(options, *shape)
  for row, answer in enumerate(answer for group in groups for answer in group.answers):
    if rows.rotary_positions is not None:
      rows.rotary_positions[row] = np.arange(shape[1])[:, None]
    if (media := answer.media) is None:
      continue
    places, first = np.argsort(media.indices, kind="stable")[-int(media.indices.max()) - 1 :], 0
    for tower, medium in media.media:
      rows.put(options, row, tower, medium, places[first : (first := first + medium.features)])
    if rows.rotary_positions is not None and media.rotary_positions is not None:
      rows.rotary_positions[row] += media.rotary_offset
      rows.rotary_positions[row, : len(media.keys)] = media.rotary_positions
  arrays = {f"{tower}/{name}": array for tower, own in rows.towers.items() for name, array in own.items()}
  return arrays if rows.rotary_positions is None else arrays | {_ROTARY: rows.rotary_positions}
