"""Keys that have no effect beside others: one warning, an error where that was asked for, and truly no effect."""

import warnings

import pytest
import yaml

from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.configs.errors import ConfigWarning
from maxtext.configs.loader import resolve
from maxtext.configs.unsupported import UNSUPPORTED, NoEffectOption, keys_with_no_effect, unsupported_keys
from tests.support import TINY, program
from tests.test_every_key import other_values

ROWS = [row for row in UNSUPPORTED if isinstance(row, NoEffectOption)]
EXPERTS = {"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 80}


def test_one_warning_names_all_of_them_and_strict_makes_it_an_error():
  keys = {"dataset_type": "synthetic", "gcs_metrics": True, "enable_checkpointing": False, "checkpoint_period": 5,
          "async_checkpointing": False}  # fmt: skip
  with pytest.warns(ConfigWarning) as found:
    config = load_config("default", **keys)
  assert config.gcs_metrics, "the configuration says what the user said"
  assert [str(warning.message) for warning in found] == [
    "checkpoint_period=5, async_checkpointing=False have no effect without enable_checkpointing=true; gcs_metrics=True "
    "has no effect without a base_output_directory in a bucket (gs://...): other runs have these files anyway."
  ]
  assert found[0].filename == __file__, "it points at the caller"
  with pytest.raises(ConfigError, match="gcs_metrics=True has no effect"):
    load_config("default", **keys, strict=True)


def test_only_what_a_user_wrote_is_named(tmp_path):
  """A file, the environment and the command line; not a model, a recipe, or what a run recorded."""
  own = {"checkpoint_period": 5, "packing": False}
  (tmp_path / "mine.yml").write_text(yaml.safe_dump(own | {"base_config": "small-llama"}))
  quiet = {"enable_checkpointing": False, "dataset_type": "synthetic"}
  assert "checkpoint_period=5" in resolve(tmp_path / "mine.yml", values=quiet).warning
  assert "packing=False" in resolve("small-llama", {"M_PACKING": "false"}).warning
  assert resolve(values=quiet | own, recorded=own).warning is None
  # Of models and recipes many keys are without effect once a user changes others.
  assert resolve("mixtral-8x7b", values={"dataset_type": "synthetic", "num_experts": 1, "num_experts_per_tok": 1,
                                         "override_model_config": True}).warning is None  # fmt: skip
  assert resolve("stdlib-llama", values={"dataset_type": "synthetic"}).warning is None


def _idle(base):
  """As many keys as can be set together without effect beside some others, each away from its default."""
  found = {}
  for row in ROWS:
    for key in row.keys:
      for value in other_values(key):
        values = base | found | {key: value}
        try:
          config = resolve(values=values).config
        except ConfigError:  # together with the others it contradicts a rule
          continue
        if key not in base and keys_with_no_effect(config, {*found, key}).keys() == {*found, key}:
          found[key] = value
          break
  return found


@pytest.mark.parametrize("base", [{}, EXPERTS | {"sparse_matmul": False}, EXPERTS], ids=["none", "dense", "dropless"])
def test_the_step_is_the_same_with_all_of_them(base):
  base = TINY | base
  idle = _idle(base)
  assert len(idle) > 60
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    changed = load_config(**(base | idle))
  assert [w.category for w in found] == [ConfigWarning]
  assert all(f"{key}=" in str(found[0].message) for key in idle)
  assert program(changed).lower().as_text() == program(load_config(**base)).lower().as_text()


def test_every_row_says_beside_what():
  """Or what has its place, and is then counted among the unsupported keys."""
  for row in ROWS:
    assert row.reason.startswith("it has no effect "), row
    if row.unless is None:
      assert "take the place of" in row.reason, row
      assert set(row.keys) <= unsupported_keys().keys(), row


def test_a_command_says_it_in_one_line(capsys):
  words = ["config", "show", "small-llama", "gcs_metrics=true", "profiler_steps=3", "save_config_to_gcs=true"]
  assert main(words) == 0
  assert capsys.readouterr().err == (
    "maxtext: warning: gcs_metrics=True, save_config_to_gcs=True have no effect without a base_output_directory in a "
    "bucket (gs://...): other runs have these files anyway; profiler_steps=3 has no effect without profiler=xplane. "
    "(An error with --strict.)\n"
  )
  assert main([*words, "--strict"]) == 2
  refused = capsys.readouterr()
  assert refused.err.startswith("maxtext: gcs_metrics=True, save_config_to_gcs=True have no effect")
  assert (refused.out, len(refused.err.splitlines())) == ("", 1)
