"""`maxtext launch --to`: what starts a run on a cluster, as text to read and keep, from the keys that were planned.

`compile_topology` names chips and their arrangement, of which the hosts follow. Nothing is sent anywhere. A user's
mistake ends the run on every cluster, as under the supervisor of one machine; a preempted process is started again.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.secrets import SECRET_KEYS
from maxtext.configs.values import in_bucket
from maxtext.distributed.supervisor import FINAL_CODES
from maxtext.mesh.topology import Topology

IMAGE = "maxtext:latest"
_GRACE_SECONDS = 60  # for the last save after SIGTERM
_PORT = 8476
# Tasks end by themselves, since srun reports the highest code, and that of a killed task is above a mistake's.
_SRUN = "srun --kill-on-bad-exit=0 --wait=300 --label"


@dataclass(frozen=True)
class Job:
  """A run on a cluster.

  Attributes:
    words: the command after `maxtext`, without the keys of planning.
    topology: None for processes on CPUs.
    hosts: processes, in all slices.
  """

  name: str
  words: Sequence[str]
  config: MaxTextConfig
  topology: Topology | None
  hosts: int
  restarts: int
  image: str = IMAGE
  environment: Mapping[str, str] = field(default_factory=dict)

  @property
  def command(self) -> str:
    """The command of each process, for a shell."""
    return shlex.join(["maxtext", *self.words])

  @property
  def slices(self) -> int:
    """Slices of the same shape; one without a topology."""
    return self.topology.slices if self.topology else 1

  @property
  def detects(self) -> bool:
    """Whether JAX finds the processes of this run by itself; with a local tier it would wait for an orchestrator."""
    return not self.config.enable_emergency_checkpoint and not (self.topology and self.topology.gpu)

  def local_folders(self) -> list[str]:
    """Folders on each host's own disk that outlive a process: of the local tier, and of compiled programs."""
    c = self.config
    own = (c.local_checkpoint_directory if c.enable_emergency_checkpoint else None, c.jax_cache_dir)
    return list(dict.fromkeys(folder for folder in own if folder and folder.startswith("/")))


def make_job(
  command: Sequence[str],
  config: MaxTextConfig,
  *,
  processes: int | None = None,
  restarts: int = 0,
  image: str = IMAGE,
  environment: Mapping[str, str] | None = None,
) -> Job:
  """The run of a command and of its configuration; raises `ConfigError` for what no cluster could start."""
  environment = dict(environment or {})
  if not config.run_name:
    raise ConfigError("run_name is empty: a restarted run finds its checkpoints by its name, so write run_name=NAME.")
  if config.elastic_enabled:
    raise ConfigError("elastic_enabled=true: an elastic run is started on each host by maxtext launch --host.")
  for key in SECRET_KEYS:
    if getattr(config, key) or f"M_{key.upper()}" in environment:
      raise ConfigError(
        f"{key} is secret, and the text is meant to be kept: leave it out, and set M_{key.upper()} in the environment "
        "of the cluster's processes by the cluster's own secrets."
      )
  slices = max(1, config.compile_topology_num_slices)
  topology = Topology.named(config.compile_topology, slices) if config.compile_topology else None
  hosts = topology.hosts if topology else processes or 0
  if not hosts:
    raise ConfigError("compile_topology is empty: name the chips, such as compile_topology=v5p-128, or --processes N.")
  if processes not in (None, hosts):
    raise ConfigError(f"--processes {processes}: compile_topology={config.compile_topology} has {hosts} hosts.")
  return Job(_slug(config.run_name), command, config, topology, hosts, restarts, image, environment)


