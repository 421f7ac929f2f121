"""Samples while training: the engine continues a few prompts with the current parameters."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from maxtext.configs import ConfigError
from maxtext.data.batch import IteratorState
from maxtext.data.options import data_options
from maxtext.data.tokenizers import TextTokenizer
from maxtext.models.model import Params
from maxtext.observe.sample_writer import Sample, SampleWriter
from maxtext.status_line import show_phase
from maxtext.training.callbacks.base import Callback
from maxtext.training.live_engine import LiveEngine, engine_problem
from maxtext.training.program import Program
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Tokens of a sample, at most."""


class Sampler:
  """Continues the prompts of `sample_prompts`, or in fine-tuning answers them, as messages of a user.

  The engine is made, and compiled, with the first sample. It uses the arrays of the train state, not copies. Its own
  memory is the KV cache of one sequence of the longest prompt and `MAX_TOKENS` for each prompt, in multiples of the
  number of devices.
  """

  def __init__(self, program: Program, tokenizer: TextTokenizer, prompts: Sequence[str]) -> None:
    """Raises `ConfigError` for a prompt without a token or with too many."""
    from maxtext.inference.inference_model import default_stop_token_ids
    from maxtext.inference.llm import encode_prompt
    from maxtext.inference.sampling import SamplingParams

    config = program.config
    chat = config.use_sft and config.use_chat_template
    self._prompts = [(prompt, encode_prompt(tokenizer, prompt, chat)) for prompt in prompts]
    for prompt, tokens in self._prompts:
      if not 0 < len(tokens) < config.max_target_length:
        raise ConfigError(
          f"sample_prompts: {prompt!r} has {len(tokens)} tokens, and 1 to {config.max_target_length - 1} leave room "
          f"for a sample in max_target_length={config.max_target_length}."
        )
    stop_token_ids = default_stop_token_ids(tokenizer)
    self._sampling_params = replace(SamplingParams.of(config), max_tokens=MAX_TOKENS, stop_token_ids=stop_token_ids)
    longest = max(len(tokens) for _, tokens in self._prompts)
    total = min(longest + MAX_TOKENS, config.max_target_length)
    self._engine = LiveEngine(
      config, program.model, tokenizer, self._sampling_params, len(self._prompts), total, longest
    )

  @staticmethod
  def of(program: Program) -> "Sampler | None":
    """The sampler of a run; None where it has no prompts, or where there is a reason against it, which is logged."""
    c = program.config
    if not c.sample_prompts or c.eval_interval <= 0 or not data_options(c).has_documents:
      return None
    from maxtext.inference.inference_model import load_run_tokenizer

    try:
      tokenizer, problem = load_run_tokenizer(c), engine_problem(program)
    except ConfigError as error:
      tokenizer, problem = None, str(error)
    if tokenizer is None or problem:
      if not jax.process_index():
        _LOG.warning(f"maxtext: sample_prompts: the run writes no samples: {problem}")
      return None
    return Sampler(program, tokenizer, c.sample_prompts)

  def sample(self, step: int, params: Params) -> list[Sample]:
    """Samples with these parameters and buffers; the random choices are a function of the step."""
    prompts = [tokens for _, tokens in self._prompts]
    outputs = self._engine.generate(params, step, prompts, replace(self._sampling_params, seed=step))
    return [Sample(prompt, output.text) for (prompt, _), output in zip(self._prompts, outputs, strict=True)]


class Samples(Callback):
  """Writes samples every `interval` steps. A failure does not end the run; it ends the samples."""

  def __init__(self, sampler: Sampler, writer: SampleWriter, interval: int) -> None:
    self._sampler: Sampler | None = sampler
    self._writer, self._interval = writer, interval

  def due(self, step: int) -> bool:
    return self._sampler is not None and step % self._interval == 0

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    assert self._sampler is not None, "it was due"
    show_phase(f"sampling at step {step}")
    try:
      samples = self._sampler.sample(step, state.params | state.buffers)
    except Exception as error:  # such as memory that does not suffice
      self._sampler = None
      _LOG.warning(f"maxtext: sample_prompts: no more samples, since one failed: {str(error).splitlines()[0]}")
    else:
      self._writer.write(step, samples)
    return False

  def close(self) -> None:
    self._writer.close()
