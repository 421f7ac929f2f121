"""Every file in `examples/` runs, and says what it should; notebooks run in a real kernel, without stored outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flags import flags

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
  "train.py": r"step 30/30  loss .*\n(.*\n)*evaluation loss [01]\.\d+ over 2,048 tokens",
  "custom_objective.py": r"step 20/20  loss ",
  "custom_family.py": r"step 12/12  loss .*\n(.*\n)*weights with Hugging Face's names in .*runs/swan/hf",
  "callback.py": r"ended after step \d+ of 500, loss ",
  "custom_optimizer.py": r"step 40/40  loss ",
  "train_on_text.py": r"step 60/60  loss ",
  "generate.py": r"'def .*' (length|stop)\n'import .*' (length|stop)\nmean log-probability of the second: -\d",
  "serve.py": r"whole:  ('.+')\nstream: \1",
}
WITH_TEXT = ["train_on_text.py", "generate.py", "serve.py"]


def run(name, folder):
  environment = os.environ | flags() | {"HOME": str(folder)}  # which has the folder of compiled programs
  command = [sys.executable, str(EXAMPLES / name)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert re.search(SAYS[name], done.stdout), done.stdout
  return done.stdout


def losses(said):
  return [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)  grad", said, re.MULTILINE)]


def test_every_example_is_run():
  assert SAYS.keys() == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", [name for name in SAYS if name not in WITH_TEXT])
def test_example(name, tmp_path):
  said = run(name, tmp_path)
  found = losses(said)
  assert found[-1] < found[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_examples_that_train_on_text_generate_and_serve(tmp_path):
  found = losses(run("train_on_text.py", tmp_path))
  assert found[-1] < found[0] - 1
  run("generate.py", tmp_path)
  run("serve.py", tmp_path)


NOTEBOOKS = {
  "train_and_sample.ipynb": (
    r"'stepps' is not a key. Did you mean 'steps'\?",
    r"^step 60/60  loss [\d.]+  grad norm",
    r"^'def .*'\n'class .*'\n'import .*'$",
  ),
  "objective_and_metrics.ipynb": (
    r"^step 30/30  loss [\d.]+  grad norm",
    r"^step 30  plain: loss [\d.]+, accuracy [\d.]+   smooth: loss [\d.]+, accuracy [\d.]+$",
    r"'accuracy': ",
  ),
}


def test_every_notebook_is_run_and_stores_no_outputs():
  assert NOTEBOOKS.keys() == {path.name for path in EXAMPLES.glob("*.ipynb")}
  for name in NOTEBOOKS:
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.nightly] * (name == "train_and_sample.ipynb")) for name in NOTEBOOKS],
)
def test_notebook(name, tmp_path):
  """Two runs in one process, and plain lines: a bar would leave escape sequences in the cell."""
  nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
  notebook = nbformat.read(EXAMPLES / name, as_version=4)
  client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
  client.execute(env=os.environ | flags() | {"HOME": str(tmp_path)})
  outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
  text = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
  for pattern in NOTEBOOKS[name]:
    assert re.search(pattern, text, re.MULTILINE), text
  assert "\x1b" not in text
