"""`maxtext launch --to`: manifests by published schemas, scripts by the shell that runs them, and a real Slurm."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from maxtext.cli.config import resolve_overrides
from maxtext.cli.main import main
from tests.flags import flags
from tests.slurm_cluster import find_daemons, slurm_cluster

ROOT = Path(__file__).parents[1]
SCHEMAS = yaml.safe_load((ROOT / "tests" / "data" / "cluster_schemas.yml").read_text())
BUCKET = "base_output_directory=gs://mine/runs"
RUN = ("llama2-70b-v5p-128", "run_name=Big_run.2", "dataset_type=synthetic", BUCKET)
TIER = (
  "enable_emergency_checkpoint=true",
  "enable_checkpointing=true",
  "local_checkpoint_directory=/local",
  "local_checkpoint_period=50",
  "jax_cache_dir=/jax",
)
TOPOLOGIES = ["v4-16", "v5e-16", "v5p-128", "v6e-256", "tpu7x-128", "a100-16", "h100-8", "h200-16", "b200-64"]


def launch(capsys, target, *words):
  """The text for a target; the error instead, after its exit code, where there is one."""
  code = main(["launch", "--to", target, *words])
  said = capsys.readouterr()
  return said.out if code == 0 else (code, said.err)


def jobset(capsys, *words):
  """A JobSet that fits its schema, and whose job fits that of Kubernetes; and that job's specification."""
  found = yaml.safe_load(launch(capsys, "jobset", *words))
  jsonschema.validate(found, SCHEMAS["jobset"])
  (replicated,) = found["spec"]["replicatedJobs"]
  job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}, "spec": replicated["template"]["spec"]}
  kubernetes_validate.validate(job, "1.37", strict=True)
  return found, job["spec"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_jobset_has_the_chips_that_were_planned(topology, capsys):
  found, job = jobset(capsys, "--restarts", "7", *RUN, f"compile_topology={topology}", "compile_topology_num_slices=2")
  (replicated,) = found["spec"]["replicatedJobs"]
  pod = job["template"]["spec"]
  ((resource, each),) = pod["containers"][0]["resources"]["limits"].items()
  kind, count = topology.split("-")
  gpu = resource == "nvidia.com/gpu"
  chips = int(count) // (2 if kind in ("v4", "v5p", "tpu7x") else 1)
  assert (replicated["replicas"], job["completions"] * each, each) == (2, chips, 8 if gpu else 4)
  if not gpu:
    sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert eval("*".join(sides)) == chips
  assert found["spec"]["failurePolicy"]["maxRestarts"] == 7
  assert "compile_topology" not in pod["containers"][0]["command"][-1]


def test_a_local_tier_numbers_its_hosts_and_outlives_them(capsys):
  _, job = jobset(capsys, *RUN, *TIER, "compile_topology=v5p-128", "compile_topology_num_slices=2")
  assert job["template"]["spec"]["securityContext"] == {"runAsUser": 0}, "the node's folders are root's"
  container = job["template"]["spec"]["containers"][0]
  values = {entry["name"]: entry.get("value") for entry in container["env"]}
  assert (values["JAX_COORDINATOR_ADDRESS"], values["JAX_NUM_PROCESSES"]) == (
    "big-run-2-slice-0-0.big-run-2:8476",
    "32",
  )
  assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/local", "/jax"}
  command = ["bash", "-c", container["command"][-1].replace("exec maxtext", "echo $JAX_PROCESS_ID; : maxtext")]
  numbered = {
    int(subprocess.run(command, env={"JOB_INDEX": str(i), "POD_INDEX": str(j)}, capture_output=True, check=True).stdout)
    for i in range(2)
    for j in range(16)
  }
  assert numbered == set(range(32))


def test_a_file_of_keys_travels_as_keys(tmp_path, capsys):
  file = tmp_path / "own.yml"
  file.write_text(
    f"model_name: llama2-7b\nrun_name: own\nsteps: 7\ndataset_type: synthetic\n{BUCKET.replace('=', ': ')}\n"
  )
  _, job = jobset(capsys, str(file), "learning_rate=0.5", "compile_topology=v5p-16")
  words = job["template"]["spec"]["containers"][0]["command"][-1]
  assert str(file) not in words
  assert all(word in words.split() for word in ("model_name=llama2-7b", "steps=7", "learning_rate=0.5", "run_name=own"))


HOSTILE = 'it\'s $(HOSTNAME) $$PATH `id` "x" #y\\ é😀\n*'


def test_a_value_travels_whatever_is_in_it(tmp_path, capsys):
  """Through YAML, Kubernetes' own variables and a shell, to a process that reads the same keys."""
  values = {
    "model_name": "llama2-7b", "run_name": "own", "base_output_directory": "gs://mine/a b", "hf_path": "null",
    "sample_prompts": [HOSTILE, "null"], "prompt": HOSTILE, "dataset_type": "synthetic", "hf_name": "'1e5",
  }  # fmt: skip
  (tmp_path / "own.yml").write_text(yaml.safe_dump(values, allow_unicode=True))
  words = ["--env", f"A={HOSTILE}", str(tmp_path / "own.yml"), "compile_topology=v5p-16"]
  _, job = jobset(capsys, *words)
  (container,) = job["template"]["spec"]["containers"]
  known = {"HOSTNAME": "expanded"}

  def expanded(text):  # as Kubernetes does it
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: known.get(m[1], m[0]) if m[1] else "$", text)

  assert expanded(container["env"][0]["value"]) == HOSTILE
  command = expanded(container["command"][-1]).replace("exec maxtext", "printf '%s\\0'")
  found = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout.decode().split("\0")
  config = resolve_overrides(found[1:-1]).config
  assert {key: getattr(config, key) for key in values} == values


