"""Completion in real shells on a real terminal: what is on the command line after Tab."""

import os
import shutil
import subprocess

import pytest

import maxtext
from maxtext.cli.completion import completion_script
from maxtext.cli.main import _parser
from maxtext.configs.loader import model_names, recipe_names
from tests.terminal import Terminal

# `maxtext` prints its arguments, so that Enter shows what Tab has made of them.
START = {
  "bash": ["bash", "--norc", "--noprofile", "-i"],
  "zsh": ["zsh", "-f", "-i"],
  "fish": ["fish", "--no-config", "-i"],
}
SETUP = {
  "bash": "PS1='%'; maxtext() { printf '<%s>' \"$@\" END; }; bind 'set bell-style none'; . {script}\n",
  "zsh": "PS1='%%'; maxtext() { printf '<%s>' \"$@\" END; }; unsetopt beep; zstyle '*' insert-tab false; . {script}\n",
  "fish": "function maxtext; printf '<%s>' $argv END; end; source {script}\n",
}
CASES = {
  "tr\t": "train",
  "data pr\t": "data|prepare",
  "data prepare --train\t": "data|prepare|--train-tokenizer",
  "train steps\t5": "train|steps=5",
  "train tiny=1 small-l\tsteps=2": "train|tiny=1|small-llama|steps=2",
  "train opt_type=adamw\t-": "train|opt_type=adamw|-",
  "train small-llama opt_type=m\t-": "train|small-llama|opt_type=muon|-",
  "train enable_checkpointing=t\t-": "train|enable_checkpointing=true|-",
  "train grain_train_files=some_f\tx": "train|grain_train_files=some_folder/x",
  "decode some_f\tfirst": "decode|some_folder/first",
  "train own\t-": "train|own.yml|-",
  "data prepare --from te\t-": "data|prepare|--from|text.txt|-",
  "data prepare --to d small-l\t-": "data|prepare|--to|d|small-llama|-",
  "launch --processes 2 -- tr\t-": "launch|--processes|2|--|train|-",
  "config explain opt_ty\t-": "config|explain|opt_type|-",
  "runs cl\t-": "runs|clean|-",
  "report some_f\tfirst": "report|some_folder/first",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("completion")
  for shell in START:
    (folder / shell).write_text(completion_script(shell, _parser()))
  return folder


@pytest.mark.parametrize("shell", START)
def test_tab(shell, scripts, here):
  if not shutil.which(shell):
    pytest.skip(f"{shell} is not installed")
  (here / "some_folder" / "first").mkdir(parents=True)
  (here / "own.yml").touch()
  (here / "text.txt").touch()
  env = {"PATH": os.environ["PATH"], "HOME": str(here), "TERM": "dumb", "INPUTRC": "/dev/null"}
  terminal = Terminal(START[shell], 200, env=env)
  terminal.press(SETUP[shell].replace("{script}", str(scripts / shell)))
  terminal.press("maxtext ready\n")
  terminal.wait_for("<ready><END>")
  for typed, arguments in CASES.items():
    terminal.output = ""
    terminal.press(f"maxtext {typed}\n")
    found = terminal.wait_for(r"((<[^<>]*>)+)<END>", 20)
    assert found[1] == "".join(f"<{argument}>" for argument in arguments.split("|")), typed
  terminal.press("exit\n")
  assert terminal.wait() == 0


def test_lists(scripts):
  """Every key and name is in the script, and flags are those of their command."""

  def candidates(*words):
    command = [". " + str(scripts / "bash") + '; _maxtext_words maxtext "$@"', "bash", *words]
    return subprocess.run(["bash", "-c", *command], capture_output=True, text=True, check=True).stdout.split()

  assert {"train", "data", "completion"} <= set(candidates(""))
  assert candidates("data", "") == ["prepare", "show", "teacher", "bench"]
  assert candidates("completion", "") == ["bash", "zsh", "fish"]
  assert candidates("report", "-") == ["-h", "--help", "--out", "--serve", "--port"]
  assert candidates("train", "opt_type=") == [f"opt_type={name}" for name in ("adamw", "adam_pax", "sgd", "muon")]
  assert {*recipe_names(), *model_names(), "%files"} == set(candidates("train", ""))
  keys = {f"{key}=" for key in maxtext.ConfigKeys.__annotations__}
  assert set(candidates("train", "small-llama", "")) == keys
  assert set(candidates("train", "s")) == keys | {*recipe_names(), *model_names(), "%files"}
