"""`maxtext doctor`, `--version`, and the hints for keys of other tools."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from maxtext.cli.main import main
from maxtext.configs.explain import search_keys
from maxtext.configs.renamed_keys import FOREIGN_KEYS, RENAMED_KEYS
from maxtext.configs.types import MaxTextConfig
from maxtext.observe.doctor import EXTRAS, examine


def test_the_machine_is_examined(tmp_path):
  found = {finding.subject: finding for finding in examine(tmp_path / "runs")}
  assert {"python", "versions", "host memory", "disk", "devices", "matmul float32"} <= found.keys()
  assert "8 cpu" in found["devices"].text
  assert found["extra serve"].text == "installed"
  assert str(tmp_path) in found["disk"].text, "the nearest folder that is there"


def test_every_extra_is_examined():
  declared = set(importlib.metadata.metadata("maxtext").get_all("Provides-Extra"))
  assert declared - {"dev", "docs"} == EXTRAS.keys()


def test_version_and_module():
  version = importlib.metadata.version("maxtext")
  done = subprocess.run([sys.executable, "-m", "maxtext", "--version"], capture_output=True, text=True, check=True)
  assert done.stdout == f"maxtext {version}\n"


@pytest.mark.parametrize(
  ("given", "hint"),
  [
    (["--steps", "3"], "steps=3"),
    (["--learning-rate=1e-3"], "learning_rate=1e-3"),
    (["--scan_layers"], "scan_layers=true"),
    (["--no-such-flag"], None),
  ],
)
def test_a_key_as_a_flag_is_answered_with_the_key(given, hint, capsys):
  with pytest.raises(SystemExit) as ended:
    main(["train", "small-llama", *given])
  said = capsys.readouterr().err
  assert ended.value.code == 2
  assert (f"Keys are written without dashes: {hint}" in said) if hint else ("written" not in said)


@pytest.mark.parametrize("given", [["--hf_access_token", "hf_abc"], ["--hf-access-token=hf_abc"]])
def test_a_secret_that_is_written_as_a_flag_is_not_printed(given, capsys):
  with pytest.raises(SystemExit):
    main(["train", "small-llama", *given])
  said = capsys.readouterr().err
  assert "hf_abc" not in said
  assert "(redacted)" in said


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_hints_for_keys_of_other_frameworks_name_keys(key):
  """The first word is a key of ours, and none of theirs is one, for it would be taken."""
  hint = FOREIGN_KEYS[key]
  assert set(re.findall(r"[a-z]+_[a-z_0-9]+|^[a-z]+(?=$|=|,)", hint)) & MaxTextConfig.model_fields.keys()
  assert all(word in MaxTextConfig.model_fields for word in re.findall(r"[a-z]+_[a-z_0-9]+", hint))
  assert key not in RENAMED_KEYS
  assert key not in MaxTextConfig.model_fields


def test_an_unknown_key_of_another_framework_is_answered(capsys):
  assert main(["train", "small-llama", "lr=1e-3"]) == 2
  assert capsys.readouterr().err == "maxtext: 'lr' is not a key. Here it is learning_rate.\n"


def test_keys_are_searched_by_words(capsys):
  assert "remat_policy" in search_keys(["remat"])
  assert set(search_keys(["tensor", "parallelism"])) >= {"ici_tensor_parallelism", "dcn_tensor_parallelism"}
  assert main(["config", "search", "xyzzy"]) == 2
  assert main(["config", "search", "warmup", "steps"]) == 0
  assert capsys.readouterr().out.splitlines()[0].startswith("warmup_steps_fraction")


def test_explain_lists_values(capsys):
  main(["config", "explain", "opt_type"])
  assert "  values   adamw, adam_pax, sgd, muon" in capsys.readouterr().out
  main(["config", "explain", "remat_policy"])
  assert "  values   full, minimal," in capsys.readouterr().out


def test_a_model_larger_than_the_memory_is_answered_before_anything_is_made(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert main(["train", "llama3.1-70b", "dataset_type=synthetic"]) == 2
  said = capsys.readouterr().err
  assert re.fullmatch(
    r"maxtext: llama3.1-70b: parameters and optimizer state take [\d,.]+ GB of the memory of this host, which has "
    r"[\d,.]+ GB\. Take a smaller model, or more devices to shard it over \(ici_fsdp_parallelism\); `maxtext plan` "
    r"says how many it needs\.\n",
    said,
  )
  assert not list(tmp_path.iterdir()), "no folder is left"