def jobset(job: Job) -> str:
  """A JobSet for Kubernetes: a job for each slice, a pod for each host."""
  chips, selector = _kubernetes_chips(job)
  _needs_bucket(job, "pods")
  per_slice = job.hosts // job.slices
  # Kubernetes puts variables in place of $(NAME) before a shell sees the text, and one $ in place of two.
  environment: list[dict[str, Any]] = [
    {"name": name, "value": value.replace("$", "$$")} for name, value in job.environment.items()
  ]
  command = f"exec {job.command.replace('$', '$$')}"
  if not job.detects:
    environment += [
      {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job.name}-slice-0-0.{job.name}:{_PORT}"},
      {"name": "JAX_NUM_PROCESSES", "value": str(job.hosts)},
      _field("JOB_INDEX", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
      _field("POD_INDEX", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
    ]
    command = f"export JAX_PROCESS_ID=$((JOB_INDEX * {per_slice} + POD_INDEX)); {command}"
  folders = job.local_folders()
  container = {
    "name": "maxtext",
    "image": job.image,
    "command": ["bash", "-c", command],
    "env": environment,
    "ports": [{"containerPort": _PORT}, *([] if job.topology and job.topology.gpu else [{"containerPort": 8471}])],
    "resources": {"limits": chips},
    "volumeMounts": [{"name": f"local-{i}", "mountPath": folder} for i, folder in enumerate(folders)],
  }
  pod = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": _GRACE_SECONDS,
    "nodeSelector": selector,
    # Kubernetes makes folders of a node that root alone may write to, and the image's user is another.
    "securityContext": {"runAsUser": 0} if folders else {},
    "containers": [_without_empty(container)],
    "volumes": [
      {"name": f"local-{i}", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
      for i, folder in enumerate(folders)
    ],
  }
  final = {"containerName": "maxtext", "operator": "In", "values": sorted(FINAL_CODES)}
  template = {
    "parallelism": per_slice,
    "completions": per_slice,
    "completionMode": "Indexed",
    "backoffLimit": 0,
    "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
    "template": {"spec": _without_empty(pod)},
  }
  manifest = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
      "name": job.name,
      "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    },
    "spec": {
      "failurePolicy": {
        "maxRestarts": job.restarts,
        "rules": [{"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
      },
      "replicatedJobs": [{"name": "slice", "replicas": job.slices, "template": {"spec": template}}],
    },
  }
  return _as_yaml(manifest)


def slurm(job: Job) -> str:
  """A batch script for Slurm: a task for each host, started again while restarts are left."""
  where = " ".join(job.config.base_output_directory.split()) or "the folder that the script is submitted in"
  chips = [f"--nodes={job.hosts}", "--ntasks-per-node=1", "--exclusive"] if job.topology else [f"--ntasks={job.hosts}"]
  if job.topology and job.topology.gpu:
    chips.append(f"--gpus-per-node={job.topology.chips // job.hosts}")
  options = [f"--job-name={job.name}", *chips, f"--output={job.name}-%j.log", "--open-mode=append", "--requeue"]
  command, setting = f"{_SRUN} {job.command}", ""
  if not job.detects:
    setting = (
      'JAX_COORDINATOR_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
      f":{_PORT} JAX_NUM_PROCESSES=$SLURM_NTASKS\nexport JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES\n"
    )
    each = shlex.quote(f"JAX_PROCESS_ID=$SLURM_PROCID exec {job.command}")
    command = f"{_SRUN} bash -c {each}"
  return "".join(
    [
      "#!/bin/bash\n",
      *(f"#SBATCH {option}\n" for option in options),
      f"# The run's folder is in {where}, which all nodes must see.\n",
      _exports(job),
      setting,
      _restarting(command, job.restarts),
    ]
  )


def skypilot(job: Job) -> str:
  """A task for SkyPilot: one slice of TPUs, or nodes of GPUs."""
  topology = _topology_of(job, "SkyPilot")
  _needs_bucket(job, "machines")
  if topology.slices > 1 and not topology.gpu:
    raise ConfigError(
      f"compile_topology_num_slices={topology.slices}: a task of SkyPilot has one slice. Use --to jobset or tpu-vm."
    )
  if topology.gpu:
    accelerators, nodes, extra = f"{_SKY_GPUS[topology.name]}:{topology.chips // job.hosts}", job.hosts, "cuda"
  else:
    accelerators, nodes, extra = f"tpu-{_tpu_name(topology)}", 1, "tpu"
  join = ""
  if topology.gpu:
    join = (
      f'export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{_PORT}"\n'
      "export JAX_NUM_PROCESSES=$SKYPILOT_NUM_NODES JAX_PROCESS_ID=$SKYPILOT_NODE_RANK\n"
    )
  elif not job.detects:
    raise ConfigError("enable_emergency_checkpoint=true: SkyPilot does not number the hosts of a TPU. Use --to jobset.")
  task = {
    "name": job.name,
    "num_nodes": nodes,
    "workdir": ".",
    "resources": {
      "accelerators": accelerators,
      "use_spot": True,
      "job_recovery": {"max_restarts_on_errors": job.restarts},
    },
    "envs": dict(job.environment),
    "setup": f"pip install '.[{extra},gcs]'\n",
    "run": f"{join}{job.command}\n",
  }
  return _as_yaml(_without_empty(task))


def tpu_vm(job: Job) -> str:
  """A shell script that asks for TPU machines by `gcloud`, and starts the run on all of them."""
  topology = _topology_of(job, "TPU machines")
  _needs_bucket(job, "machines")
  if topology.name not in _TPU_VMS:
    raise ConfigError(
      f"compile_topology={job.config.compile_topology}: Google's Cloud TPU API has {', '.join(_TPU_VMS)}; "
      "for others use --to jobset."
    )
  if not job.detects:
    raise ConfigError("enable_emergency_checkpoint=true: a queued resource numbers no hosts. Use --to jobset.")
  kind, runtime = _TPU_VMS[topology.name]
  nodes = [job.name] if job.slices == 1 else [f"{job.name}-{i}" for i in range(job.slices)]
  several = f"--node-count={job.slices} --node-prefix={job.name}" if job.slices > 1 else f"--node-id={job.name}"
  exports = [f"{name}={shlex.quote(value)}" for name, value in job.environment.items()]
  remote = " ".join(["cd maxtext && . .venv/bin/activate &&", *exports, job.command])
  script = _TPU_VM_SCRIPT % {
    "name": job.name,
    "several": several,
    "kind": kind,
    "shape": "x".join(map(str, topology.shape)),
    "runtime": runtime,
    "nodes": " ".join(nodes),
  }
  return script + _restarting(f"ssh_all {shlex.quote(remote)}", job.restarts)


_TPU_VM_SCRIPT = """\
#!/bin/bash
# Needs gcloud, PROJECT and ZONE. Run it in a checkout, which is copied; delete the machines when it has ended:
#   gcloud compute tpus queued-resources delete %(name)s --force --project=$PROJECT --zone=$ZONE
set -u
at=("--project=${PROJECT:?}" "--zone=${ZONE:?}")
gcloud compute tpus queued-resources create %(name)s "${at[@]}" %(several)s \\
  --type=%(kind)s --topology=%(shape)s --runtime-version=%(runtime)s || exit 1
state() { gcloud compute tpus queued-resources describe %(name)s "${at[@]}" --format='value(state.state)'; }
until [ "$(state)" = ACTIVE ]; do sleep 30; done
nodes=(%(nodes)s)
ssh_all() {  # runs a command on every host of every slice; fails with the code of a slice that failed
  local code=0 processes=()
  for node in "${nodes[@]}"; do
    gcloud compute tpus tpu-vm ssh "$node" "${at[@]}" --worker=all --command="$1" & processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || code=$?; done
  return "$code"
}
for node in "${nodes[@]}"; do
  gcloud compute tpus tpu-vm scp --recurse . "$node":maxtext "${at[@]}" --worker=all || exit 1
done
ssh_all "cd maxtext && python3 -m venv .venv && .venv/bin/pip install -q '.[tpu,gcs]'" || exit 1
"""

WRITERS: Mapping[str, Callable[[Job], str]] = {
  "jobset": jobset,
  "slurm": slurm,
  "skypilot": skypilot,
  "tpu-vm": tpu_vm,
}

# Google's names of the chips: for Kubernetes, and of kind and system for machines of the Cloud TPU API.
_KUBERNETES_TPUS = {
  "v4": "tpu-v4-podslice",
  "v5e": "tpu-v5-lite-podslice",
  "v5p": "tpu-v5p-slice",
  "v6e": "tpu-v6e-slice",
  "tpu7x": "tpu7x",
}
_KUBERNETES_GPUS = {
  "a100": "nvidia-a100-80gb",
  "h100": "nvidia-h100-80gb",
  "h200": "nvidia-h200-141gb",
  "b200": "nvidia-b200",
}
_TPU_VMS = {
  "v4": ("v4", "tpu-ubuntu2204-base"),
  "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
  "v5p": ("v5p", "v2-alpha-tpuv5"),
  "v6e": ("v6e", "v2-alpha-tpuv6e"),
}
_SKY_GPUS = {"a100": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200"}
_SKY_TPUS = {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}  # and cores in a name


def _kubernetes_chips(job: Job) -> tuple[dict[str, int], dict[str, str]]:
  """The chips of a pod, and the labels of nodes that have them."""
  topology = _topology_of(job, "a JobSet")
  each = topology.chips // job.hosts
  if topology.gpu:
    return {"nvidia.com/gpu": each}, {"cloud.google.com/gke-accelerator": _KUBERNETES_GPUS[topology.name]}
  return {"google.com/tpu": each}, {
    "cloud.google.com/gke-tpu-accelerator": _KUBERNETES_TPUS[topology.name],
    "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.shape)),
  }


def _tpu_name(topology: Topology) -> str:
  if topology.name not in _SKY_TPUS:
    raise ConfigError(f"compile_topology: SkyPilot has no {topology.name}. Use --to jobset.")
  kind, cores = _SKY_TPUS[topology.name]
  return f"{kind}-{topology.chips * cores}"


def _topology_of(job: Job, what: str) -> Topology:
  if job.topology is None:
    raise ConfigError(f"compile_topology is empty: {what} needs the name of chips, such as compile_topology=v5p-128.")
  return job.topology


def _needs_bucket(job: Job, hosts: str) -> None:
  folder = job.config.base_output_directory
  if not in_bucket(folder):
    raise ConfigError(
      f"base_output_directory={folder}: these {hosts} share no disk, and keep none. Write a bucket, such as "
      "base_output_directory=gs://mine/runs."
    )


def _restarting(command: str, restarts: int) -> str:
  """A loop of a shell around a command. Codes that a restart does not change, and an asked end, leave it."""
  final = "|".join(map(str, (0, *sorted(FINAL_CODES))))
  return (
    f"for attempt in $(seq 0 {restarts}); do\n"
    f"  {command}\n"
    "  code=$?\n"
    f'  case "$code" in {final}) exit "$code" ;; esac\n'
    f'  echo "attempt $attempt of {restarts} ended with $code" >&2\n'
    f'  [ "$attempt" = {restarts} ] || sleep $((2 ** (attempt < 7 ? attempt : 7)))\n'
    "done\n"
    'exit "$code"\n'
  )


def _exports(job: Job) -> str:
  return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items())


def _field(name: str, path: str) -> dict[str, Any]:
  return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in values.items() if value not in ([], {})}


def _as_yaml(values: dict[str, Any]) -> str:
  return yaml.safe_dump(values, sort_keys=False, width=1000)


def _slug(name: str) -> str:
  """A name that Kubernetes, Slurm and Google take: letters, digits and dashes, short enough for names of pods."""
  found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
  return found if found[:1].isalpha() else f"run-{found}".rstrip("-")
