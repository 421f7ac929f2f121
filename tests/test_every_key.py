"""Every key of the specification: there with its type, bounds and default, and either read or refused."""

import contextlib
import enum
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext import ConfigError
from maxtext.checkpoint.inspect import is_of_the_training
from maxtext.cli.main import main
from maxtext.configs import types
from maxtext.configs.conditions import any_of, is_parallel_over, is_set, negate
from maxtext.configs.derived import derive
from maxtext.configs.explain import explain
from maxtext.configs.loader import parse_assignments, resolve
from maxtext.configs.readers import readers, readers_of, reads_of
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.unsupported import UNSUPPORTED, NoEffectOption, unsupported_options_of
from maxtext.configs.values import default_of, plain_value
from tests.support import TINY, tiny

DATA = Path(__file__).parent / "data"
SPECIFICATION = json.loads((DATA / "config_keys.json").read_text())
NAMES = {**vars(typing), **vars(types), "NoneType": type(None)}
CASES = [
  (s, k, v["type"], v["default"]) for s, body in SPECIFICATION["sections"].items() for k, v in body["fields"].items()
]
FACTORIES = {"dict": {}, "dict[str, Any]": {}, "list[int]": [], "list[str]": []}
# The specification's page was made on a machine whose home stands in this default.
OTHER_DEFAULT = {"jax_cache_dir": "~/jax_cache"}


def test_sections_and_enums_are_all_there():
  assert len(SPECIFICATION["sections"]) == 74
  assert len(CASES) == 723
  bases = SPECIFICATION["aggregate_bases"]
  assert [b.__name__ for b in MaxTextConfig.__mro__ if b.__name__ in bases] == bases
  for name, members in SPECIFICATION["enums"].items():
    assert {m.name: m.value for m in getattr(types, name)} == members


@pytest.mark.parametrize(("section", "key", "written", "default"), CASES, ids=[f"{s}.{k}" for s, k, _, _ in CASES])
def test_key_is_as_specified(section, key, written, default):
  info = getattr(types, section).model_fields[key]
  assert info.description, "every key says what it is"
  assert info.description.endswith(".")
  bounds = {name: float(value) for name, value in re.findall(r"\b(ge|gt|le)=([-\d.]+)", written)}
  if written.startswith("Annotated"):
    assert {n: float(getattr(m, n)) for m in info.metadata for n in ("ge", "gt", "le") if hasattr(m, n)} == bounds
    written = written.removeprefix("Annotated[").split(",")[0]
  elif bounds:
    assert "Ge(ge=0)" in str(info.annotation)
    written = None
  if written is not None:
    assert info.annotation == eval(written, NAMES), written
  expected = FACTORIES[written] if default == "<factory>" else eval(default, NAMES)
  actual = info.get_default(call_default_factory=True)
  assert actual == OTHER_DEFAULT.get(key, expected)
  assert type(actual) is type(expected) or isinstance(actual, enum.Enum)


def test_every_key_is_read_or_refused():
  refused = {key for option in UNSUPPORTED for key in option.keys}
  found = readers()
  assert not {key for key in MaxTextConfig.model_fields if not found[key]} - refused, "neither read nor refused"
  assert {key: readers_of(key) for key in found} == found, "a file that reads a key was not parsed for it"


READ = [
  ("def f(config: MaxTextConfig):\n  c = config\n  return c.steps", {"steps"}),
  ("def f(own: types.MaxTextConfig | None):\n  return own and own.steps", {"steps"}),
  ("def f(config: Other):\n  return config.steps", set()),
  ("def f(c: str):\n  return c.steps", set()),
  ("class A:\n  run: MaxTextConfig\n  def f(self):\n    return self.run.steps, self._config.moba", {"steps", "moba"}),
  ("table = {'steps': lambda c: c.moba}", {"moba"}),
  ("a, c = 1, config.model_copy(update={'steps': 3})\nc.moba", {"moba"}),
  ("def f(config):\n  return [getattr(config, key) for key in TABLE]\nTABLE = ('steps', 'moba')", {"steps", "moba"}),
  ("for key, least in {'steps': 1}.items():\n  getattr(config, key, least)", {"steps"}),
  ("def f(config, n: Literal['ici', 'dcn']):\n  getattr(config, f'{n}_fsdp_parallelism')",
   {"ici_fsdp_parallelism", "dcn_fsdp_parallelism"}),
  ("{getattr(config, key) for key in t.StackTrace.model_fields}",
   {"collect_stack_trace", "stack_trace_to_cloud", "stack_trace_interval_seconds"}),
  ("{getattr(config, key) for key in MaxTextConfig.model_fields}", set()),
  ("raise ConfigError(f'steps={config.steps}') from None", set()),
  ("# config.steps\n'config.steps'\nupdate(steps=config)", set()),
]  # fmt: skip


@pytest.mark.parametrize(("source", "keys"), READ)
def test_readers_are_found_in_the_syntax_tree(source, keys):
  assert reads_of(source) == keys


