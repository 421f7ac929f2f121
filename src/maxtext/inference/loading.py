"""From a configuration to what answers requests: parameters of a checkpoint, the engine, and the run's tokenizer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from maxtext.checkpoint.tokenizer import open_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import global_batch_size
from maxtext.configs.types import ShardMode
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer
from maxtext.inference.draft import Draft
from maxtext.inference.engine import Engine, dropless
from maxtext.inference.prefixes import Prefixes
from maxtext.inference.prompt_files import PromptFiles
from maxtext.inference.sampling import STOPS, SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.models.model import Model, Params
from maxtext.weights.from_hugging_face import load_weights

if TYPE_CHECKING:
  from maxtext.inference.grammar import Grammar, Grammars


@dataclass(frozen=True, eq=False)
class Loaded:
  """What `maxtext decode` and `maxtext serve` run.

  Attributes:
    sampling_params: how requests are answered that say nothing; the tokenizer's end of a document ends them.
  """

  config: MaxTextConfig
  engine: Engine
  tokenizer: TextTokenizer
  sampling_params: SamplingParams

  @staticmethod
  def of(config: MaxTextConfig, ahead: int = 0, draft: MaxTextConfig | None = None) -> "Loaded":
    """Reads the tokenizer and the checkpoint, and makes the engine, on all devices that JAX finds.

    `ahead` is how many tokens it guesses in a step; `draft` is the model that guesses them.
    """
    tokenizer = run_tokenizer(config)
    if config.jax_cache_dir:
      jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
    # Caches say nothing of shardings: however a run was trained, the compiler places what answers.
    mesh = make_mesh(config.model_copy(update={"shard_mode": ShardMode.AUTO}))
    model = dropless(build_model(config, mesh))
    guesser = None if draft is None else load_draft(draft, mesh)
    ends = () if tokenizer.eos is None else (tokenizer.eos,)
    sampling_params = replace(SamplingParams.of(config), stop_token_ids=ends)
    engine = make_engine(config, model, parameters(config, model), ahead, guesser)
    return Loaded(config, engine, tokenizer, sampling_params)

  def scheduler(self) -> Scheduler:
    """Of this engine; it has one at a time."""
    c = self.config
    shared = Prefixes(c.prefix_caching_hbm_byte, c.prefix_caching_dram_byte) if c.enable_prefix_caching else None
    return Scheduler(self.engine, self.prompt_files or shared, c.multi_sampling)

  @cached_property
  def prompt_files(self) -> PromptFiles | None:
    """Where caches of prompts are kept between runs."""
    c = self.config
    if not c.prefill_cache_dir:
      return None
    folder = Path(c.prefill_cache_dir).expanduser()
    return PromptFiles(folder, lambda: self.engine.fingerprint, self.engine.row, c.load_from_prefill_dir)

  @cached_property
  def grammars(self) -> "Grammars":
    """For the forms of answers; made when the first is asked for."""
    from maxtext.inference.grammar import Grammars

    return Grammars(self.tokenizer, self.engine.vocab)

  def request(
    self, prompt: Sequence[int], sampling_params: SamplingParams, grammar: "Grammar | None" = None
  ) -> Request:
    """A request that fits; what does not is refused in words."""
    longest = self.engine.longest_prompt
    if not 0 < len(prompt) <= longest:
      what = f"has {len(prompt)} tokens, more than max_prefill_predict_length={longest}" if prompt else "is empty"
      raise ConfigError(f"The prompt {what}.")
    if wrong := [token for token in (*prompt, *sampling_params.stop_token_ids) if not 0 <= token < self.engine.vocab]:
      raise ConfigError(f"{wrong[0]} is no token; they go from 0 to {self.engine.vocab - 1}.")
    if len(sampling_params.stop_token_ids) > STOPS:
      raise ConfigError(f"{len(sampling_params.stop_token_ids)} stop tokens are more than {STOPS}.")
    if self.prompt_files:
      self.prompt_files.check(prompt)
    return Request(prompt, sampling_params, grammar)


def make_engine(
  config: MaxTextConfig, model: Model, params: Params, ahead: int = 0, draft: Draft | None = None
) -> Engine:
  """The engine that the keys describe: a slot for each sequence of the global batch."""
  c = config
  if c.max_prefill_predict_length >= c.max_target_length:
    raise ConfigError(
      f"max_prefill_predict_length={c.max_prefill_predict_length} leaves no room for an answer in "
      f"max_target_length={c.max_target_length}: lower it."
    )
  if ahead and not model.shapes.takes_back:
    raise ConfigError(
      f"--ahead {ahead}: this model has layers that keep a state, from which no guess can be taken back."
    )
  _check_pages(config, model)
  if draft is not None and draft.model.spec.vocab != model.spec.vocab:
    raise ConfigError(
      f"--draft: its vocabulary has {draft.model.spec.vocab} tokens, the model's {model.spec.vocab}: only a model with "
      "the same tokenizer can guess for it."
    )
  if draft is not None and not draft.model.shapes.takes_back:
    raise ConfigError("--draft: that model has layers that keep a state, from which no guess can be taken back.")
  slots = global_batch_size(config, model.how.mesh.size)
  piece = c.prefill_chunk_size if c.use_chunked_prefill else None
  keeps = c.enable_prefix_caching
  return Engine(model, params, slots, c.max_target_length, c.max_prefill_predict_length, piece, keeps, ahead, draft)


def load_draft(config: MaxTextConfig, mesh: Mesh) -> Draft:
  """The model of a configuration, on the devices of another."""
  model = dropless(build_model(config, mesh))
  return Draft(model, parameters(config, model))


def _check_pages(config: MaxTextConfig, model: Model) -> None:
  c, pages = config, model.how.cache_pages
  if pages is None:
    return
  if not any(slots.paged for slots in jax.tree.leaves(model.shapes.cache_slots(1, 1))):
    raise ConfigError(
      "attention=paged: no layer of this model keeps the whole text, so there is nothing to lay in pages: "
      "write attention=autoselected."
    )
  most = pages.per_row(c.max_target_length)
  if most * pages.size <= c.max_prefill_predict_length:
    raise ConfigError(
      f"pagedattn_max_pages_per_group={most} of pagedattn_tokens_per_page={pages.size} leave no room for an answer to "
      f"a prompt of max_prefill_predict_length={c.max_prefill_predict_length}: raise one of them."
    )
  if pages.count < most:
    raise ConfigError(
      f"pagedattn_num_pages={pages.count} are too few for one text of max_target_length={c.max_target_length}, which "
      f"takes {most} of pagedattn_tokens_per_page={pages.size}: raise it, or limit texts by "
      f"pagedattn_max_pages_per_group={pages.count}."
    )


def parameters(config: MaxTextConfig, model: Model) -> Params:
  """Those of `load_parameters_path`."""
  if not config.load_parameters_path:
    raise ConfigError("load_parameters_path is not set: write a run's folder, a checkpoint, or exported parameters.")
  return model.apart(load_weights(config, model, model.params | model.buffers))


def run_tokenizer(config: MaxTextConfig) -> TextTokenizer:
  """The one that is named, the run's own copy, or that of its prepared corpus; prompts do not end by themselves."""
  with open_tokenizer(data_options(config), config.load_parameters_path) as tokenizer:
    return replace(tokenizer or load_tokenizer(tokenizer_options(config)), add_eos=False)
