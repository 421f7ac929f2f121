"""What is released: a wheel that works without the checkout, licences, a lock, and what later versions must read."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import maxtext
from maxtext import load_config
from maxtext.checkpoint.metadata import SCHEMA
from maxtext.configs.renamed_keys import RENAMED_KEYS
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.configs.values import default_of, plain_value

ROOT = Path(__file__).parents[1]
RELEASES = ROOT / "tests" / "data" / "releases"
QUICK_START = (
  ("--version",),
  ("data", "prepare", "small-llama", "--from", "input.txt", "--train-tokenizer"),
  ("train", "small-llama", "dataset_type=grain", "grain_train_files=data/input", "run_name=mine", "steps=2",
   "sample_prompts=[]"),
  ("decode", "runs/mine", "prompt=The", "--max-tokens", "4"),
)  # fmt: skip


def build(folder):
  """The wheel, made from the source distribution, which is made from the checkout."""
  uv = shutil.which("uv") or pytest.skip("uv builds the distributions")
  done = subprocess.run(
    [uv, "build", "-q", "--out-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  (wheel,), (_,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
  return wheel


def run_quick_start(python, folder, **environment):
  """The commands of the quick start in an empty folder, and where the package was found."""
  folder.mkdir()
  (folder / "input.txt").write_text("\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
  clean = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
  clean |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | environment

  def run(*words):
    done = subprocess.run([python, *words], env=clean, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout

  said = [run("-m", "maxtext", *words) for words in QUICK_START]
  assert said[0].strip() == f"maxtext {maxtext.__version__}"
  assert "step 2/2" in said[2]
  assert said[3].startswith("The")
  return Path(run("-c", "import maxtext; print(maxtext.__file__)").strip())


@pytest.mark.slow
def test_a_wheel_has_every_file_and_works_without_the_checkout(tmp_path):
  with zipfile.ZipFile(build(tmp_path / "dist")) as wheel:
    packed = set(wheel.namelist())
    wheel.extractall(tmp_path / "site")
  source = ROOT / "src"
  files = {path.relative_to(source).as_posix() for path in (source / "maxtext").rglob("*") if path.is_file()}
  assert {name for name in files if "__pycache__" not in name} - packed == set()
  found = run_quick_start(sys.executable, tmp_path / "empty", PYTHONPATH=str(tmp_path / "site"))
  assert found.is_relative_to(tmp_path / "site")


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_wheel_in_an_empty_environment(version, tmp_path):
  wheel = build(tmp_path / "dist")
  uv = shutil.which("uv")
  made = subprocess.run(
    [uv, "venv", "-q", "--python", version, str(tmp_path / "venv")], capture_output=True, check=False
  )
  if made.returncode:
    pytest.skip(f"there is no Python {version}: {made.stderr.decode()}")
  python = tmp_path / "venv" / "bin" / "python"
  subprocess.run([uv, "pip", "install", "-q", "--python", str(python), str(wheel)], check=True)
  found = run_quick_start(str(python), tmp_path / "empty")
  assert found.is_relative_to(tmp_path / "venv")


# Licences by their names in metadata, each of which lets others use the library in a product of any licence.
PERMISSIVE = re.compile(
  r"apache|bsd|\bmit\b|\bmpl|mozilla|\bisc|\bpsf|python software foundation|unlicense|hpnd|zlib|cc0|0bsd|blueoak|lgpl",
  re.IGNORECASE,
)
KNOWN = {"libtpu": "Google's own, for use on Google's TPUs", "tensorstore": "Apache-2.0, in its license file"}


def closure(*extras):
  """The installed distributions that the package needs, with those of its extras."""
  found, todo = {}, [("maxtext", frozenset(extras))]
  while todo:
    name, wanted = todo.pop()
    try:
      distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
      continue
    if found.get(name, frozenset()) >= wanted and name in found:
      continue
    found[name] = found.get(name, frozenset()) | wanted
    for line in distribution.requires or ():
      needed = Requirement(line)
      if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
        todo.append((canonicalize_name(needed.name), frozenset(needed.extras)))
  return found.keys() - {"maxtext"}


def licence(name):
  about = metadata.metadata(name)
  classifiers = [line for line in about.get_all("Classifier") or () if line.startswith("License ::")]
  return " ".join([about.get("License-Expression") or "", (about.get("License") or "")[:200], *classifiers]).strip()


def test_licences_of_what_comes_along_are_permissive():
  names = closure("tpu", "prepare", "hf", "gcs", "multimodal", "video", "tfds", "rl", "serve", "eval")
  assert len(names) > 60
  assert {name: licence(name) for name in names if not PERMISSIVE.search(licence(name)) and name not in KNOWN} == {}


def test_what_is_imported_is_declared():
  """Every library that a file imports is a dependency, or in an extra, by its own name."""
  declared = {canonicalize_name(Requirement(line).name) for line in metadata.requires("maxtext")}
  providers = metadata.packages_distributions()
  missing = {}
  for path in (ROOT / "src").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module]
      for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"maxtext"}:
        owners = {canonicalize_name(owner) for owner in providers.get(top, ())}
        if not owners & declared:
          missing.setdefault(top, []).append(path.relative_to(ROOT).as_posix())
  come_along = {  # with jax, orbax, pydantic, tokenizers and fastapi
    "etils", "jaxlib", "jax_plugins", "msgpack", "annotated_types", "pydantic_core", "google", "huggingface_hub", "h11",
    "starlette",
  }  # fmt: skip
  assert missing.keys() - come_along == set(), missing


def pinned(name):
  return dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", (ROOT / name).read_text(), re.MULTILINE))


def test_the_lock_is_of_the_constraints_and_names_no_index():
  text = (ROOT / "requirements.lock").read_text()
  locked = {canonicalize_name(name): version for name, version in pinned("requirements.lock").items()}
  constraints = {canonicalize_name(name): version for name, version in pinned("constraints.txt").items()}
  assert {name: version for name, version in locked.items() if constraints.get(name, version) != version} == {}
  assert re.findall(r"https?://|index|file:", re.sub(r"^[\w.-]+==.*", "", text, flags=re.MULTILINE)) == []
  assert len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) == len(
    re.findall(r"^[\w.-]+==.*\\\n +--hash=", text, re.MULTILINE)
  )


def test_what_is_pinned_installs_on_the_first_release_of_the_oldest_python():
  """Distributions of Linux keep an early one: Debian 12 has 3.11.2."""
  pythons = SpecifierSet(metadata.metadata("maxtext")["Requires-Python"])
  (oldest,) = (clause.version for clause in pythons if clause.operator == ">=")
  pins = {canonicalize_name(name) for name in pinned("constraints.txt")}
  refused = {
    name: requires
    for each in metadata.distributions()
    if (name := canonicalize_name(each.metadata["Name"])) in pins
    and (requires := each.metadata["Requires-Python"])
    and not SpecifierSet(requires).contains(f"{oldest}.0")
  }
  assert refused == {}


def test_the_citation_is_of_this_version():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert citation["version"] == maxtext.__version__
  assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
  assert f"## {maxtext.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("release", sorted(RELEASES.glob("*.json")), ids=lambda path: path.stem)
def test_later_versions_read_what_a_release_wrote(release):
  """Its keys, with the values they had by default, and checkpoints of its schema (`test_golden.py`)."""
  written = json.loads(release.read_text())
  assert (ROOT / "tests" / "data" / "checkpoints" / f"schema-{written['schema']}").is_dir()
  assert written["schema"] <= SCHEMA
  here = MaxTextConfig.model_fields.keys()
  assert {key for key in written["keys"] if key not in here and key not in RENAMED_KEYS} == set()
  config = load_config(**{key: value for key, value in written["keys"].items() if key in here})
  assert config.learning_rate == written["keys"]["learning_rate"]


def test_this_release_is_among_them():
  assert (RELEASES / f"{maxtext.__version__}.json").exists(), "python -m tests.test_release"


if __name__ == "__main__":
  keys = MaxTextConfig.model_fields.keys() - DerivedValues.model_fields.keys() - MaxTextConfig.__annotations__.keys()
  values = {key: value for key in sorted(keys) if (value := plain_value(default_of(key))) is not None}
  RELEASES.mkdir(exist_ok=True)
  text = json.dumps({"schema": SCHEMA, "keys": values}, indent=0, default=str)
  (RELEASES / f"{maxtext.__version__}.json").write_text(text + "\n")
