"""Whether this process is one of several that a cluster started, by JAX's own detection.

JAX knows Open MPI, Slurm, TPU pods on GKE and on GCE, and Kubernetes jobs. Some of its detectors ask a network, and
`jax.distributed.initialize` waits for processes that may never come, so a detector is asked only where its scheduler's
own variables are set.
"""

import os
from collections.abc import Callable

import jax
from jax._src.clusters import ClusterEnv, GceTpuCluster, GkeTpuCluster, K8sCluster, OmpiCluster, SlurmCluster


def find_cluster() -> type[ClusterEnv] | None:
  """The detector that `jax.distributed.initialize()` will use; None for a run of one process."""
  kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
  found = next((kind for kind in kinds if _MAY_ASK.get(kind, _always)() and _is_present(kind)), None)
  return None if found is None or _ALONE.get(found, _never)() else found


def _is_present(kind: type[ClusterEnv]) -> bool:
  try:
    return kind.is_env_present()
  except OSError:  # there is no metadata server to ask
    return False


def _always() -> bool:
  return True


def _never() -> bool:
  return False


def _on_tpus() -> bool:
  """Whether the run may use TPUs. A run on the CPUs of a pod's host must not wait for the other hosts."""
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  return not platforms or "tpu" in platforms.split(",")


def _one_worker() -> bool:
  workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
  return "," not in workers and "MEGASCALE_COORDINATOR_ADDRESS" not in os.environ


# Other pods, such as a notebook's, have Kubernetes' variables too; only a pod of an indexed job has an index.
_MAY_ASK: dict[type[ClusterEnv], Callable[[], bool]] = {
  GkeTpuCluster: _on_tpus,
  GceTpuCluster: _on_tpus,
  K8sCluster: lambda: "JOB_COMPLETION_INDEX" in os.environ,
}

# Clusters of one process are not joined: JAX might look for a coordinator in the network. A shell inside a Slurm
# allocation (`salloc`) has the allocation's number of tasks, and is a step of one task.
_ALONE: dict[type[ClusterEnv], Callable[[], bool]] = {
  OmpiCluster: lambda: os.environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1",
  SlurmCluster: lambda: "1" in (os.environ.get("SLURM_STEP_NUM_TASKS"), os.environ["SLURM_NTASKS"]),
  GkeTpuCluster: _one_worker,
  GceTpuCluster: lambda: GceTpuCluster.get_process_count() == 1,
}