def test_a_folder_of_two_lines_stays_in_its_comment(capsys):
  text = launch(capsys, "slurm", *RUN[:3], "compile_topology=h100-16", "base_output_directory=/a\ntouch b")
  assert "# The run's folder is in /a touch b, which" in text


@pytest.mark.parametrize("target", ["jobset", "slurm", "skypilot", "tpu-vm"])
def test_a_file_that_was_planned_is_launched_without_its_topology(target, tmp_path, capsys, monkeypatch):
  """Nor does a secret of this shell get into the text, or in its way."""
  monkeypatch.setenv("M_HF_ACCESS_TOKEN", "abc123")
  (tmp_path / "own.yml").write_text("compile_topology: v5p-16\ndataset_type: synthetic\nrun_name: own\n")
  text = launch(capsys, target, str(tmp_path / "own.yml"), BUCKET)
  assert "abc123" not in text
  (words,) = re.findall(r"maxtext train [^'\n]*", text)
  assert resolve_overrides(words.split()[2:]).config.compile_topology == ""


@pytest.mark.parametrize("topology", ["v4-16", "v5e-16", "v5p-128", "v6e-256", "a100-16", "h100-8", "b200-64"])
def test_a_task_for_skypilot(topology, capsys):
  found = yaml.safe_load(launch(capsys, "skypilot", "--env", "A=b c", *RUN, f"compile_topology={topology}"))
  jsonschema.validate(found, SCHEMAS["skypilot"])
  assert found["envs"] == {"A": "b c"}
  assert ("SKYPILOT_NODE_RANK" in found["run"]) == ("tpu" not in found["resources"]["accelerators"])


