"""`LLM`: offline inference from Python. `maxtext decode` uses it.

`LLM` and the server both create requests with `InferenceModel.make_request`, run them in a `Scheduler`, and collect the
token outputs in an `IncrementalDetokenizer`.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack, cast

import jax
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.conversations import chat_prompt
from maxtext.data.tokenizers import Message, TextTokenizer
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.engine import Engine, validate_params
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.multimodal import EncodedPrompt
from maxtext.inference.resolve import resolve_draft_model, resolve_model
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import FinishReason, PromptLogprob, Request

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys

Prompt = str | Sequence[int]
Medium = Any  # a path, a file's bytes, a data URL, or of images a PIL image
OnText = Callable[[str], None]
AdapterName = str | Sequence[str | None] | None


@dataclass(frozen=True)
class RequestOutput:
  """The output for one prompt.

  Attributes:
    prompt_token_ids: the tokens of the prompt.
    text: the generated text without the stop string or stop token that ended it.
    token_ids: all generated tokens, including a stop token or the tokens of a stop string.
    finish_reason: "stop", or "length" if `max_tokens` or the longest sequence was reached.
    versions: for each token, the version of the parameters that generated it (`LLM.update_params`).
    logprobs: for each token, the model's log-probability before temperature, penalties and masks; None unless
      `SamplingParams.logprobs` is a number.
    top_logprobs: for each token, the `SamplingParams.logprobs` most likely tokens at its position; None likewise.
    prompt_logprobs: log-probability, rank and most likely tokens of each token of the prompt but the first; None unless
      `SamplingParams.prompt_logprobs` is a number.
    routed_experts: [tokens - 1, N] the experts of all tokens, prompt and output, but the last, as vectors of
      `models/routed_experts.py`; None unless the engine keeps them.
  """

  prompt_token_ids: tuple[int, ...]
  text: str
  token_ids: tuple[int, ...]
  finish_reason: FinishReason
  versions: tuple[int, ...]
  logprobs: tuple[float, ...] | None = None
  top_logprobs: tuple[dict[int, float], ...] | None = None
  prompt_logprobs: tuple[PromptLogprob, ...] | None = None
  routed_experts: np.ndarray | None = field(default=None, compare=False)

  @staticmethod
  def of(detokenizer: IncrementalDetokenizer) -> "RequestOutput":
    """The output of a finished request."""
    assert detokenizer.finish_reason is not None
    generated = [(output.token, output) for output in detokenizer.outputs if output.token is not None]
    routed = [output.routed_experts for output in detokenizer.outputs if output.routed_experts is not None]
    with_logprobs = detokenizer.request.sampling_params.logprobs is not None
    return RequestOutput(
      tuple(detokenizer.request.prompt),
      detokenizer.text,
      tuple(token for token, _ in generated),
      detokenizer.finish_reason,
      tuple(output.version for _, output in generated),
      tuple(output.logprob for _, output in generated) if with_logprobs else None,
      tuple(dict(output.top_logprobs) for _, output in generated) if with_logprobs else None,
      None if detokenizer.prompt_logprobs is None else tuple(detokenizer.prompt_logprobs),
      np.concatenate(routed) if routed else None,
    )


class LLM:
  """Offline inference with a trained model, on all devices that JAX finds.

  One thread at a time generates; other threads wait. `update_params` may be called from any thread at any time.

  If the process has no folder of compiled programs (`jax_compilation_cache_dir`), it becomes `jax_cache_dir`, for good.

  Args:
    model: a run folder or checkpoint, a Hugging Face folder of safetensors, or a model name or YAML file, which need
      `load_parameters_path`.
    num_speculative_tokens: draft tokens of each step (speculative decoding); the output stays the same.
    draft_model: the run folder of a draft model that proposes them; None is prompt lookup (n-gram).
    adapters: PEFT folders of LoRA adapters by the names that `generate` takes; None is none.
    max_loras: adapters that can be loaded at once, here or by `load_adapter`; None is as many as `adapters`.
    max_lora_rank: largest rank of an adapter; None is the largest of `adapters`, or 16 without any.
    strict: makes keys without an effect an error instead of a warning.
    **keys: configuration keys as in `maxtext decode`, such as `max_target_length=2048`, or `per_device_batch_size=32`,
      which is the number of sequences decoded at once on each device.

  Raises:
    ConfigError: (a ValueError) the folder or the keys are invalid.
  """

  def __init__(
    self,
    model: str | os.PathLike[str],
    *,
    num_speculative_tokens: int = 0,
    draft_model: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    strict: bool = False,
    **keys: "Unpack[ConfigKeys]",
  ) -> None:
    if num_speculative_tokens < 0:
      raise ConfigError(f"num_speculative_tokens={num_speculative_tokens}: at least 0.")
    if draft_model is not None and not num_speculative_tokens:
      raise ConfigError("draft_model: set num_speculative_tokens too, such as num_speculative_tokens=4.")
    config = resolve_model(os.fspath(model), {**keys}, strict)
    draft_config = None if draft_model is None else resolve_draft_model(os.fspath(draft_model), "draft_model")
    options = None
    if adapters or max_loras is not None or max_lora_rank is not None:
      folders = {name: os.fspath(folder) for name, folder in (adapters or {}).items()}
      options = AdapterOptions(folders, max_loras, max_lora_rank, max_loras is not None, "adapters")
    self._init(InferenceModel.load(config, num_speculative_tokens, draft_config, options))

  @classmethod
  def of(cls, model: InferenceModel) -> "LLM":
    """An `LLM` of a model that is already loaded."""
    llm = cls.__new__(cls)
    llm._init(model)
    return llm

  def _init(self, model: InferenceModel) -> None:
    self._model, self._scheduler, self._generate_lock = model, model.make_scheduler(), threading.Lock()

  @property
  def config(self) -> MaxTextConfig:
    """The resolved configuration."""
    return self._model.config

  @property
  def tokenizer(self) -> TextTokenizer:
    """The model's tokenizer."""
    return self._model.tokenizer

  @property
  def engine(self) -> Engine:
    """The engine; `engine.model` has the path, shape, dtype and sharding of every parameter."""
    return self._model.engine

  @property
  def version(self) -> int:
    """The version of the parameters; 0 before the first `update_params`."""
    return self.engine.version

  @property
  def sampling_params(self) -> SamplingParams:
    """The default sampling parameters, from `decode_sampling_strategy` and its keys; greedy unless set."""
    return self._model.sampling_params

  def generate(
    self,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    on_text: OnText | None = None,
    adapter: AdapterName = None,
  ) -> list[RequestOutput]:
    """Generates text for prompts, as many at once as the engine has slots.

    Args:
      prompts: one or many, each a text or a list of token ids. With `use_chat_template`, a text is the first message
        of a chat.
      sampling_params: for all prompts, or one for each; None is `self.sampling_params`. The tokenizer's end-of-sequence
        token ends every output, besides `stop_token_ids`.
      on_text: called with new text as it is generated; texts of several prompts are interleaved.
      adapter: the name of a LoRA adapter for all prompts, or one for each; None is the base model.

    Returns:
      The outputs, in the order of the prompts.

    Raises:
      ConfigError: (a ValueError) a prompt is empty, too long, or has an invalid token id, or an adapter is not loaded.
        Nothing is generated then.
    """
    prompt_list = [prompts] if _is_single_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
    return self._generate([self._encode(prompt) for prompt in prompt_list], sampling_params, on_text, adapter)

  def complete(
    self,
    prompt: str,
    images: Sequence[Medium] = (),
    sampling_params: SamplingParams | None = None,
    on_text: OnText | None = None,
    *,
    videos: Sequence[Medium] = (),
    sounds: Sequence[Medium] = (),
  ) -> RequestOutput:
    """Generates text for a prompt with media, which come first unless the text has `image_placeholder` for each image,
    `video_placeholder` for each video, and `audio_placeholder` for each sound.

    With `use_chat_template`, they are the first message of a chat.
    """
    prompts = self._model.prompts
    media = [(kind, one) for kind, all_ in (("image", images), ("video", videos), ("audio", sounds)) for one in all_]
    if self.config.use_chat_template:
      content = [*({"type": kind, kind: one} for kind, one in media), {"type": "text", "text": prompt}]
      encoded = prompts.chat([{"role": "user", "content": content}], {})
    else:
      encoded = prompts.plain(prompt, media)
    (output,) = self._generate([encoded], sampling_params, on_text, None)
    return output

  def answer(
    self, prompts: Sequence[EncodedPrompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
  ) -> list[RequestOutput]:
    """As `generate`, for prompts that are encoded already, with their media."""
    return self._generate(list(prompts), sampling_params, None, None)

  def chat(
    self,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    on_text: OnText | None = None,
    adapter: AdapterName = None,
    shown: Collection[int] = (),
  ) -> list[RequestOutput]:
    """Generates the next assistant message of one conversation, or of each of several, by the chat template.

    A message is a dict with `role` and `content`, a text or a list of parts: {"type": "text", "text": ...}, and
    {"type": "image", "image": ...} with a path, a file's bytes or a PIL image, or OpenAI's `image_url` with a data URL;
    likewise "audio" and "video", and OpenAI's `input_audio`. Names of special tokens in the content are encoded as
    plain text. `shown` are special tokens whose names are part of the output's text, such as marks of reasoning.
    """
    conversations = [messages] if _is_conversation(messages) else cast(Sequence[Sequence[Message]], messages)
    return self._generate(
      [self._model.prompts.chat(one, {}) for one in conversations], sampling_params, on_text, adapter, shown
    )

  def score(self, token_ids: Sequence[int], adapter: str | None = None) -> np.ndarray:
    """Log-probabilities of tokens, each given the tokens before it, by the forward pass of training.

    Returns:
      A float32 array with one value fewer than tokens, since the first token has no context. For a prompt of n tokens
      and its output, `score([*prompt, *output])[n - 1 :]` equals the `logprobs` of `generate` to about five digits.
    """
    tokens, vocab = [int(token) for token in token_ids], self.engine.vocab
    if not 0 < len(tokens) <= self.engine.max_model_len:
      raise ConfigError(
        f"score: {len(tokens)} tokens; 1 to max_target_length={self.engine.max_model_len} can be scored."
      )
    if invalid := [token for token in tokens if not 0 <= token < vocab]:
      raise ConfigError(f"{invalid[0]} is not a token id: token ids are 0 to {vocab - 1}.")
    with self._model.use_adapter(adapter) as used:
      return self.engine.score(tokens, 0 if used is None else used.slot)

  @property
  def adapters(self) -> list[str]:
    """The names of the loaded adapters."""
    return [] if self._model.adapters is None else self._model.adapters.names

  def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
    """Loads a LoRA adapter from a PEFT folder, without compilation; any thread may call it, also while one generates.

    Raises:
      ConfigError: (a ValueError) the folder is not of this model or above `max_lora_rank`, the name is loaded already,
        or `max_loras` are. Nothing has changed then.
    """
    self._adapter_manager.load(name, os.fspath(folder), "load_adapter")

  def unload_adapter(self, name: str) -> None:
    """Unloads a LoRA adapter. Requests that use it finish, and its place is free after the last of them."""
    self._adapter_manager.unload(name)

  @property
  def _adapter_manager(self) -> AdapterManager:
    if self._model.adapters is None:
      raise ConfigError("This model has no room for adapters: make the LLM with adapters or max_loras.")
    return self._model.adapters

  def update_params(self, params: Mapping[str, jax.Array], version: int) -> None:
    """Swaps the model's parameters without compilation; while a thread generates, between two of its steps.

    Running requests keep the KV cache that older parameters computed. The prefix cache is cleared, and the files of
    `prefill_cache_dir` are stored by parameters. The arrays are not copied, so do not donate or delete them while they
    are in use. See `Engine.update_params`.

    Args:
      params: all parameters and buffers by path, as in a `TrainState` and `engine.model`, with the same shardings.
      version: reported in `RequestOutput.versions` for the tokens that these parameters generate.

    Raises:
      ValueError: a path, shape, dtype or sharding differs; the message names the path, and nothing is changed.
    """
    model = self.engine.model
    self.engine.update_params(model.unstack_layers(validate_params(model.params | model.buffers, params)), version)

  def _encode(self, prompt: Prompt) -> EncodedPrompt:
    if not isinstance(prompt, str):
      return [int(token) for token in prompt], None
    return encode_prompt(self.tokenizer, prompt, self.config.use_chat_template), None

  def _generate(
    self,
    prompts: list[EncodedPrompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    on_text: OnText | None,
    adapter: AdapterName,
    shown: Collection[int] = (),
  ) -> list[RequestOutput]:
    names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != len(prompts):
      raise ConfigError(f"{len(names)} adapters for {len(prompts)} prompts: give one, or one for each.")
    default = self.sampling_params if sampling_params is None else sampling_params
    each = [default] * len(prompts) if isinstance(default, SamplingParams) else list(default)
    if len(each) != len(prompts):
      raise ConfigError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one for each.")
    with ExitStack() as in_use:
      adapters = {name: in_use.enter_context(self._model.use_adapter(name)) for name in dict.fromkeys(names)}
      requests = [
        self._model.make_request(prompt, self._with_eos(params), adapter=adapters[name], media=media)
        for (prompt, media), params, name in zip(prompts, each, names, strict=True)
      ]
      with self._generate_lock:
        try:
          return [RequestOutput.of(detokenizer) for detokenizer in self._run(requests, on_text, frozenset(shown))]
        except BaseException:  # including an interrupt: running requests must not continue in the next call
          self._scheduler = self._model.make_scheduler()
          raise

  def _with_eos(self, params: SamplingParams) -> SamplingParams:
    """The sampling parameters with the tokens that end documents and turns among the stop tokens."""
    ends = self.sampling_params.stop_token_ids
    if params.ignore_eos:
      return replace(params, stop_token_ids=[token for token in params.stop_token_ids if token not in ends])
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))))

  def _run(
    self, requests: list[Request], on_text: OnText | None, shown: frozenset[int]
  ) -> list[IncrementalDetokenizer]:
    detokenizers = {request: IncrementalDetokenizer(request, self.tokenizer, shown) for request in requests}
    for request in requests:
      self._scheduler.submit(request)
    for output in self._scheduler.run():
      detokenizer = detokenizers[output.request]
      text = detokenizer.add(output)
      if detokenizer.finish_reason and not output.finish_reason:  # ended by a stop string
        self._scheduler.cancel(output.request)
      if on_text and text:
        on_text(text)
    return list(detokenizers.values())


def encode_prompt(tokenizer: TextTokenizer, prompt: str, chat: bool) -> list[int]:
  """The tokens of a text: with `chat`, of a user's message that is to be answered by the chat template."""
  if chat:
    return chat_prompt(tokenizer, [{"role": "user", "content": prompt}], {})
  return tokenizer.encode(prompt).tolist()


def _is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
  return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))


def _is_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> TypeGuard[Sequence[Message]]:
  return len(messages) > 0 and isinstance(messages[0], Mapping)
