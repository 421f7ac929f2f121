"""`ConfigKeys`, the types of all keys for editors and type checkers, is generated from the sections of the
configuration, and type checkers understand it.

After a change of keys, write the file again:

  python -m tests.test_key_types
"""

import re
import subprocess
import sys
import textwrap
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

import maxtext
from maxtext import load_config
from maxtext.configs.types import CustomRule, DecoderBlockType, DerivedValues, MaxTextConfig
from maxtext.configs.types.section import Section
from maxtext.configs.unsupported import unsupported_keys
from maxtext.configs.values import default_of, plain_value

FILE = Path(maxtext.__file__).parent / "configs" / "keys.py"
HEAD = '''"""`ConfigKeys`: every key that a run's configuration takes, with its type, for editors and type checkers.

Generated from the sections in `configs/types` by `python -m tests.test_key_types`; edit those. Nothing imports this
module at run time except whoever asks for `maxtext.ConfigKeys`.
"""

# fmt: off
from typing import Any, Literal, TypedDict

from maxtext.configs.types import (
{imports}
)


class ConfigKeys(TypedDict, total=False):
  """Keys and values, as `load_config` and `LLM` take them by name."""
'''
OPEN = (DecoderBlockType, CustomRule)  # enumerations that also take names of files
LEFT_OUT = {"base_config", *DerivedValues.model_fields}  # only in files; never set by a user


def type_text(annotation: Any, classes: set[str]) -> str:
  """An annotation as a user's value may be typed: names instead of members of an enumeration, tuples instead of lists,
  dictionaries instead of sections."""
  origin, args = get_origin(annotation), get_args(annotation)
  if origin is Annotated:
    return type_text(args[0], classes)
  if origin in (Union, types.UnionType):
    parts = sorted(args, key=lambda part: part is type(None))
    return " | ".join(dict.fromkeys(type_text(part, classes) for part in parts))
  if origin is Literal:
    return f"Literal[{', '.join(map(quoted, args))}]"
  if annotation is list or origin is list:
    item = type_text(args[0], classes) if args else "Any"
    return f"list[{item}] | tuple[{item}, ...]"
  if annotation is dict or origin is dict:
    return "dict[str, Any]"
  if annotation is Any or annotation is None or annotation is type(None):
    return "Any" if annotation is Any else "None"
  if issubclass(annotation, Enum):
    classes.add(annotation.__name__)
    names = f"{annotation.__name__} | Literal[{', '.join(quoted(member.value) for member in annotation)}]"
    return f"{names} | str" if annotation in OPEN else names
  if issubclass(annotation, Section):
    classes.add(annotation.__name__)
    return f"{annotation.__name__} | dict[str, Any]"
  assert annotation in (int, float, str, bool), annotation
  return annotation.__name__


def quoted(value: Any) -> str:
  return f'"{value}"' if isinstance(value, str) else repr(value)


def wrapped(text: str, indent: str, end: str = "") -> str:
  return "\n".join(textwrap.wrap(text, 120 - len(end), initial_indent=indent, subsequent_indent=indent)) + end


def declaration(key: str, annotation: str) -> str:
  line = f"  {key}: {annotation}"
  if len(line) <= 120:
    return line
  before, names = line.split("Literal[", 1)
  names, after = names.split("]", 1)
  return f"{before}Literal[\n{wrapped(names, '    ')},\n  ]{after}"


def described(key: str) -> str:
  text = str(MaxTextConfig.model_fields[key].description)
  default = f"Default: {plain_value(default_of(key))!r}."
  if reason := unsupported_keys().get(key):
    text = (
      f"{text} It{reason.removeprefix('it')}."
      if reason.startswith("it has no effect")
      else f"{text} Not supported yet: {reason}."
    )
  whole = f"{text} {default}" if len(default) < 60 else text
  return wrapped(f'"""{whole}', "  ", '"""').replace("\\", "\\\\")


