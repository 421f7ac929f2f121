"""Loads a model for inference: the parameters of a checkpoint, the engine, and the run's tokenizer."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from maxtext.checkpoint.tokenizer import open_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import global_batch_size
from maxtext.configs.types import ShardMode
from maxtext.data.chat_answers import ends_of_turns
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import Adapter, AdapterManager, UnknownAdapterError
from maxtext.inference.disk_prefill_cache import DiskPrefillCache
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.engine import Engine, dropless
from maxtext.inference.multimodal import PromptEncoder, PromptMedia
from maxtext.inference.prefix_cache import PrefixCache
from maxtext.inference.sampling import MAX_STOP_TOKENS, SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from maxtext.layers.lora import is_adapter
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.models.model import Model, Params
from maxtext.weights.generation_config import end_token_ids
from maxtext.weights.load import load_weights
from maxtext.weights.quantize import save_quantized_params

if TYPE_CHECKING:
  from maxtext.inference.grammar import CompiledGrammar, GrammarCompiler


@dataclass(frozen=True, eq=False)
class InferenceModel:
  """A model that is ready for inference, as `LLM` and the server use it.

  Attributes:
    config: the resolved configuration.
    engine: the engine with the parameters on the devices.
    tokenizer: the run's tokenizer.
    sampling_params: defaults for requests, with `default_stop_token_ids`.
    adapters: the LoRA adapters that are served beside the base; None where the engine has no room for any.
  """

  config: MaxTextConfig
  engine: Engine
  tokenizer: TextTokenizer
  sampling_params: SamplingParams
  adapters: AdapterManager | None = None

  @staticmethod
  def load(
    config: MaxTextConfig,
    num_speculative_tokens: int = 0,
    draft_config: MaxTextConfig | None = None,
    adapter_options: AdapterOptions | None = None,
  ) -> "InferenceModel":
    """Reads the tokenizer and the checkpoint, and makes the engine, on all devices that JAX finds.

    Args:
      config: the resolved configuration.
      num_speculative_tokens: draft tokens of a step.
      draft_config: the configuration of the draft model; None is prompt lookup (n-gram).
      adapter_options: the LoRA adapters that requests may choose; None is none.
    """
    adapters = None if adapter_options is None else AdapterManager(config, adapter_options)
    tokenizer = load_run_tokenizer(config)
    if config.jax_cache_dir and not jax.config.values["jax_compilation_cache_dir"]:
      jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
      reset_cache()  # JAX opens a cache once, and then ignores its setting
    # Inference always uses automatic sharding: caches have no explicit shardings.
    mesh = make_mesh(config.model_copy(update={"shard_mode": ShardMode.AUTO}))
    model = dropless(build_model(config, mesh, serving=True))
    draft_model = None if draft_config is None else load_draft_model(draft_config, mesh)
    ends = default_stop_token_ids(tokenizer, end_token_ids(config.load_parameters_path))
    sampling_params = replace(SamplingParams.of(config), stop_token_ids=ends)
    engine = make_engine(config, model, load_params(config, model), num_speculative_tokens, draft_model, adapters)
    return InferenceModel(config, engine, tokenizer, sampling_params, adapters)

  def make_scheduler(self) -> Scheduler:
    """A scheduler of the engine, which must have only one at a time."""
    c = self.config
    prefix_cache = None
    if c.enable_prefix_caching:
      prefix_cache = PrefixCache(c.prefix_caching_hbm_byte, c.prefix_caching_dram_byte)
    return Scheduler(self.engine, self.disk_prefill_cache or prefix_cache, c.multi_sampling)

  @cached_property
  def disk_prefill_cache(self) -> DiskPrefillCache | None:
    """The prefill cache of `prefill_cache_dir`; None without that key."""
    c = self.config
    if not c.prefill_cache_dir:
      return None
    directory = Path(c.prefill_cache_dir).expanduser()
    return DiskPrefillCache(directory, lambda: self.engine.fingerprint, self.engine.row, c.load_from_prefill_dir)

  @cached_property
  def grammar_compiler(self) -> "GrammarCompiler":
    """The compiler of grammars for structured outputs; created with the first use."""
    from maxtext.inference.grammar import GrammarCompiler

    return GrammarCompiler(self.tokenizer, self.engine.vocab)

  @contextmanager
  def use_adapter(self, name: str | None) -> Iterator[Adapter | None]:
    """The adapter of a name, which stays loaded inside this context; None is the base.

    Raises:
      UnknownAdapterError: it is not loaded.
    """
    if name is None:
      yield None
    elif self.adapters is None:
      raise UnknownAdapterError(f"The adapter '{name[:100]}' is not loaded: this model is served without adapters.")
    else:
      with self.adapters.use(name) as adapter:
        yield adapter

  @cached_property
  def prompts(self) -> PromptEncoder:
    """What encodes prompts with or without images."""
    return PromptEncoder.of(self.config, self.tokenizer, self.engine.max_prompt_len)

  def make_request(
    self,
    prompt: Sequence[int],
    sampling_params: SamplingParams,
    grammar: "CompiledGrammar | None" = None,
    adapter: Adapter | None = None,
    media: PromptMedia | None = None,
  ) -> Request:
    """A request for the scheduler; raises `ConfigError` if the prompt or a stop token is invalid.

    The adapter must stay in use (`use_adapter`) until the request has ended or was cancelled.
    """
    biased = (token for token, _ in sampling_params.biases)
    text = prompt if media is None else [key for key in media.keys.tolist() if key >= 0]
    self.check_prompt(prompt, (*text, *sampling_params.stop_token_ids, *biased))
    if len(sampling_params.stop_token_ids) > MAX_STOP_TOKENS:
      raise ConfigError(f"{len(sampling_params.stop_token_ids)} stop_token_ids are more than {MAX_STOP_TOKENS}.")
    if media is not None:
      self._check_media(media)
    request = Request(prompt, sampling_params, grammar, adapter, media)
    if self.disk_prefill_cache:
      self.disk_prefill_cache.check(prompt, request.adapter_checksum)
    return request

  def check_prompt(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
    """Raises `ConfigError` if a prompt is empty or too long, or the model does not have one of the token ids."""
    longest = self.engine.max_prompt_len
    if not 0 < len(prompt) <= longest:
      problem = f"has {len(prompt)} tokens, more than max_prefill_predict_length={longest}" if prompt else "is empty"
      raise ConfigError(f"The prompt {problem}.")
    if invalid := [token for token in token_ids if not 0 <= token < self.engine.vocab]:
      raise ConfigError(f"{invalid[0]} is not a token id: token ids are 0 to {self.engine.vocab - 1}.")

  def _check_media(self, media: PromptMedia) -> None:
    if self.disk_prefill_cache:
      raise ConfigError("prefill_cache_dir does not take prompts with media: leave it out.")
    if media.keys[-1] < 0:
      raise ConfigError("The prompt ends with an image, sound or video: text must follow it.")
    longest = np.bincount(media.spans)[1:].max(initial=0) if self.engine.has_spans else 0
    if longest > (most := self.engine.chunk_sizes[-1]):
      raise ConfigError(
        f"An image has {longest} tokens, and at most {most} are prefilled at once: raise prefill_chunk_size or "
        f"max_prefill_predict_length."
      )


def make_engine(
  config: MaxTextConfig,
  model: Model,
  params: Params,
  num_speculative_tokens: int = 0,
  draft_model: DraftModel | None = None,
  adapters: AdapterManager | None = None,
) -> Engine:
  """The engine of a configuration, with one slot for each sequence of the global batch, and its adapters loaded."""
  c = config
  if c.max_prefill_predict_length >= c.max_target_length:
    raise ConfigError(
      f"max_prefill_predict_length={c.max_prefill_predict_length} leaves no room for output in "
      f"max_target_length={c.max_target_length}: lower it."
    )
  if num_speculative_tokens and not model.shapes.supports_rollback:
    raise ConfigError(
      f"--num-speculative-tokens {num_speculative_tokens}: this model has recurrent layers, whose state cannot reject "
      "a draft token: leave the flag out."
    )
  _check_pages(config, model)
  if draft_model is not None and draft_model.model.spec.vocab != model.spec.vocab:
    raise ConfigError(
      f"--draft-model: its vocabulary has {draft_model.model.spec.vocab} tokens, the model's {model.spec.vocab}: use a "
      "draft model with the same tokenizer."
    )
  if draft_model is not None and not draft_model.model.shapes.supports_rollback:
    raise ConfigError(
      "--draft-model: that model has recurrent layers, whose state cannot reject a draft token: use another model."
    )
  engine = Engine(
    model,
    params,
    slots=global_batch_size(config, model.execution.sharding.mesh.size),
    max_model_len=c.max_target_length,
    max_prompt_len=c.max_prefill_predict_length,
    chunk_size=c.prefill_chunk_size if c.use_chunked_prefill else None,
    reuse_rows=c.enable_prefix_caching,
    num_speculative_tokens=num_speculative_tokens,
    draft_model=draft_model,
    adapters=None if adapters is None else adapters.matmul,
  )
  if adapters is not None:
    adapters.start(engine)
  return engine


def load_draft_model(config: MaxTextConfig, mesh: Mesh) -> DraftModel:
  """The draft model of a configuration, on the devices of the large model."""
  model = dropless(build_model(config, mesh, serving=True))
  return DraftModel(model, load_params(config, model))


def _check_pages(config: MaxTextConfig, model: Model) -> None:
  c, pages = config, model.execution.kv_cache.pages
  if pages is None:
    return
  if not any(slots.paged for slots in jax.tree.leaves(model.shapes.cache_specs(1, 1))):
    raise ConfigError(
      "attention=paged: no layer of this model caches the whole sequence, so there is nothing to page: "
      "write attention=autoselected."
    )
  most = pages.per_row(c.max_target_length)
  if most * pages.size <= c.max_prefill_predict_length:
    raise ConfigError(
      f"pagedattn_max_pages_per_group={most} of pagedattn_tokens_per_page={pages.size} leave no room for output after "
      f"a prompt of max_prefill_predict_length={c.max_prefill_predict_length}: raise one of them."
    )
  if pages.count < most:
    raise ConfigError(
      f"pagedattn_num_pages={pages.count} are too few for one sequence of max_target_length={c.max_target_length}, "
      f"which takes {most} of pagedattn_tokens_per_page={pages.size}: raise it, or limit sequences by "
      f"pagedattn_max_pages_per_group={pages.count}."
    )


def load_params(config: MaxTextConfig, model: Model) -> Params:
  """The parameters and buffers of `load_parameters_path`."""
  if not config.load_parameters_path:
    raise ConfigError("load_parameters_path is not set: give a run folder, a checkpoint, or exported parameters.")
  if config.save_quantized_params_path:
    config = save_quantized_params(config)
  whole = bool(config.lora_rank or config.lora_input_adapters_path)  # adapters are measured against whole weights
  found = load_weights(config, model, model.params | model.buffers, unstacked=not whole)
  if config.lora_rank and not any(map(is_adapter, found)):
    raise ConfigError(
      f"lora_rank={config.lora_rank}, but load_parameters_path={config.load_parameters_path} has no adapters: leave it "
      "out, or set lora_input_adapters_path."
    )
  return model.unstack_layers(found)


def default_stop_token_ids(tokenizer: TextTokenizer, others: Sequence[int] = ()) -> tuple[int, ...]:
  """The tokens that end an output: that of a document, those of turns of the chat template, and `others`."""
  ends = (tokenizer.eos, *ends_of_turns(tokenizer), *others)
  return tuple(dict.fromkeys(token for token in ends if token is not None))


def load_run_tokenizer(config: MaxTextConfig) -> TextTokenizer:
  """The tokenizer of `tokenizer_path`, of the run folder, or of the prepared corpus; it appends no end token."""
  with open_tokenizer(data_options(config), config.load_parameters_path) as tokenizer:
    return replace(tokenizer or load_tokenizer(tokenizer_options(config)), add_eos=False)
