"""Loading and unloading LoRA adapters while the server runs, with vLLM's endpoints.

Off unless the server has a folder (`--lora-root`) from which clients may load, and behind the API keys like all
endpoints. Nothing outside of that folder is read or told apart from what does not exist.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fastapi import HTTPException
from fastapi.responses import PlainTextResponse, Response

from maxtext.configs import ConfigError
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.inference_model import InferenceModel
from maxtext.serving.limits import ServerLimits
from maxtext.serving.protocol import LoadAdapterRequest, RequestLimits, UnloadAdapterRequest, parse

_Result = TypeVar("_Result")


class AdapterHandler:
  """Handles the bodies of requests to load or unload an adapter.

  Args:
    name: the served name of the base, which no adapter may have.
    limits: of the server, with the folder of adapters.
  """

  def __init__(self, name: str, limits: ServerLimits) -> None:
    self._name, self._root = name, limits.lora_root
    self._thread = ThreadPoolExecutor(1, "adapters")  # loads one after the other, and keeps no parser waiting

  async def load(self, raw: bytes, model: InferenceModel, limits: RequestLimits) -> Response:
    """Loads an adapter."""
    manager, root = self._enabled(model)

    def work() -> str:
      request = parse(LoadAdapterRequest, raw, limits)
      if request.lora_name == self._name:
        raise ConfigError(f"lora_name: '{self._name}' is the name of the base model: choose another.")
      manager.load(request.lora_name, str(_inside(root, request.lora_path)), "lora_path")
      return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    return PlainTextResponse(await self._in_thread(work))

  async def unload(self, raw: bytes, model: InferenceModel, limits: RequestLimits) -> Response:
    """Unloads an adapter; requests that use it finish."""
    manager, _ = self._enabled(model)

    def work() -> str:
      request = parse(UnloadAdapterRequest, raw, limits)
      manager.unload(request.lora_name)
      return f"Success: LoRA adapter '{request.lora_name}' removed successfully."

    return PlainTextResponse(await self._in_thread(work))

  def _enabled(self, model: InferenceModel) -> tuple[AdapterManager, Path]:
    if self._root is None or model.adapters is None:
      raise HTTPException(404, "This server loads no adapters at run time: start it with --lora-root FOLDER.")
    return model.adapters, Path(self._root)

  async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _inside(root: Path, path: str) -> Path:
  """The folder that a client names, relative to the root or absolute; raises `ConfigError` if it leads outside."""
  try:
    folder = (root / path).resolve()
    inside = folder.is_relative_to(root.resolve()) and folder.is_dir()
  except (OSError, RuntimeError, ValueError):  # too long, a cycle of links, or a null character
    inside = False
  if not inside:
    raise ConfigError(f"lora_path: {path[:200]!r} is no folder below the server's --lora-root.")
  return folder
