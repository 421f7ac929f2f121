"""Parameters alone, out of a checkpoint of a whole state, in the layout that was asked for."""

import orbax.checkpoint as ocp
from etils import epath

from maxtext.checkpoint.files import contents, handlers, read
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.location import absolute, locate
from maxtext.checkpoint.metadata import CheckpointMetadata, CorruptCheckpointError
from maxtext.checkpoint.options import ArrayStorage
from maxtext.checkpoint.quiet import quiet_failed_saves
from maxtext.checkpoint.storage import writing
from maxtext.checkpoint.tokenizer import copy_tokenizer
from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError


def export_parameters(storage: ArrayStorage, source: str, target: str, stacked: int | None) -> epath.Path:
  """Writes `params/...` of a checkpoint (buffers among them) to a folder that does not exist yet; returns it. The base
  of adapters is named in it, as in the checkpoint.

  `stacked` is the dimension of stacked weights over layers; None writes each layer apart.
  It takes as much memory as the parameters do.
  """
  folder, out = locate(source), absolute(target)
  if out.exists():
    raise ConfigError(f"{target} is there already; name a folder that is not.")
  try:
    metadata = CheckpointMetadata.read(folder)
    names = metadata.parameters
    arrays = read(storage, folder, dict.fromkeys(names.values()), metadata)
  except CorruptCheckpointError as damage:
    raise RunError(f"{folder} is damaged: {damage}.") from None
  if metadata.stacked != 0:
    raise ConfigError(f"{folder} holds exported parameters already; export from a checkpoint of a run.")
  layout = Layout(stacked)
  stored = {f"params/{n}": a for path, name in names.items() for n, a in layout.store(path, arrays[name]).items()}
  quiet_failed_saves()
  with writing(out), ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers(storage))) as writer:
    writer.save(out, args=contents(storage, stored, metadata.step, layout.stacked, metadata.config, base=metadata.base))
  copy_tokenizer(source, out)
  return out