def test_conditions_declare_keys_that_are_there():
  declared = {key for option in UNSUPPORTED if option.unless for key in option.unless.keys}
  assert "remat_policy" in declared
  assert declared <= MaxTextConfig.model_fields.keys()
  either = any_of(is_set("moba"), negate(is_parallel_over("expert")))
  assert either.keys == ("moba", "ici_expert_parallelism", "dcn_expert_parallelism")
  assert either(tiny())
  assert not either(tiny().model_copy(update={"dcn_expert_parallelism": 2}))


@pytest.mark.parametrize("room", ["checkpoint", "data", "optim"])
def test_a_room_reads_keys_in_its_options_alone(room):
  """All else there takes what it needs."""
  files = (Path(types.__file__).parents[2] / room).rglob("*.py")
  assert [path.name for path in files if "MaxTextConfig" in path.read_text()] == ["options.py"]


def test_pages_count_unsupported_keys_as_the_command_does(capsys):
  """Those that no other key makes supported, by the table."""
  assert main(["config", "unsupported", "--count"]) == 0
  counted = capsys.readouterr().out.strip()
  root = Path(__file__).parents[1]
  pages = {path.name: path.read_text() for path in (root / "README.md", *(root / "docs").glob("*.md"))}
  found = {name: re.findall(r"\d+ of \d+ keys", text) for name, text in pages.items()}
  assert found["README.md"] == [counted]
  assert {count for counts in found.values() for count in counts} == {counted}
  assert main(["config", "unsupported"]) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert last == counted == f"{len(lines)} of {len(MaxTextConfig.model_fields)} keys"
  for line in lines:
    key, reason = line.split(maxsplit=1)
    assert any(reason == row.reason for row in unsupported_options_of(key) if row.unless is None)


def other_values(key):
  """Values of the key's type that are not its default."""
  annotation, default = MaxTextConfig.model_fields[key].annotation, default_of(key)
  options = typing.get_args(annotation)
  if isinstance(default, enum.Enum):
    return [member for member in type(default) if member is not default]
  if options and all(isinstance(option, str) for option in options):
    return [option for option in options if option != default]
  if key in ("debug", "rl"):
    return [{"debug": {"rl": True}, "rl": {"grpo_beta": 1.0}}[key]]
  if typing.get_origin(annotation) is list and (choices := typing.get_args(options[0])):
    return [[choice] for choice in choices if [choice] != default]
  examples = [True, False, 3, 7, 0.5, "experimental", ["a"], [1], {"a": 1}]
  adapter = pydantic.TypeAdapter(annotation, config={"strict": True})
  return [e for e in examples if e != default and accepts(adapter, e)]


def accepts(adapter, value):
  try:
    adapter.validate_python(value)
  except pydantic.ValidationError:
    return False
  return True


@pytest.mark.parametrize(
  ("option", "key"), [(option, key) for option in UNSUPPORTED if option.unless is None for key in option.keys]
)
def test_refused_keys_are_refused_with_a_reason(option, key):
  """Or named in a warning, where all that they ask for is another way to the same."""
  values = other_values(key)
  asking = [value for value in values if not option.allows(value)]
  assert values
  for value in asking:
    if isinstance(option, NoEffectOption):
      assert f"{key}={value} has no effect" in str(resolve(values=TINY | {key: value}).warning)
      continue
    with pytest.raises(ConfigError) as error:
      resolve(values=TINY | {key: value})
    assert str(error.value).startswith(f"{key}=")
    assert "\n" not in str(error.value)


SOURCES = ["small-llama", "default", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3.1-8b",
           "llama3.1-70b", "llama3.1-405b", "llama3.3-70b"]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_resolved_configurations_do_not_drift(source):
  """Golden files: a changed default shows as a difference. Remake them with `python -m tests.test_every_key`."""
  assert resolved_changes(source) == json.loads((DATA / "resolved" / f"{source}.json").read_text())


def resolved_changes(source):
  found = resolve(source, values={"dataset_type": "synthetic"})
  keys = [key for key in MaxTextConfig.model_fields if key not in types.DerivedValues.model_fields]
  changed = [key for key in keys if getattr(found.config, key) != default_of(key)]
  return {key: [plain_value(getattr(found.config, key)), found.origins[key]] for key in sorted(changed)}


def test_layers_and_their_names(tmp_path):
  (tmp_path / "mine.yml").write_text("steps: 5\nlearning_rate: 0.5\nlog_period: 3\ndataset_type: synthetic\n")
  environment = {"M_STEPS": "6", "M_LEARNING_RATE": "0.25", "PATH": "x", "M_": "y", "M_QQQ": "z"}
  found = resolve(tmp_path / "mine.yml", environment, {"steps": 7})
  assert (found.config.steps, found.config.learning_rate, found.config.log_period) == (7, 0.25, 3)
  assert found.origins["steps"] == "command line"
  assert found.origins["learning_rate"] == "environment"
  assert found.origins["log_period"] == str(tmp_path / "mine.yml")
  with pytest.raises(ConfigError, match=r"M_STEPPS in the environment names no key\. Did you mean 'steps'\?"):
    resolve(environment={"M_STEPPS": "3"})


