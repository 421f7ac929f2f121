"""Which LoRA adapters a model is served with, and how many more there is room for. Imports no JAX."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maxtext.configs import ConfigError

_ROOM, _RANK = 8, 16  # where further adapters may be loaded
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAX_NAME, _MAX_LORAS, _MAX_RANK = 128, 4096, 1024


@dataclass(frozen=True)
class AdapterOptions:
  """The adapters of the start, and the limits.

  Attributes:
    folders: PEFT folders by the names of their adapters.
    max_loras: adapters that are loaded at once; None is as many as there are folders.
    max_lora_rank: largest rank of an adapter; None is the largest of the folders.
    room: further adapters will be loaded, so that the defaults of both limits are at least 8 and 16.
    option: what names a folder in messages.
  """

  folders: Mapping[str, str] = field(default_factory=dict)
  max_loras: int | None = None
  max_lora_rank: int | None = None
  room: bool = False
  option: str = "--lora"

  def __post_init__(self) -> None:
    for limit, value, most in (
      ("max_loras", self.max_loras, _MAX_LORAS),
      ("max_lora_rank", self.max_lora_rank, _MAX_RANK),
    ):
      if value is not None and not 1 <= value <= most:
        raise ConfigError(f"{limit}={value}: it must be from 1 to {most}.")
    if len(self.folders) > self.num_slots:
      raise ConfigError(f"max_loras={self.max_loras} is too small for {len(self.folders)} adapters: raise it.")
    for name in self.folders:
      check_adapter_name(name, self.option)

  @property
  def num_slots(self) -> int:
    """Adapters that are loaded at once."""
    return self.max_loras or max(len(self.folders), _ROOM if self.room else 1)

  def rank(self, ranks: Sequence[int]) -> int:
    """The largest rank of an adapter, where the folders have these."""
    return self.max_lora_rank or max([*ranks, _RANK] if self.room or not ranks else ranks)


def check_adapter_name(name: str, option: str) -> None:
  """Raises `ConfigError` unless a name is of letters, digits and `._-`, perhaps with one slash."""
  if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
    raise ConfigError(
      f"{option}: {name[:_MAX_NAME]!r} is no name of an adapter: it has 1 to {_MAX_NAME} letters, digits, '.', '_' and "
      "'-', and may be ORGANIZATION/NAME."
    )