def generated() -> str:
  """The text of `configs/keys.py`."""
  classes = set[str]()
  entries = [
    f"\n{declaration(key, type_text(field.annotation, classes))}\n{described(key)}\n"
    for key, field in sorted(MaxTextConfig.model_fields.items())
    if key not in LEFT_OUT
  ]
  imports = "\n".join(f"  {name}," for name in sorted(classes, key=lambda name: (not name.isupper(), name.lower())))
  return HEAD.replace("{imports}", imports) + "".join(entries)


def test_the_file_is_what_is_generated():
  assert FILE.read_text() == generated(), "run: python -m tests.test_key_types"


def test_every_key_of_a_user_is_there_and_nothing_else():
  keys = maxtext.ConfigKeys.__annotations__.keys()
  assert keys == MaxTextConfig.model_fields.keys() - LEFT_OUT
  for key in LEFT_OUT - {"convert_checkpoint_if_possible"}:
    assert key not in keys


CHECKED = """
from typing import Any, reveal_type

import maxtext

config = maxtext.load_config("small-llama", steps=3, learning_rate=1, dtype="float32", ici_fsdp_parallelism=2)
maxtext.load_config(decoder_block="mine")
reveal_type(config)
reveal_type(config.steps)
maxtext.load_config(stepps=3)  # wrong
maxtext.load_config(steps="three")  # wrong
maxtext.load_config(dtype="float31")  # wrong
maxtext.load_config(dtype=config.dtype, trainable_parameters_mask=("a", "b"))
maxtext.load_config(trainable_parameters_mask=[1])  # wrong
maxtext.load_config(model_name="llama2-7c")  # wrong
maxtext.LLM("runs/first", max_target_length=1024, strict=True)
maxtext.LLM("runs/first", max_target_lenght=1024)  # wrong
keys: maxtext.ConfigKeys = {"steps": 3, "learning_rate": 1e-3}
reveal_type(keys["steps"])
maxtext.load_config(**keys)
sizes: dict[str, Any] = {"vocab_size": 128, "base_emb_dim": 32}
maxtext.load_config(**sizes, dataset_type="synthetic")
reveal_type(maxtext.evaluate("runs/first", eval_steps=2))
maxtext.evaluate("runs/first", eval_stepps=2)  # wrong
reveal_type(maxtext.plan(config))
reveal_type(maxtext.convert("folder", "out", to="huggingface"))
maxtext.convert("folder", "out", to="tensorflow")  # wrong
reveal_type(maxtext.train(config))
maxtext.train("small-llama")  # wrong
"""


@pytest.mark.slow
def test_mypy_knows_the_keys(tmp_path):
  """A right key passes; a wrong key, a wrong type and a wrong value are errors; `reveal_type` knows the results."""
  file = tmp_path / "user.py"
  file.write_text(CHECKED)
  project = Path(__file__).parents[1]
  files = [file, *(project / "examples").glob("*.py")]
  command = [sys.executable, "-m", "mypy", "--config-file", project / "pyproject.toml", *files]
  done = subprocess.run(command, capture_output=True, text=True, cwd=project, timeout=600, check=False)
  lines = CHECKED.splitlines()
  wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
  errors = {int(n) for n in re.findall(r"user\.py:(\d+): error", done.stdout)}
  assert errors == wrong, done.stdout + done.stderr
  assert not re.search(r"examples/.*: error", done.stdout), done.stdout
  assert re.findall(r'Revealed type is "(.*)"', done.stdout) == [
    "maxtext.configs.types.MaxTextConfig",
    "int",
    "int",
    "dict[str, float]",
    "maxtext.planner.plan.Plan",
    "pathlib.Path",
    "maxtext.training.state.TrainState",
  ]


def test_values_of_the_types_are_accepted():
  """What the types allow beside the plain value, the configuration takes."""
  config = load_config(dataset_type="synthetic", dtype="float32", trainable_parameters_mask=("a", "b"))
  assert config.trainable_parameters_mask == ["a", "b"]
  again = load_config(dataset_type=config.dataset_type, dtype=config.dtype)
  assert (again.dtype, again.dataset_type) == (config.dtype, config.dataset_type)


if __name__ == "__main__":
  FILE.write_text(generated())
