"""The LoRA adapters of an engine by name: loaded from PEFT folders into slots of its tables, and unloaded.

Unloading takes the name away at once. Requests that use the adapter finish with it, and its slot is free when the last
of them has ended; so an adapter of the same name may be loaded meanwhile, into another slot.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.inference.adapter_options import AdapterOptions, check_adapter_name
from maxtext.inference.engine import Engine
from maxtext.layers.multi_lora import MultiLoraMatmul, table_paths
from maxtext.weights.from_peft import PeftReader


class UnknownAdapterError(ConfigError):
  """No adapter of that name is loaded."""


@dataclass(frozen=True)
class Adapter:
  """A loaded adapter.

  Attributes:
    slot: of the engine's tables.
    checksum: of its values, by which caches of prompts tell adapters apart. Names may be used again for other values.
  """

  name: str
  slot: int
  checksum: str


class AdapterManager:
  """Loads and unloads the adapters of an engine. Any thread may call it.

  Args:
    config: of the base model.
    options: the adapters of the start, and the limits.
  """

  def __init__(self, config: MaxTextConfig, options: AdapterOptions) -> None:
    if config.lora_rank:
      raise ConfigError(
        f"{options.option}: the model has adapters of its own (lora_rank={config.lora_rank}): serve its base, with "
        "those as a folder (maxtext convert to-peft), or its merged weights (maxtext convert to-hf)."
      )
    self._reader, self._options = PeftReader(config), options
    ranks = [self._reader.rank(folder, f"{options.option} {name}") for name, folder in options.folders.items()]
    self.max_loras, self.max_lora_rank = options.num_slots, options.rank(ranks)
    self._dtype = config.dtype.value
    self._loading, self._lock = threading.Lock(), threading.Lock()
    self._loaded: dict[str, Adapter] = {}
    self._users: Counter[int] = Counter()  # of slots
    self._free = list(range(self.max_loras, 0, -1))
    self._engine: Engine | None = None

  @property
  def matmul(self) -> MultiLoraMatmul:
    """What an engine needs to hold the adapters."""
    return MultiLoraMatmul(
      modules=frozenset(self._reader.modules), slots=self.max_loras + 1, rank=self.max_lora_rank, dtype=self._dtype
    )

  @property
  def names(self) -> list[str]:
    """The loaded adapters."""
    with self._lock:
      return list(self._loaded)

  def start(self, engine: Engine) -> None:
    """Loads the adapters of the options into an engine that was made with `matmul`."""
    self._engine = engine
    for name, folder in self._options.folders.items():
      self.load(name, folder, f"{self._options.option} {name}")

  def load(self, name: str, folder: str, option: str) -> None:
    """Loads an adapter; its name is known when this returns.

    Raises:
      ConfigError: the name or the folder is invalid, the name is taken, or all slots are; nothing has changed then.
    """
    assert self._engine is not None, "start() comes first"
    check_adapter_name(name, option)
    with self._loading:  # one at a time, so that two of one name do not both find it free
      slot = self._take_slot(name)
      try:
        found = self._reader.read(folder, option, self.max_lora_rank)
        arrays: dict[str, np.ndarray] = {}
        for module, pair in found.items():
          arrays |= zip(table_paths(module), pair, strict=True)
        adapter = Adapter(name, slot, _checksum(arrays))
        self._engine.write_adapter(slot, arrays)
      except BaseException:
        with self._lock:
          self._free.append(slot)
        raise
      with self._lock:
        self._loaded[name] = adapter

  def unload(self, name: str) -> None:
    """Takes a name away; its requests finish. Raises `UnknownAdapterError` if it is not loaded."""
    with self._lock:
      self._find(name)
      self._free_unused(self._loaded.pop(name))

  @contextmanager
  def use(self, name: str) -> Iterator[Adapter]:
    """The adapter of a name, which keeps its slot inside this context; raises `UnknownAdapterError`."""
    with self._lock:
      adapter = self._find(name)
      self._users[adapter.slot] += 1
    try:
      yield adapter
    finally:
      with self._lock:
        self._users[adapter.slot] -= 1
        self._free_unused(adapter)

  def _take_slot(self, name: str) -> int:
    with self._lock:
      if name in self._loaded:
        raise ConfigError(f"The adapter '{name}' is loaded already: unload it first, or choose another name.")
      if not self._free:
        draining = self.max_loras - len(self._loaded)
        finishing = f", {draining} of them until the requests of unloaded adapters have finished" if draining else ""
        raise ConfigError(
          f"All {self.max_loras} slots of adapters are taken{finishing}: unload one, or start with a larger max_loras."
        )
      return self._free.pop()

  def _find(self, name: str) -> Adapter:
    adapter = self._loaded.get(name)
    if adapter is None:
      raise UnknownAdapterError(f"The adapter '{name[:100]}' is not loaded.")
    return adapter

  def _free_unused(self, adapter: Adapter) -> None:
    if not self._users[adapter.slot] and self._loaded.get(adapter.name) is not adapter:
      self._free.append(adapter.slot)


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
  found = hashlib.sha256()
  for path, array in sorted(arrays.items()):
    found.update(f"{path} {array.shape} ".encode())
    found.update(np.ascontiguousarray(array).data)
  return found.hexdigest()