def command(*words):
  """What it printed, and its processor time, which is its time on a machine that does nothing else."""
  before = os.times()
  done = subprocess.run(
    [Path(sys.executable).with_name("maxtext"), *words], capture_output=True, text=True, timeout=60, check=False
  )
  after = os.times()
  return done, after.children_user + after.children_system - before.children_user - before.children_system


def fastest(*words):
  return min((command(*words) for _ in range(3)), key=lambda found: found[1])


def bare_start():
  """Processor time of a process that imports what any configuration needs: the measure of a slow machine."""
  before = os.times()
  for _ in range(3):
    subprocess.run([sys.executable, "-c", "import pydantic, yaml"], check=True, timeout=60)
  after = os.times()
  return (after.children_user + after.children_system - before.children_user - before.children_system) / 3


def test_show_and_explain_answer_at_once():
  bound = max(1.0, 5 * bare_start())
  shown, seconds = fastest("config", "show", "llama2-7b", "dataset_type=synthetic", "--json")
  assert seconds < bound
  rows = json.loads(shown.stdout)
  assert len(rows) == len(MaxTextConfig.model_fields)
  assert rows["base_emb_dim"] == {"value": 4096, "from": "model llama2-7b"}
  changed, _ = command("config", "show", "small-llama", "--changed")
  assert re.search(r"^steps +60  \(small-llama\)$", changed.stdout, re.MULTILINE)
  explained, seconds = fastest("config", "explain", "remat_policy")
  assert seconds < bound
  assert explained.stdout.splitlines() == [
    "remat_policy: A policy's name; several, separated by commas, take turns over the layers.",
    "  type     str",
    "  default  'full'",
    "  values   full, minimal, save_dot_with_context_except_mlp, save_dot_except_mlpwi, save_dot_except_mlp, "
    "save_qkv_proj, qkv_proj_offloaded, custom, minimal_offloaded, save_out_proj",
    "  decides  whether these have an effect: context, decoder_layer_input, engram, key_proj, kv_wa_proj, "
    "mlpwi, mlpwi_0, mlpwi_1, mlpwo, moe_mlpwi_0, moe_mlpwi_1, moe_mlpwo, out_proj, qkv_proj, query_proj, "
    "query_wa_proj, value_proj",
    "  read by  configs/derived.py, models/execution/remat_policy.py",
  ]
  wrong, _ = command("config", "explain", "remat_polcy")
  assert (wrong.returncode, wrong.stderr) == (2, "maxtext: 'remat_polcy' is not a key. Did you mean 'remat_policy'?\n")


def test_every_key_can_be_explained():
  for key in MaxTextConfig.model_fields:
    assert explain(key).startswith(f"{key}: ")


def test_derived_values_need_only_a_device_count():
  values = derive(tiny(ici_tensor_parallelism=2, gradient_accumulation_steps=2), devices=24, slices=3)
  assert dict(zip(tiny().mesh_axes, values.ici_parallelism, strict=True))["fsdp"] == 4
  assert dict(zip(tiny().mesh_axes, values.dcn_parallelism, strict=True))["data"] == 3
  assert (values.global_batch_size_to_train_on, values.micro_batch_size_to_train_on) == (8 * 24 * 2, 8 * 24)
  custom = derive(tiny(remat_policy="custom", mlpwo="offload"), devices=1)
  assert (custom.tensors_on_device, custom.tensors_to_offload) == (["decoder_layer_input"], ["mlpwo"])


WORDS = st.one_of(
  st.integers(-3, 10), st.floats(), st.booleans(), st.none(), st.text(max_size=8),
  st.lists(st.integers(0, 3), max_size=3),
  st.sampled_from(["full", "custom", "auto", "1e-3", "-1", "true", "[a", "{", "llama2-7b", "float32", "~", "0x1f"]),
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(MaxTextConfig.model_fields)), WORDS, min_size=1, max_size=4))
def test_any_configuration_builds_or_is_refused_in_words(changes):
  with contextlib.suppress(ConfigError):
    words = parse_assignments(f"{key}={value}" for key, value in changes.items())
    derive(resolve(values=TINY | words).config, devices=8)


def test_a_run_answers_without_the_machine_that_trained_it():
  """Whatever a key of the mesh allows is left out with it."""
  alone = tiny()
  meshed = alone.model_copy(update={key: 2 for key in types.IciParallelism.model_fields if key.startswith("ici_")})
  allowed = [r for r in UNSUPPORTED if r.unless and r.unless(meshed) and not r.unless(alone)]
  assert {"use_ring_of_experts", "num_pipeline_repeats"} <= {key for r in allowed for key in r.keys}
  assert [key for r in allowed for key in r.keys if not is_of_the_training(key)] == []


if __name__ == "__main__":
  for name in SOURCES:
    (DATA / "resolved" / f"{name}.json").write_text(json.dumps(resolved_changes(name), indent=1) + "\n")
