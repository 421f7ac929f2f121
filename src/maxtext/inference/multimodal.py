"""Prompts with images: the tokens that stand for them, and the inputs of the model's towers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.chat_messages import image_sources, template_messages
from maxtext.data.images import VISION, expand_placeholders, feature_places, image_file, naming_image
from maxtext.data.tokenizers import TextTokenizer
from maxtext.media.images import image_size, load_image
from maxtext.media.processed import ImageProcessor, Processed
from maxtext.models.build import media_processors

MOST_PIXELS = 1 << 25
"""Of all images of a prompt: half a second of decoding."""


@dataclass(frozen=True, eq=False)
class PromptMedia:
  """What the towers encode for a prompt of S tokens.

  Attributes:
    inputs: {tower: [N,T,P]}, in the order of the prompt.
    indices: {tower: [S]} the feature of each token, counted over the N inputs; -1 for other tokens.
    keys: [S] the tokens, and negative numbers made of the content where they stand for media. Prompts with equal keys
      have equal KV caches.
  """

  inputs: Mapping[str, np.ndarray]
  indices: Mapping[str, np.ndarray]
  keys: np.ndarray


EncodedPrompt = tuple[list[int], PromptMedia | None]
"""The tokens of a prompt, and its media if any."""


@dataclass(frozen=True)
class PromptEncoder:
  """Encodes prompts that may have images.

  Attributes:
    tokenizer: of the model.
    processor: makes inputs of the tower of images; None for a model of text alone.
    placeholder: what the chat template, or the user in a plain prompt, writes where an image stands.
    longest: most tokens of a prompt; images are not read further where theirs alone are more.
  """

  tokenizer: TextTokenizer
  processor: ImageProcessor | None
  placeholder: str
  longest: int

  @staticmethod
  def of(config: MaxTextConfig, tokenizer: TextTokenizer, longest: int) -> "PromptEncoder":
    """The encoder of a model."""
    return PromptEncoder(tokenizer, media_processors(config).get(VISION), config.image_placeholder, longest)

  def chat(self, messages: Any, values: Mapping[str, Any]) -> EncodedPrompt:
    """The tokens that are prefilled for the assistant's answer to messages, and their media.

    Raises:
      ConfigError: the messages, or an image among them, cannot be read.
    """
    sources = image_sources(messages)
    if not sources:
      return self.tokenizer.chat(template_messages(messages), answer=True, **values).tolist(), None
    images = self._process(sources)
    parts = template_messages(messages, images=True)
    tokens = self.tokenizer.chat(parts, answer=True, expand=lambda text: self._expanded(text, images), **values)
    return self._placed(tokens, images)

  def plain(self, prompt: str, sources: Sequence[Any]) -> EncodedPrompt:
    """The tokens of a text and its images, which come first unless the text has their placeholders."""
    if not sources:
      return self.tokenizer.encode(prompt).tolist(), None
    images = self._process(sources)
    missing = len(images) - prompt.count(self.placeholder)
    text = self._expanded(self.placeholder * max(missing, 0) + prompt, images)
    return self._placed(self.tokenizer.encode(text, special=True), images)

  def _process(self, sources: Sequence[Any]) -> list[Processed]:
    if self.processor is None:
      raise ConfigError(
        "Images in prompts need use_multimodal=true, and a model for which they are supported: docs/multimodal.md."
      )
    files, sizes = [], []
    for number, source in enumerate(sources):  # their headers first, since decoding is what costs
      with naming_image(f"image {number}"):
        files.append(image_file(source))
        sizes.append(image_size(files[-1]))
    if (total := sum(self.processor.features(*size) for size in sizes)) >= self.longest:
      raise ConfigError(
        f"The images have {total} tokens, and a prompt has fewer than max_prefill_predict_length={self.longest}."
      )
    if (pixels := sum(height * width for height, width in sizes)) > MOST_PIXELS:
      raise ConfigError(f"The images have {pixels:,} pixels, and those of a prompt may have {MOST_PIXELS:,}.")
    found = []
    for number, file in enumerate(files):
      with naming_image(f"image {number}"):
        found.append(self.processor(load_image(file)))
    return found

  def _expanded(self, text: str, images: Sequence[Processed]) -> str:
    """The text with what stands for each image in place of its placeholder."""
    return expand_placeholders(text, self.placeholder, [image.text for image in images])

  def _placed(self, tokens: np.ndarray, images: Sequence[Processed]) -> tuple[list[int], PromptMedia]:
    assert self.processor is not None
    total = sum(image.features for image in images)
    places = feature_places(self.tokenizer, self.processor.token, tokens, total)
    keys, indices = tokens.astype(np.int64), np.full(len(tokens), -1, np.int32)
    indices[places] = np.arange(total)
    for place, image in zip(
      np.split(places, np.cumsum([image.features for image in images])[:-1]), images, strict=True
    ):
      keys[place] = -1 - int.from_bytes(hashlib.sha256(image.inputs.tobytes()).digest()[:7], "big")
    inputs = np.concatenate([image.inputs for image in images])
    return tokens.tolist(), PromptMedia({VISION: inputs}, {VISION: indices}, keys)
