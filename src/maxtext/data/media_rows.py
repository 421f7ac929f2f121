"""Media of packed rows, as the arrays that towers take."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from maxtext.data.conversation_media import MediaOptions, TowerRoom, media_places
from maxtext.data.media import TOWERS
from maxtext.media.positions import prompt_rotary_positions
from maxtext.media.processed import Processed, SlotShape


class RowArray(NamedTuple):
  """An array of a row: its shape, its dtype, and what it holds where nothing is."""

  shape: tuple[int, ...]
  dtype: type
  padding: int = 0


def tower_arrays(room: TowerRoom, length: int) -> dict[str, RowArray]:
  """The arrays of `TowerInputs` in a row of so many tokens, by name."""
  slots, patches, values = room.slots, room.shape.patches, room.shape.values
  found = {"indices": RowArray((length,), np.int32, -1)}
  if room.shape.layout == "separate":
    return found | {"inputs": RowArray((slots, patches, values), np.float32)}
  if room.shape.layout == "sound":
    inputs = RowArray((1, slots, values, patches), np.float32)
    return found | {"inputs": inputs, "segments": RowArray((1, slots * room.shape.features), np.int32)}
  shape = 1, slots * patches
  return found | {
    "inputs": RowArray((*shape, values), np.float32),
    "positions": RowArray((*shape, 2), np.int32),
    "grid": RowArray((*shape, 2), np.int32, 1),
    "segments": RowArray(shape, np.int32),
  }


class MediaRows(NamedTuple):
  """Media of R rows of S tokens.

  Attributes:
    towers: the arrays of `TowerInputs` for each tower, by name; inputs that no token refers to are padding.
    rotary_positions: [R,S,3] of tokens in their sequence; None where positions are numbers.
  """

  towers: Mapping[str, Mapping[str, np.ndarray]]
  rotary_positions: np.ndarray | None

  @staticmethod
  def empty(options: MediaOptions, rows: int, length: int) -> "MediaRows":
    """Rows of text."""
    towers: dict[str, dict[str, np.ndarray]] = {
      tower: {
        name: np.full((rows, *array.shape), array.padding, array.dtype)
        for name, array in tower_arrays(room, length).items()
      }
      for tower, room in options.rooms.items()
    }
    return MediaRows(towers, None if options.axes is None else np.zeros((rows, length, 3), np.int32))

  @staticmethod
  def join(parts: "list[MediaRows]") -> "MediaRows":
    """The rows of several makers, one after the other."""
    towers = {
      tower: {name: np.concatenate([part.towers[tower][name] for part in parts]) for name in arrays}
      for tower, arrays in parts[0].towers.items()
    }
    rotary = [part.rotary_positions for part in parts if part.rotary_positions is not None]
    return MediaRows(towers, np.concatenate(rotary) if rotary else None)

  def add(self, options: MediaOptions, row: int, here: slice, media: np.ndarray | None) -> None:
    """Adds a sequence with the medium of each token, see `MEDIUM` in `documents`; None is text alone."""
    runs, length = [], here.stop - here.start
    for medium, places in () if media is None else media_places(media):
      assert len(places) == medium.features, "a medium was cut from its text"
      processed = medium.process(options)
      self.put(options, row, TOWERS[medium.kind], processed, here.start + places)
      if options.axes is not None:
        runs.append((places, options.axes(medium.kind, processed), np.zeros(len(places))))
    if self.rotary_positions is not None:
      self.rotary_positions[row, here] = prompt_rotary_positions(length, runs)

  def put(self, options: MediaOptions, row: int, tower: str, medium: Processed, places: np.ndarray) -> None:
    """Puts a medium behind those of its row; `places` are of the tokens of its features."""
    shape, arrays = options.rooms[tower].shape, {name: array[row] for name, array in self.towers[tower].items()}
    slot = -(-(int(arrays["indices"].max()) + 1) // shape.features)
    features = _PUT[shape.layout](arrays, shape, slot, medium)
    arrays["indices"][places] = slot * shape.features + features


def _put_separate(arrays: Mapping[str, np.ndarray], shape: SlotShape, slot: int, medium: Processed) -> np.ndarray:
  """One input of the tower for each slot."""
  arrays["inputs"][slot : slot + len(medium.inputs)] = medium.inputs
  return np.arange(medium.features)


def _put_patches(arrays: Mapping[str, np.ndarray], shape: SlotShape, slot: int, medium: Processed) -> np.ndarray:
  """Patches of images of any size in one input, which attend within their image or frame."""
  frames, patches = medium.inputs.shape[:2]
  first = slot * shape.patches
  here, places = slice(first, first + frames * patches), medium.grid[..., 1:]
  arrays["inputs"][0, here] = medium.inputs.reshape(-1, shape.values)
  arrays["positions"][0, here] = places.reshape(-1, 2)
  arrays["grid"][0, here] = np.broadcast_to(places.max(1, keepdims=True) + 1, places.shape).reshape(-1, 2)
  arrays["segments"][0, here] = arrays["segments"].max() + 1 + np.repeat(np.arange(frames), patches)
  return np.arange(medium.features)


def _put_sound(arrays: Mapping[str, np.ndarray], shape: SlotShape, slot: int, medium: Processed) -> np.ndarray:
  """Chunks of sounds in one input, whose tokens attend within their window."""
  chunks = len(medium.inputs)
  arrays["inputs"][0, slot : slot + chunks] = medium.inputs.swapaxes(1, 2)
  frames = medium.grid[:, :: shape.stride]
  real = (frames[..., 0] >= 0).reshape(-1)
  windows = arrays["segments"].max() + 1 + frames[..., 1].reshape(-1)
  first = slot * shape.features
  arrays["segments"][0, first : first + len(real)] = np.where(real, windows, 0)
  return np.flatnonzero(real)


_PUT: Mapping[str, Any] = {"separate": _put_separate, "patches": _put_patches, "sound": _put_sound}
