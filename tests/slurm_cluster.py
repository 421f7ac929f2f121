"""A Slurm of one node, with the daemons of this machine: munged, slurmctld and slurmd, in a folder of its own."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "setpriv")  # the last ends the others with this process
_PATH = f"{os.environ['PATH']}:/usr/sbin"


def find_daemons() -> list[str] | None:
  """The daemons' paths; None where one is absent, or where only root could start them."""
  found = [path for name in DAEMONS if (path := shutil.which(name, path=_PATH))]
  return found if len(found) == len(DAEMONS) and os.geteuid() == 0 else None


@contextmanager
def slurm_cluster(folder: Path, tasks: int) -> Iterator[dict[str, str]]:
  """A running cluster with room for so many tasks; gives the environment of its commands."""
  folder.chmod(0o755)
  munge, host = folder / "munge", socket.gethostname()
  key = folder / "munge.key"
  key.write_bytes(secrets.token_bytes(128))
  key.chmod(0o400)
  controller, node = _free_port(), _free_port()
  (folder / "slurm.conf").write_text(
    f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={munge}
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool"}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd.pid"}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={tasks}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
  )
  environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
  for name in ("state", "spool"):
    (folder / name).mkdir()
  files = [f"--{kind}-file={folder / f'munge.{kind}'}" for kind in ("key", "pid", "log", "seed")]
  commands = [["munged", "--foreground", "--force", f"--socket={munge}", *files], ["slurmctld", "-D"], ["slurmd", "-D"]]
  daemons = []
  try:
    for command in commands:
      with (folder / f"{command[0]}.out").open("wb") as out:
        daemons.append(
          subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], env=environment, stdout=out, stderr=out)
        )
      time.sleep(1)  # the next one asks this one as it starts
    _wait_until_idle(environment)
    yield environment
  finally:
    for daemon in reversed(daemons):
      daemon.terminate()
      daemon.wait(30)


def _wait_until_idle(environment: dict[str, str]) -> None:
  deadline = time.monotonic() + 60
  while time.monotonic() < deadline:
    found = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
    if found.stdout.strip() == "idle":
      return
    time.sleep(0.5)
  raise TimeoutError(f"the node is not idle: {found.stdout}{found.stderr}")


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
