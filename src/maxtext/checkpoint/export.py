"""Parameters alone, out of a checkpoint of a whole state, in the layout that was asked for."""

import orbax.checkpoint as ocp
from etils import epath

from maxtext.checkpoint.files import contents, handlers, read
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.location import absolute, locate
from maxtext.checkpoint.record import DamagedError, Record
from maxtext.checkpoint.tokenizer import copy_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError


def export_parameters(config: MaxTextConfig, source: str, target: str) -> epath.Path:
  """Writes `params/...` of a checkpoint (buffers among them) to a folder that does not exist yet; returns it.

  `force_unroll` writes each layer apart; otherwise `param_scan_axis` is the dimension of stacked weights over layers.
  It takes as much memory as the parameters do.
  """
  folder, out = locate(source), absolute(target)
  if out.exists():
    raise ConfigError(f"{target} is there already; name a folder that is not.")
  try:
    record = Record.read(folder)
    names = record.parameters
    arrays = read(config, folder, dict.fromkeys(names.values()), record)
  except DamagedError as damage:
    raise RunError(f"{folder} is damaged: {damage}.") from None
  if record.stacked != 0:
    raise ConfigError(f"{folder} holds exported parameters already; export from a checkpoint of a run.")
  layout = Layout(None if config.force_unroll else config.param_scan_axis)
  stored = {f"params/{n}": a for path, name in names.items() for n, a in layout.store(path, arrays[name]).items()}
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers(config))) as writer:
    writer.save(out, args=contents(config, stored, record.step, layout.stacked, record.config))
  copy_tokenizer(source, out)
  return out
