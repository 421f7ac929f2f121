"""A token is in no file and no output of a run, whichever way it came in."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from maxtext import ConfigError, load_config
from maxtext.checkpoint.inspect import chosen
from maxtext.checkpoint.metadata import CheckpointMetadata
from maxtext.cli.main import main
from maxtext.configs.loader import values_and_origins
from maxtext.configs.secrets import REDACTED
from tests.flags import flags
from tests.support import TINY, tiny

TOKENS = {"file": "hf_FromTheFile7401", "environment": "hf_FromTheEnvironment5523", "line": "hf_FromTheLine9916"}
SMALL = {key: value for key, value in TINY.items() if key not in ("enable_checkpointing", "base_output_directory")}


def _holding(text):
  return [name for name, token in TOKENS.items() if token in text]


@pytest.mark.slow
def test_no_file_and_no_output_of_a_run_holds_a_token(tmp_path, capsys):
  """Also not a checkpoint made of its checkpoint, and what is written of a run that had its token in clear."""
  (tmp_path / "mine").mkdir()
  file = tmp_path / "mine" / "it.yml"
  file.write_text(yaml.safe_dump(SMALL | {"hf_access_token": TOKENS["file"]}))
  words = ["steps=2", "run_name=it", f"hf_access_token={TOKENS['line']}", "gcs_metrics=true", "save_config_to_gcs=true"]
  env = os.environ | flags() | {"M_HF_ACCESS_TOKEN": TOKENS["environment"]}
  command = [sys.executable, "-m", "maxtext.cli", "train", str(file), *words]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
  assert done.returncode == 0, done.stderr
  assert _holding(done.stdout + done.stderr) == []
  warned = [line for line in done.stderr.splitlines() if "no effect" in line]
  assert len(warned) == 1
  assert warned[0].startswith(
    "maxtext: warning: gcs_metrics=True, save_config_to_gcs=True have no effect without a base"
  )
  run = tmp_path / "runs" / "it"
  facts = json.loads((run / "run.json").read_text())
  assert f"hf_access_token={REDACTED}" in facts["command"]
  assert json.loads((run / "config.json").read_text())["hf_access_token"] == {"value": REDACTED, "from": "command line"}
  record = next(run.rglob("record.json"))
  assert REDACTED in record.read_text()
  # As releases before wrote it: what is made of it is clean.
  written = CheckpointMetadata.read(record.parent.parent)
  clear = json.dumps(written.to_json()).replace(REDACTED, TOKENS["line"])
  body = json.loads(clear)["body"]
  record.write_text(json.dumps({"digest": _digest(body), "body": body}))
  assert main(["checkpoint", "export-params", str(run), str(tmp_path / "out")]) == 0
  record.write_text(json.dumps(written.to_json()))
  assert main(["checkpoint", "inspect", str(tmp_path / "out")]) == 0
  shown = capsys.readouterr()
  assert _holding(shown.out + shown.err) == []
  assert list((tmp_path / "out").rglob("record.json"))
  files = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
  assert len(files) > 10
  assert [path for path in files if _holding(path.read_bytes().decode("latin-1"))] == []


def _digest(body):
  from maxtext.checkpoint.metadata import _digest as digest

  return digest(body)


def test_it_is_printed_nowhere(capsys, tmp_path):
  token, line = TOKENS["line"], f"hf_access_token={TOKENS['line']}"
  (tmp_path / "broken.yml").write_text(f'hf_access_token: "{token}\n')
  (tmp_path / "twice.yml").write_text(f"hf_access_token: {token}\nhf_access_token: {token}\n")
  (tmp_path / "list.yml").write_text(f"hf_access_token: [{token}]\n")
  for words in (
    ["config", "show", "small-llama", line],
    ["config", "show", "small-llama", line, "--json", "--changed"],
    ["config", "show", "small-llama", f"hf_access_token=[{token}]"],
    ["config", "show", "small-llama", f"hf_access_token=a {token}"],
    ["config", "show", "small-llama", f"hf_access_token=a\n{token}"],
    ["config", "show", "small-llama", f"hf_access_token:{token}"],
    ["config", "show", f"hf_access_token:{token}"],
    ["config", "show", "small-llama", f"hf_acces_token={token}"],
    ["config", "show", "small-llama", line, "stepps=3"],
    ["config", "show", str(tmp_path / "broken.yml")],
    ["config", "show", str(tmp_path / "twice.yml")],
    ["config", "show", str(tmp_path / "list.yml")],
  ):
    code = main(words)
    found = capsys.readouterr()
    assert found.out + found.err, words
    assert code == (0 if words[-1] in (line, "--changed") else 2), (words, found.err)
    assert token not in found.out + found.err, words
  with pytest.raises(SystemExit):
    main(["config", "show", f"--{line}"])
  assert token not in capsys.readouterr().err


def test_a_configuration_keeps_it_and_what_is_written_does_not():
  config = tiny(hf_access_token=TOKENS["line"])
  assert config.hf_access_token == TOKENS["line"]
  assert config.model_copy(update={"steps": 3}).hf_access_token == TOKENS["line"]
  record = values_and_origins(config, {})
  for text in (repr(config), str(config), config.model_dump_json(), json.dumps(config.model_dump(mode="json")),
               json.dumps(record, default=str)):  # fmt: skip
    assert TOKENS["line"] not in text
  again = chosen({key: entry["value"] for key, entry in record.items()})
  assert "hf_access_token" not in again, "a run that is read again asks its own environment"
  assert load_config(**again) == tiny()
  with pytest.raises(ConfigError) as error:
    load_config(hf_access_token=[TOKENS["line"]])
  assert TOKENS["line"] not in str(error.value)
