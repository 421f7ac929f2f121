"""Tasks: prompts, and the answers that rewards compare with."""

import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.conversations import chat_prompt
from maxtext.data.order import FEW_SHARDS, DocumentOrder
from maxtext.data.sources.json_lines import json_values
from maxtext.data.tokenizers import TextTokenizer


@dataclass(frozen=True)
class Task:
  """A prompt, as text and as the tokens that the engine prefills, and its answer."""

  prompt: str
  tokens: tuple[int, ...]
  answer: str


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
  tasks = []
  for path in _files(key, files):
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
      if line.strip():
        try:
          tasks.append(_task(config, tokenizer, *json_values(line, columns)))
        except (RunError, ValueError, TypeError) as error:  # a ConfigError is a ValueError
          raise ConfigError(f"{path}, line {number}: {error}") from None
  return tasks


def prompt_tokens(config: MaxTextConfig, tokenizer: TextTokenizer, prompt: Any) -> tuple[int, ...]:
  """The tokens that the engine prefills for a text or the messages of a conversation; `ConfigError` if it is wrong."""
  if config.use_chat_template:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    system: list[Mapping[str, Any]] = [{"role": "system", "content": config.system_prompt}]
    tokens = chat_prompt(tokenizer, [*(system if config.system_prompt else []), *messages], {})
  elif isinstance(prompt, str):
    tokens = tokenizer.encode(config.system_prompt + prompt).tolist()
  else:
    raise ConfigError("its prompt is no text; messages need use_chat_template=true.")
  longest = config.max_prefill_predict_length
  if not 0 < len(tokens) <= longest:
    raise ConfigError(f"its prompt has {len(tokens)} tokens, and max_prefill_predict_length is {longest}.")
  return tuple(tokens)


def _files(key: str, value: str) -> list[str]:
  if not value:
    return []
  if "," in value or ";" in value:
    raise ConfigError(f"{key}={value}: tasks have no weights; write one glob of files.")
  paths = sorted(glob.glob(str(Path(value).expanduser()), recursive=True))
  if not paths or not all(Path(path).is_file() for path in paths):
    raise ConfigError(f"{key}={value}: there is no such file.")
  return paths


def _task(config: MaxTextConfig, tokenizer: TextTokenizer, prompt: Any, answer: Any) -> Task:
  """A task from the values of its columns; a prompt is a text or the messages of a conversation."""
  if prompt is None or answer is None:
    raise ConfigError(f"it has no {'prompt' if prompt is None else 'answer'}.")
  if isinstance(answer, bool | list | dict):
    raise ConfigError("its answer is neither a text nor a number.")
  tokens = prompt_tokens(config, tokenizer, prompt)
  return Task(prompt if isinstance(prompt, str) else json.dumps(prompt), tokens, str(answer))