@pytest.mark.parametrize("target", ["slurm", "tpu-vm"])
@pytest.mark.parametrize("topology", ["v5p-16", "v5p-32"])
def test_scripts_have_nothing_that_shellcheck_knows_better(target, topology, tmp_path, capsys):
  tier = TIER if (target, topology) == ("slurm", "v5p-16") else ()
  (tmp_path / "script").write_text(launch(capsys, target, *RUN, *tier, f"compile_topology={topology}"))
  done = subprocess.run(
    ["shellcheck", "-e", "SC2016", "script"], cwd=tmp_path, capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_has_nothing_that_hadolint_knows_better():
  done = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (0, "")
  copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
  allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
  assert {name for line in copied for name in line.split()} == allowed
  assert all((ROOT / name).exists() for name in allowed)


WRONG = {
  "no name": ("jobset", ["small-llama", "compile_topology=v5p-8"], "run_name is empty"),
  "no chips": ("slurm", ["small-llama", "run_name=a"], "compile_topology is empty: name the chips"),
  "cpus": ("jobset", ["--processes", "2", "small-llama", "run_name=a"], "a JobSet needs the name of chips"),
  "hosts": ("slurm", ["--processes", "3", *RUN, "compile_topology=v5p-16"], "has 2 hosts"),
  "no bucket": ("tpu-vm", ["small-llama", "run_name=a", "compile_topology=v5p-8"], "Write a bucket"),
  "no such machines": ("tpu-vm", [*RUN, "compile_topology=tpu7x-128"], "Cloud TPU API has v4, v5e, v5p, v6e"),
  "slices": ("skypilot", [*RUN, "compile_topology=v5p-8", "compile_topology_num_slices=2"], "has one slice"),
  "tier": ("skypilot", [*RUN, *TIER, "compile_topology=v5p-8"], "does not number the hosts"),
  "secret": ("jobset", [*RUN, "compile_topology=v5p-8", "hf_access_token=abc123"], "hf_access_token is secret"),
  "variable": ("jobset", ["--env", "M_HF_ACCESS_TOKEN=abc123", *RUN, "compile_topology=v5p-8"], "is secret"),
  "pair": ("jobset", ["--env", "abc", *RUN, "compile_topology=v5p-8"], "--env abc: write NAME=VALUE"),
  "flag": ("jobset", [*RUN, "--restarts", "3"], "--restarts: flags of launch stand before"),
  "elastic": (
    "jobset",
    [*RUN, "compile_topology=v5p-8", "elastic_enabled=true", "enable_checkpointing=true"],
    "maxtext launch --host",
  ),
  "key": ("slurm", ["small-llama", "stepps=3"], "Did you mean 'steps'"),
}


@pytest.mark.parametrize(("target", "words", "message"), WRONG.values(), ids=WRONG.keys())
def test_mistakes(target, words, message, capsys):
  code, said = launch(capsys, target, *words)
  assert (code, message in said, "abc123" in said) == (2, True, False), said


def stub(folder, name, body):
  file = folder / name
  file.write_text(f"#!/bin/bash\n{body}\n")
  file.chmod(file.stat().st_mode | stat.S_IXUSR)


def run_script(folder, text, name, body):
  """Runs a script with a program of that name in place of the real one, and without waiting; its code and its calls."""
  stub(folder, name, f'printf "%s\\n" "$*" >> {folder}/calls\n{body}')
  stub(folder, "sleep", "")
  environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PROJECT": "p", "ZONE": "z"}
  done = subprocess.run(["bash"], input=text, text=True, env=environment, cwd=folder, capture_output=True, check=False)
  return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (127, 1), (1, 4), (143, 4)])
def test_a_batch_script_restarts_what_can_be_mended(code, starts, tmp_path, capsys):
  text = launch(capsys, "slurm", "--restarts", "3", "--env", "A=it's", *RUN, "compile_topology=h100-16")
  assert re.findall(r"^#SBATCH --(?:nodes|gpus-per-node)=(\d+)$", text, re.MULTILINE) == ["2", "8"]
  stub(tmp_path, "scontrol", "echo node-1; echo node-2")
  found, calls = run_script(
    tmp_path, text, "srun", f'echo "$A $JAX_COORDINATOR_ADDRESS" >> {tmp_path}/said; exit {code}'
  )
  assert (found, len(calls)) == (code, starts)
  assert (tmp_path / "said").read_text().splitlines()[0] == "it's node-1:8476"


