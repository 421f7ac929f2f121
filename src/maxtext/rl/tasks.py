"""Tasks: prompts, and the answers that rewards compare with."""

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.chat_messages import media_parts, media_sources, template_messages
from maxtext.data.conversation_media import ConversationMedia
from maxtext.data.conversations import chat_prompt
from maxtext.data.media_columns import images_of_columns, with_column_images
from maxtext.data.options import data_options, media_options
from maxtext.data.order import FEW_SHARDS, DocumentOrder
from maxtext.data.sources.json_lines import json_values
from maxtext.data.tokenizers import TextTokenizer


@dataclass(frozen=True)
class Task:
  """A prompt, as text and as the tokens that the engine prefills, and its answer; the messages too if they have images,
  with the files of these."""

  prompt: str
  tokens: tuple[int, ...]
  answer: str
  messages: Sequence[Mapping[str, Any]] | None = None

  @property
  def pictures(self) -> list[Any]:
    """The names of its files, wherever they are, or their bytes."""
    sources = [source for _, source in media_sources(self.messages)]
    return [os.path.basename(source) if isinstance(source, str) else source for source in sources]


def task_order(config: MaxTextConfig, count: int) -> DocumentOrder:
  """The order in which so many tasks come: all of them once an epoch."""
  return DocumentOrder([count], FEW_SHARDS, (config.data_shuffle_seed,), config.enable_data_shuffling)


def load_tasks(config: MaxTextConfig, tokenizer: TextTokenizer, split: str) -> list[Task]:
  """The tasks of `grain_train_files`, or of `grain_eval_files`; none where those are not set.

  Raises:
    ConfigError: a file, a column or a prompt is wrong.
  """
  key, files = f"grain_{split}_files", {"train": config.grain_train_files, "eval": config.grain_eval_files}[split]
  columns = config.train_data_columns if split == "train" else config.eval_data_columns
  if len(columns) != 2:
    raise ConfigError(f"{split}_data_columns={columns} must name two columns: of prompts, and of their answers.")
  tasks, options, data = [], media_options(config), data_options(config)
  image_columns = () if options is None else (data.train if split == "train" else data.evaluation).image_columns
  for path in _files(key, files):
    media = None if options is None else ConversationMedia(options, tokenizer, str(Path(path).parent))
    for number, line in enumerate(_read(key, path).splitlines(), 1):
      if line.strip():
        try:
          prompt, answer, *pictures = json_values(line, columns, image_columns)
          tasks.append(_task(config, tokenizer, prompt, answer, images_of_columns(pictures), media))
        except (RunError, ValueError, TypeError) as error:  # a ConfigError is a ValueError
          raise ConfigError(f"{path}, line {number}: {error}") from None
  if files and not tasks:
    raise ConfigError(f"{key}={files}: there is no task in it.")
  return tasks


def prompt_tokens(config: MaxTextConfig, tokenizer: TextTokenizer, prompt: Any) -> tuple[int, ...]:
  """The tokens that the engine prefills for a text or the messages of a conversation; `ConfigError` if it is wrong."""
  if config.use_chat_template:
    tokens = chat_prompt(tokenizer, _messages(config, prompt), {})
  elif isinstance(prompt, str):
    tokens = tokenizer.encode(config.system_prompt + prompt).tolist()
  else:
    raise ConfigError("its prompt is no text; messages need use_chat_template=true.")
  return _checked(config, tokens)


def _messages(config: MaxTextConfig, prompt: Any) -> list[Any]:
  if not isinstance(prompt, str | list) or not prompt:
    raise ConfigError("its prompt is neither a text nor a list of messages.")
  messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
  return [*([{"role": "system", "content": config.system_prompt}] if config.system_prompt else []), *messages]


def _checked(config: MaxTextConfig, tokens: Sequence[int]) -> tuple[int, ...]:
  longest = config.max_prefill_predict_length
  if not 0 < len(tokens) <= longest:
    raise ConfigError(f"its prompt has {len(tokens)} tokens, and max_prefill_predict_length is {longest}.")
  return tuple(tokens)


def _files(key: str, value: str) -> list[str]:
  if not value:
    return []
  if "," in value or ";" in value:
    raise ConfigError(f"{key}={value}: tasks have no weights; write one glob of files.")
  paths = sorted(glob.glob(os.path.expanduser(value), recursive=True))
  if not paths or not all(Path(path).is_file() for path in paths):
    raise ConfigError(f"{key}={value}: there is no such file.")
  return paths


def _read(key: str, path: str) -> bytes:
  try:
    return Path(path).read_bytes()
  except OSError as error:
    raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}.") from None


def _task(
  config: MaxTextConfig,
  tokenizer: TextTokenizer,
  prompt: Any,
  answer: Any,
  pictures: Sequence[Any],
  media: ConversationMedia | None,
) -> Task:
  """A task from the values of its columns; a prompt is a text or the messages of a conversation."""
  if prompt is None or answer is None:
    raise ConfigError(f"it has no {'prompt' if prompt is None else 'answer'}.")
  if isinstance(answer, bool | list | dict):
    raise ConfigError("its answer is neither a text nor a number.")
  text = prompt if isinstance(prompt, str) else json.dumps(prompt)
  if media is None or not (pictures or media_parts(prompt)):
    return Task(text, prompt_tokens(config, tokenizer, prompt), str(answer))
  if not config.use_chat_template:
    raise ConfigError("images need use_chat_template=true, whose template writes where they stand.")
  messages, found = media.opened(with_column_images(_messages(config, prompt), pictures))
  parts, expand = template_messages(messages, media=True), partial(media.expanded, media=found)
  tokens = tokenizer.chat(parts, answer=True, expand=expand)
  own = _checked(config, tokens.tolist())
  if not media.fit(media.of_tokens(tokens, found)):
    raise ConfigError(
      f"it has {len(found)} images, and a row has room for {sum(media.options.slots)} inputs of the encoder: see "
      f"image_slots_per_row and max_num_images_per_example."
    )
  return Task(text, own, str(answer), messages)
