"""Requests about tokens alone, with vLLM's paths and fields: `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from maxtext.configs import ConfigError
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.multimodal import EncodedPrompt, PromptEncoder
from maxtext.serving.protocol import (
  MAX_TOOLS,
  ChatCompletionRequest,
  ChatMessage,
  RequestBody,
  RequestLimits,
  Tool,
  check_prompt,
)


class TokenizeRequest(RequestBody):
  """`/tokenize`: of a text, or of a chat as it is prefilled."""

  model: str | None = None
  prompt: str | None = None
  messages: Annotated[list[ChatMessage], FailFast()] = Field(default_factory=list)
  add_special_tokens: bool = True
  return_token_strs: bool = False
  tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
  chat_template_kwargs: dict[str, Any] | None = None

  @model_validator(mode="after")
  def _has_one(self) -> "TokenizeRequest":
    if (self.prompt is None) == (not self.messages):
      raise ValueError("write prompt or messages")
    return self

  @property
  def _chat(self) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_construct(
      messages=self.messages, tools=self.tools, chat_template_kwargs=self.chat_template_kwargs
    )

  def check(self, limits: RequestLimits) -> None:
    if self.prompt is None:
      self._chat.check(limits)
    else:
      check_prompt(limits, self.prompt)

  @property
  def has_media(self) -> bool:
    return self._chat.has_media

  @property
  def remote_media(self) -> list[str]:
    return self._chat.remote_media

  def encoded(self, prompts: PromptEncoder, fetched: Mapping[str, bytes] = MappingProxyType({})) -> list[EncodedPrompt]:
    """The tokens."""
    if self.prompt is None:
      return self._chat.encoded(prompts, fetched)
    if self.add_special_tokens:
      return [(prompts.tokenizer.encode(self.prompt).tolist(), None)]
    return [(list(prompts.tokenizer.vocabulary.encode(self.prompt, special=False)), None)]

  def response(self, model: InferenceModel, tokens: list[int]) -> dict[str, Any]:
    """The tokens, as many as there are, and how many fit."""
    vocabulary = model.tokenizer.vocabulary
    texts = {"token_strs": [vocabulary.name(token) for token in tokens]} if self.return_token_strs else {}
    return {"count": len(tokens), "max_model_len": model.engine.max_model_len, "tokens": tokens} | texts


class DetokenizeRequest(RequestBody):
  """`/detokenize`: the text of tokens, special ones by their names."""

  model: str | None = None
  tokens: Annotated[list[int], FailFast()]

  def response(self, model: InferenceModel) -> dict[str, Any]:
    """The text."""
    tokenizer = model.tokenizer
    if invalid := [token for token in self.tokens if not 0 <= token < tokenizer.vocab_size]:
      raise ConfigError(f"{invalid[0]} is no token of the tokenizer: they are 0 to {tokenizer.vocab_size - 1}.")
    return {"prompt": tokenizer.decode(self.tokens, tokenizer.special_ids)}


def tokenizer_info(model: InferenceModel) -> dict[str, Any]:
  """The special tokens and the chat template, with the names of Hugging Face."""
  tokenizer, vocabulary = model.tokenizer, model.tokenizer.vocabulary
  specials = {"bos": vocabulary.bos, "eos": vocabulary.eos, "pad": vocabulary.pad}
  return {
    "tokenizer_class": type(tokenizer).__name__,
    **{f"{name}_token": None if token is None else vocabulary.name(token) for name, token in specials.items()},
    **{f"{name}_token_id": token for name, token in specials.items()},
    "add_bos_token": tokenizer.add_bos,
    "vocab_size": tokenizer.vocab_size,
    "model_max_length": model.engine.max_model_len,
    "chat_template": tokenizer.chat_template,
  }
