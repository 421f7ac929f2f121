"""The program of a run for a topology that is not here."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.topology import Topology
from maxtext.training.program import Program


def program_for(config: MaxTextConfig) -> tuple[Program, Topology]:
  """The program of a run on `compile_topology`; nothing is allocated, and no device is used."""
  if not config.compile_topology:
    raise ConfigError("compile_topology is empty: name the hardware to compile for, such as compile_topology=v5p-128.")
  topology = Topology.named(config.compile_topology, max(config.compile_topology_num_slices, 1))
  if topology.gpu and config.num_slices == -1:  # a description of a GPU does not know it
    config = config.model_copy(update={"num_slices": topology.slices})
  if not topology.compiles:
    config = _traceable_config(config)
  if not config.use_grpo:
    return Program.of(config, make_mesh(config, topology.devices())), topology
  from maxtext.rl.train_policy import policy_updates

  updates = policy_updates(config, topology.devices())
  mesh = make_mesh(updates.config, updates.devices)
  return Program.of(updates.config, mesh, updates.objective, data=()), topology  # rollouts bring the batches


def _traceable_config(config: MaxTextConfig) -> MaxTextConfig:
  """The configuration without options that need the devices while the step is traced."""
  for key in ("optimizer_memory_host_offload", "parameter_memory_host_offload"):
    if getattr(config, key):
      raise ConfigError(f"{key}=true is not supported for compile_topology={config.compile_topology}: leave it out.")
  # cuDNN attention can be traced only with cuDNN; other attention has the same tensors.
  return config.model_copy(update={"attention": "chunked"})