@pytest.mark.parametrize("slices", [1, 2])
def test_a_script_for_tpu_machines_starts_all_of_them(slices, tmp_path, capsys):
  words = [*RUN, "compile_topology=v5p-32", f"compile_topology_num_slices={slices}"]
  text = launch(capsys, "tpu-vm", "--restarts", "1", "--env", "A=b c", *words)
  body = 'case "$*" in *describe*) echo ACTIVE ;; *"maxtext train"*) exit 1 ;; esac'
  code, calls = run_script(tmp_path, text, "gcloud", body)
  created, *rest = [call for call in calls if "describe" not in call]
  assert code == 1
  assert "--type=v5p --topology=2x2x4 --runtime-version=v2-alpha-tpuv5" in created
  assert all("--project=p --zone=z" in call for call in calls)
  trained = [call for call in rest if "A='b c' maxtext train llama2-70b-v5p-128 run_name=Big_run.2" in call]
  assert len(trained) == 2 * slices, "each slice, started again once"
  assert sum(" scp " in call for call in rest) == slices


@pytest.fixture
def submit(tmp_path, capsys):
  """Commands of a real Slurm with four tasks, in a folder, where the script of a run is `run.sh`."""
  if find_daemons() is None:
    pytest.skip("slurmctld, slurmd and munged are needed, and the right to start them")
  with slurm_cluster(tmp_path, tasks=4) as environment:
    environment |= flags() | {"JAX_PLATFORMS": "cpu"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def write(*words, change=lambda text: text):
      text = launch(capsys, "slurm", "--processes", "4", "--restarts", "2", *words)
      (tmp_path / "run.sh").write_text(change(text))

    def slurm(*command):
      return subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
      )

    yield write, slurm


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_four_tasks_of_a_real_slurm_train_as_one_run(submit, tmp_path, capsys):
  """A preempted task is started again, from the last checkpoint."""
  write, slurm = submit
  write("small-llama", "run_name=four", "steps=12", "checkpoint_period=4", "sample_prompts=[]")
  assert "to start at" in slurm("sbatch", "--test-only", "run.sh").communicate()[0]
  began = time.monotonic()
  submitted = slurm("sbatch", "--wait", "--output=four.log", "run.sh")
  metrics = tmp_path / "runs" / "four" / "metrics.jsonl"
  while not metrics.exists() or len(metrics.read_text().splitlines()) < 7:
    assert submitted.poll() is None, (tmp_path / "four.log").read_text()
    time.sleep(0.2)
  job = slurm("squeue", "-h", "-o", "%i").communicate()[0].strip()
  slurm("scancel", "--signal=TERM", f"{job}.0").wait(60)
  assert submitted.wait() == 0
  log = (tmp_path / "four.log").read_text()
  with capsys.disabled():
    print(f"\nsubmitted, interrupted and ended in {time.monotonic() - began:.0f} s\n{log}")
  losses = [json.loads(line) for line in metrics.read_text().splitlines()]
  assert "parameters on 4 cpu" in log
  assert "attempt 0 of 2 ended with 143" in log
  assert "resuming from" in log
  assert [line["step"] for line in losses] == list(range(1, 13))
  assert losses[-1]["loss"] < losses[0]["loss"]


@pytest.mark.nightly
def test_slurm_does_not_repeat_a_mistake(submit, tmp_path):
  write, slurm = submit
  write("small-llama", "run_name=four", "steps=12", change=lambda text: text.replace("steps=12", "stepps=12"))
  assert slurm("sbatch", "--wait", "--output=four.log", "run.sh").wait(600) == 2
  log = (tmp_path / "four.log").read_text()
  assert "attempt" not in log
  assert log.count("Did you mean 'steps'?") == 4
