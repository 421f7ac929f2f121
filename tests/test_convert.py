"""Weights in and out: folders of Hugging Face, both ways, whole, interrupted, quantized and straight into a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from math import prod

import ml_dtypes
import numpy as np
import pytest
from etils import epath

from maxtext.checkpoint import files, stream
from maxtext.checkpoint.inspect import served_keys
from maxtext.checkpoint.options import checkpoint_options, restore_options
from maxtext.checkpoint.restore import load_parameters
from maxtext.checkpoint.stream import StreamReader
from maxtext.checkpoint.writer import Writer
from maxtext.cli.config import resolve_overrides
from maxtext.cli.main import main
from maxtext.configs import ConfigError
from maxtext.configs.loader import load_config, model_names, values_and_origins
from maxtext.inference import inference_model
from maxtext.models.build import FAMILIES, abstract_model, model_spec, weight_table
from maxtext.training.resume import RunCheckpoints
from maxtext.weights.config_json import compare_specs, config_json_entries, hugging_face_class, keys_of_folder
from maxtext.weights.from_hugging_face import load_from_hugging_face
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.tensor_files import make_header, read_header, write_file
from maxtext.weights.tensor_layout import tensor_layouts
from tests.chat_templates import make_tokenizer
from tests.support import program
from tests.test_parity import CASES, RUN, configure, every_case, every_case_but_nightly, references, torch

__all__ = ["references"]  # a fixture

pytestmark = pytest.mark.parity
# A folder of each layout; the tables of all families are compared in test_parity.
LAYOUTS = ("llama", "gpt_oss", "gemma4_moe", "deepseek3", "qwen3_next", "qwen3_omni_thinker", "llama4_scout")


def words(case, **changes):
  keys = CASES[case]["keys"] | {"max_target_length": RUN["max_target_length"]} | changes
  return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


@pytest.fixture(scope="session")
def folder_of(references, tmp_path_factory):
  """A case's weights as transformers saves them; where it has no such model, as it would."""

  def folder(case):
    model = references(case).model
    if hasattr(model, "folder"):
      return model.folder / "weights"
    path = tmp_path_factory.mktemp(case) / "weights"
    write_folder(path, model.tensors)
    return path

  return folder


@pytest.fixture(scope="session")
def tiny(folder_of):
  """The folder that most tests here convert."""
  return folder_of("llama")


def contents(folder):
  return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def parameters(folder):
  """Every array of a checkpoint of parameters, whole."""
  reader = StreamReader(epath.Path(folder))
  names = {name.removeprefix("params/"): array for name, array in reader.metadata.arrays.items()}
  found = {name: reader.read(name, (), len(array.shape)) for name, array in names.items()}
  reader.check(reader.take_sums())
  return found


def write_folder(folder, tensors, config=None):
  """A folder as others make them."""
  folder.mkdir(exist_ok=True)
  about = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
  write_file(folder / "model.safetensors", [make_header(about), *(tensor.tobytes() for tensor in tensors.values())])
  (folder / "config.json").write_text(json.dumps(config or {}))


@every_case_but_nightly(
  "llama", "gpt_oss", "gemma4_moe", "deepseek3", "qwen3_next", "qwen3_omni_thinker", "llama4_scout"
)
def test_there_and_back(case, folder_of, references, tmp_path):
  """transformers loads what goes out and says the same; what comes in again is the same to the bit."""
  reference = references(case)
  came, went, again = tmp_path / "came", tmp_path / "went", tmp_path / "again"
  assert main(["convert", "from-hf", str(folder_of(case)), str(came), *words(case)]) == 0
  assert main(["convert", "to-hf", str(came), str(went), "--shard-gigabytes", "1e-4"]) == 0
  assert len(list(went.glob("*.safetensors"))) > 1
  tensors = HuggingFaceFolder(went).tensors
  assert tensors.keys() == reference.tensors.keys()
  for name, tensor in reference.tensors.items():
    np.testing.assert_array_equal(tensors[name].read(), tensor, err_msg=name)
  if "plain" not in CASES[case]["reference"]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(went, attn_implementation="eager", dtype="float32").eval()
    np.testing.assert_allclose(model(reference.inputs).logits.detach(), reference.logits, atol=1e-6, rtol=0)
  assert main(["convert", "from-hf", str(went), str(again)]) == 0, "no key is needed to read what we wrote"
  first, second = parameters(came), parameters(again)
  assert first.keys() == second.keys()
  for name, value in first.items():
    assert value.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
  ("case", "changes", "said"),
  [
    ("mixtral", {"base_moe_mlp_dim": 24}, {"intermediate_size": 24}),
    ("gpt_oss", {"base_moe_mlp_dim": 24}, {"intermediate_size": 24}),
    ("qwen3_moe", {"base_moe_mlp_dim": -1}, {"moe_intermediate_size": 80}),
    ("deepseek3", {}, {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),  # vLLM asks, transformers does not
    ("deepseek2_236b", {}, {"topk_method": "group_limited_greedy"}),
  ],
)
def test_a_description_says_what_the_model_has(case, changes, said):
  config = configure(case, **changes)
  found = hugging_face_class(config).config(config)
  assert {name: found[name] for name in said} == said


@every_case
def test_a_folder_needs_no_keys(case, folder_of, references):
  """What transformers saved gives the keys that our tests write by hand: the same decoder, layer by layer."""
  if not hasattr(references(case).model, "folder"):
    pytest.skip("nobody else has such a model, and its description is ours")
  found = resolve_overrides([str(folder_of(case)), "dataset_type=synthetic"])
  assert found.config.source_checkpoint_layout == "safetensors"
  assert found.config.model_name == "default"
  assert found.origins["base_emb_dim"] == str(folder_of(case) / "config.json")
  assert not compare_specs(model_spec(configure(case)), model_spec(found.config))


def test_what_the_user_says_wins_over_a_folder(tiny):
  """And a contradiction is found when weights are read."""
  named = resolve_overrides([f"load_parameters_path={tiny}", "dataset_type=synthetic", "vocab_size=100"]).config
  assert (named.vocab_size, named.base_emb_dim) == (100, 48)
  other = resolve_overrides([f"load_parameters_path={tiny}", "dataset_type=synthetic", "model_name=llama2-7b"]).config
  assert other.base_emb_dim == 4096


def test_a_folder_brings_its_tokenizer(tiny, tmp_path):
  folder = shutil.copytree(tiny, tmp_path / "folder")
  make_tokenizer(tmp_path / "vocabulary")
  shutil.copy(tmp_path / "vocabulary" / "tokenizer.json", folder)
  found = resolve_overrides([str(folder), "dataset_type=synthetic"]).config
  assert (found.tokenizer_path, found.tokenizer_type.value) == (str(folder), "huggingface")
  named = resolve_overrides([str(folder), "dataset_type=synthetic", "tokenizer_path=mine"]).config
  assert named.tokenizer_path == "mine"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "bloom"}, "config.json has model_type=bloom, and this version reads deepseek_v2"),
    ({"hidden_act": "mish"}, "config.json has the activation mish"),
    ({"hidden_size": None}, "cannot be read: TypeError"),
    ({"num_attention_heads": 0, "head_dim": None}, "cannot be read: ZeroDivisionError"),
    ({"vocab_size": None}, "config.json of a llama has no vocab_size"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "config.json has rope_type=dynamic"),
    (
      {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2, "low_freq_factor": 1.0,
                           "high_freq_factor": 8.0, "original_max_position_embeddings": 32}},
      "a model that no keys can express: rope_high_freq_factor=8.0 there, 4.0 here",
    ),
    ({"vocab_size": "many"}, "vocab_size=many"),
  ],
)  # fmt: skip
def test_a_description_that_is_no_model_here_is_refused(change, message, tiny, tmp_path, capsys):
  content = json.loads((tiny / "config.json").read_text()) | change
  if content.get("head_dim") and content["hidden_size"] is None:
    content["head_dim"] = None
  (tmp_path / "config.json").write_text(json.dumps(content))
  assert main(["convert", "from-hf", str(tmp_path), str(tmp_path / "out")]) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize(
  ("case", "changes", "message"),
  [
    ("llama", {"mlp_activations": ["silu"]}, "layer.feed_forward.gated is False here and True there"),
    ("llama", {"use_qk_norm": True}, "layer.mixer.qk_norm is QueryKeyNorm here and None there"),
    ("llama", {"logits_via_embedding": True}, "logit_scale is"),
    ("llama", {"attention_type": "local_sliding", "sliding_window_size": 8}, "layer.mixer.window is 8 here and None"),
    ("llama", {"moba": True, "moba_chunk_size": 8, "moba_topk": 2, "attention": "dot_product"}, "mixer.blocks is"),
    ("mistral", {"attention_bias": True}, "layer.mixer.bias is True here and False there"),
    ("mistral", {"final_logits_soft_cap": 30.0}, "logit_cap is 30.0 here and None there"),
    ("qwen2", {"attention_bias": False}, "layer.mixer.bias is False here and True there"),
    ("qwen3", {"use_qk_norm": False}, "layer.mixer.qk_norm is None here and QueryKeyNorm there"),
    ("gemma2", {"use_post_ffw_norm": False}, "layer.feed_forward_post_norm is None here and RMSNormSpec there"),
    ("gpt2_as_gpt3", {"head_dim": 8}, "layer.mixer.head_dim is 8 here and 12 there"),
    ("deepseek3", {"rope_type": "default", "original_max_position_embeddings": 4096}, "config.json has no YaRN"),
    ("deepseek2_lite", {"rope_interleave": False}, "layer.mixer.rope.interleaved is False here and True there"),
    ("mixtral", {"shared_experts": 1}, "layer.feed_forward.shared is MLP here and None there"),
  ],
)  # fmt: skip
def test_what_the_other_class_cannot_be_is_not_written(case, changes, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    config_json_entries(configure(case, **changes))


def test_a_model_that_cannot_be_written_leaves_nothing_behind(tmp_path, capsys):
  config = configure("llama", mlp_activations=["silu"])
  with closing(
    Writer(checkpoint_options(config), epath.Path(tmp_path / "r" / "checkpoints"), values_and_origins(config, {}))
  ) as writer:
    writer.save(1, program(config).init(), {})
  assert main(["convert", "to-hf", str(tmp_path / "r"), str(tmp_path / "hf")]) == 2
  assert "LlamaForCausalLM cannot express decoder_block=llama2" in capsys.readouterr().err
  assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


def test_a_scaled_model_is_written_with_its_sizes():
  config = configure("llama", global_parameter_scale=8)
  assert {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}.items() <= config_json_entries(
    config
  ).items()


def test_a_run_starts_from_what_was_converted(references, tiny, tmp_path):
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "params"), *words("llama")]) == 0
  config = configure("llama", ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
  model = program(config, 4).model
  found = load_parameters(restore_options(config), "load_parameters_path", str(tmp_path / "params"), model.params)
  straight = load_from_hugging_face(config, model, str(tiny))
  assert found.keys() == straight.keys()
  for name, value in found.items():
    assert straight[name].sharding == value.sharding == model.struct(name).sharding
    np.testing.assert_array_equal(straight[name], value, err_msg=name)


def test_a_run_starts_from_a_folder(tiny, tmp_path):
  """The key decides how load_parameters_path is read, by what trains and by what writes."""
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "params"), *words("llama")]) == 0
  starts = []
  for path, kind in ((tiny, "safetensors"), (tmp_path / "params", "orbax")):
    config = configure("llama", load_parameters_path=str(path), source_checkpoint_layout=kind)
    starts.append(RunCheckpoints(config, "r", {}).restore_or_init(program(config))[0])
    served = inference_model.load_params(config, program(config).model)
    assert served.keys() == starts[-1].params.keys()
    for name, value in served.items():
      np.testing.assert_array_equal(value, starts[-1].params[name], err_msg=name)
  tensors = HuggingFaceFolder(tiny).tensors
  np.testing.assert_array_equal(starts[0].params["embedding/table"], tensors["model.embed_tokens.weight"].read())
  for name, value in starts[0].params.items():
    np.testing.assert_array_equal(value, starts[1].params[name], err_msg=name)


def test_a_run_that_began_in_a_folder_answers_from_its_own(tmp_path):
  config = configure("llama", load_parameters_path="elsewhere", source_checkpoint_layout="safetensors")
  started, run = program(config), tmp_path / "r"
  state = started.init()
  with closing(
    Writer(checkpoint_options(config), epath.Path(run / "checkpoints"), values_and_origins(config, {}))
  ) as writer:
    writer.save(1, state, {})
  own = served_keys(str(run), {})
  named = served_keys(str(run), {"custom_mesh_and_rule": "fsdp"})
  assert own.keys() - named.keys() == {"logical_axis_rules"}, "which would hide the rules that are named"
  found = inference_model.load_params(load_config(**own), started.model)
  for name, array in state.params.items():
    np.testing.assert_array_equal(found[name], array)


@pytest.mark.slow
def test_a_checkpoint_of_a_run_goes_out(tmp_path, monkeypatch):
  """In chunks of a layer or less; also one whose layers are not stacked first, and in fewer bits."""
  for module in (files, stream):
    monkeypatch.setattr(module, "CHUNK", 2000)  # bytes, for so small a model
  config = configure("llama", checkpoint_storage_use_ocdbt=False)
  state, run = program(config).init(), tmp_path / "r"
  with closing(
    Writer(checkpoint_options(config), epath.Path(run / "checkpoints"), values_and_origins(config, {}))
  ) as writer:
    writer.save(1, state, {})
  for name, array in state.params.items():
    about = run / "checkpoints" / "1" / "state" / f"params.{name.replace('/', '.')}" / "zarr.json"
    chunk = json.loads(about.read_text())["chunk_grid"]["configuration"]["chunk_shape"]
    if array.nbytes <= 2000:
      assert chunk == list(array.shape)
    else:
      assert prod(chunk) * 4 <= 2000
      assert chunk[0] == 1 or name.startswith(("embedding", "head"))
  assert main(["convert", "to-hf", str(run), str(tmp_path / "hf")]) == 0
  expected = contents(tmp_path / "hf")
  for key in ("force_unroll=true", "param_scan_axis=1"):
    assert main(["checkpoint", "export-params", str(run), str(tmp_path / key), key]) == 0
    assert main(["convert", "to-hf", str(tmp_path / key), str(tmp_path / f"hf {key}")]) == 0
    assert contents(tmp_path / f"hf {key}") == expected
  assert main(["convert", "to-hf", str(run), str(tmp_path / "low"), "weight_dtype=bfloat16"]) == 0
  table = np.asarray(state.params["embedding/table"])
  np.testing.assert_array_equal(HuggingFaceFolder(tmp_path / "hf").tensors["model.embed_tokens.weight"].read(), table)
  low = HuggingFaceFolder(tmp_path / "low").tensors["model.embed_tokens.weight"].read()
  np.testing.assert_array_equal(low.view(np.uint16), table.astype(ml_dtypes.bfloat16).view(np.uint16))
  assert HuggingFaceFolder(tmp_path / "low").config["dtype"] == "bfloat16"


_STOPPED = """
import os, signal, sys
from pathlib import Path
from etils import epath
from maxtext.checkpoint import stream
from maxtext.configs.loader import parse_assignments, load_config
from maxtext.models.build import abstract_model
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.from_hugging_face import convert_from_hugging_face
from maxtext.weights.to_hugging_face import convert_to_hugging_face

def progress(count, all_count, size, all_size):
  if 2 * size > all_size:
    os.kill(os.getpid(), signal.SIGKILL)

stream._IN_FLIGHT = 1000  # bytes, for so small a model
way, source, target, *words = sys.argv[1:]
config = load_config(**parse_assignments(words), dataset_type="synthetic")
if way == "from-hf":
  convert_from_hugging_face(config, abstract_model(config), HuggingFaceFolder(source), Path(target), {}, progress)
else:
  convert_to_hugging_face(config, abstract_model(config), epath.Path(source), Path(target), progress, 20_000)
"""


@pytest.mark.parametrize("way", ["from-hf", pytest.param("to-hf", marks=pytest.mark.slow)])
def test_a_killed_conversion_goes_on(way, tiny, tmp_path):
  """Nothing has the target's name before all of it is there; what was finished is kept; the result is the same."""
  source, extra, out, unfinished = tiny, words("llama"), tmp_path / "out", tmp_path / "out.unfinished"
  if way == "to-hf":
    source, extra = tmp_path / "params", ["--shard-gigabytes", "2e-5"]
    assert main(["convert", "from-hf", str(tiny), str(source), *words("llama")]) == 0
  assert main(["convert", way, str(source), str(tmp_path / "whole"), *extra]) == 0
  killed = [sys.executable, "-c", _STOPPED, way, str(source), str(out), *words("llama")]
  assert subprocess.run(killed, check=False).returncode == -signal.SIGKILL
  assert not out.exists()
  noted = len((unfinished / "journal").read_text().splitlines())
  assert noted > 2
  kept = {file.name: file.stat().st_mtime_ns for file in unfinished.glob("model-*.safetensors")}
  with open(unfinished / "journal", "a") as journal:
    journal.write('{"name": "half a li')
  assert main(["convert", way, str(source), str(out), *extra]) == 0
  assert not unfinished.exists()
  if way == "to-hf":
    assert len(kept) == noted - 1
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(out) == contents(tmp_path / "whole")
  else:
    whole, got = parameters(tmp_path / "whole"), parameters(out)
    assert {name: array.tobytes() for name, array in got.items()} == {n: a.tobytes() for n, a in whole.items()}


def test_an_unfinished_folder_of_something_else_is_refused(tiny, tmp_path, capsys):
  source, out = tmp_path / "hf", tmp_path / "out"
  shutil.copytree(tiny, source)
  killed = [sys.executable, "-c", _STOPPED, "from-hf", str(source), str(out), *words("llama")]
  subprocess.run(killed, check=False)
  os.utime(source / "model.safetensors")
  assert main(["convert", "from-hf", str(source), str(out), *words("llama")]) == 2
  assert "out.unfinished was begun from something else" in capsys.readouterr().err


def test_two_processes_do_not_write_one_folder(tiny, tmp_path, capsys):
  out = tmp_path / "out"
  hold = (
    "import sys; from pathlib import Path; from maxtext.checkpoint.journal import Journal\n"
    "journal = Journal(Path(sys.argv[1]), 'another'); print('open', flush=True); sys.stdin.read()"
  )
  with subprocess.Popen(
    [sys.executable, "-c", hold, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "open\n"
    before = (tmp_path / "out.unfinished" / "journal").read_text()
    assert main(["convert", "from-hf", str(tiny), str(out), *words("llama")]) == 2
    assert "out.unfinished is being written by another process" in capsys.readouterr().err
    assert (tmp_path / "out.unfinished" / "journal").read_text() == before
    process.stdin.close()


def test_a_damaged_checkpoint_does_not_go_out(tiny, tmp_path, capsys):
  params = tmp_path / "params"
  keys = words("llama", checkpoint_storage_use_ocdbt=False)
  assert main(["convert", "from-hf", str(tiny), str(params), *keys]) == 0
  file = params / "state" / "params.embedding.table" / "c" / "0" / "0"
  content = bytearray(file.read_bytes())
  content[100] ^= 1
  file.write_bytes(content)
  assert main(["convert", "to-hf", str(params), str(tmp_path / "hf")]) == 1
  assert "params/embedding/table is not what was saved (checksum)" in capsys.readouterr().err
  assert not (tmp_path / "hf").exists()


def changed(tiny, folder, change):
  tensors = {name: tensor.read() for name, tensor in HuggingFaceFolder(tiny).tensors.items()}
  change(tensors)
  write_folder(folder, tensors, HuggingFaceFolder(tiny).config)
  return folder


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: t.update(extra=np.zeros(1)), "no parameter takes: extra."),
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight."),
    (lambda t: t.update({"model.norm.weight": np.zeros(7)}), "model.norm.weight is [7] in the folder, and this model"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change, message, tiny, tmp_path, capsys):
  folder = changed(tiny, tmp_path / "hf", change)
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out"), *words("llama")]) == 2
  assert message in capsys.readouterr().err


def test_what_is_known_to_be_no_weight_is_left_out(tiny, tmp_path):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  folder = changed(tiny, tmp_path / "hf", lambda t: t.update({name: np.zeros(4)}))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out"), *words("llama")]) == 0


def test_another_model_is_refused_by_its_description(tiny, tmp_path, capsys):
  keys = words("llama", normalization_layer_epsilon=1e-6)
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "out"), *keys]) == 2
  assert "rms_norm_eps=1e-05 there, 1e-06 here" in capsys.readouterr().err


def test_a_pickle_is_never_loaded(tmp_path, capsys):
  (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
  assert main(["convert", "from-hf", str(tmp_path), str(tmp_path / "out"), *words("llama")]) == 2
  assert "pytorch_model.bin is a pickle, which can run any program and is never loaded" in capsys.readouterr().err


def test_files_that_are_cut_short_or_missing_are_named(tiny, tmp_path, capsys):
  folder = tmp_path / "hf"
  shutil.copytree(tiny, folder)
  with open(folder / "model.safetensors", "r+b") as file:
    file.truncate(5000)
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out"), *words("llama")]) == 1
  assert "model.safetensors is truncated" in capsys.readouterr().err
  index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out"), *words("llama")]) == 2
  assert "has no model-00001-of-00002.safetensors" in capsys.readouterr().err


def tensor(begin, end, shape=(4,), dtype="F32"):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (json.dumps({"a": tensor(0, 16), "b": tensor(8, 24)}), "b and a share bytes"),
    (json.dumps({"a": tensor(0, 16), "b": tensor(0, 16)}), "b and a share bytes"),
    (json.dumps({"a": tensor(0, 16, (-2, -2))}), "shape [-2, -2] at bytes 0 to 16 is not a tensor"),
    (json.dumps({"a": tensor(-16, 0)}), "is not a tensor"),
    (json.dumps({"a": tensor(16, 0, (-4,))}), "is not a tensor"),
    (json.dumps({"a": tensor(0, 4, (1,) * 100)}), "is not a tensor"),
    (json.dumps({"a": tensor(0, 16, (4.0,))}), "is not a tensor"),
    (json.dumps({"a": tensor(0, 16, (True, 4))}), "is not a tensor"),
    (json.dumps({"a": tensor(0, 2**70, (2**68,))}), "is truncated"),
    (json.dumps({"a": tensor(0, 16, dtype=["F32"])}), "unhashable"),
    (json.dumps({"a": tensor(0, 16, dtype="x" * 100_000)}), "dtype xxx"),
    ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "recursion"),
    ('{"a": 1' + "0" * 5000 + "}", "cannot be read"),
    (f'{{"a": {json.dumps(tensor(0, 16))}, "a": {json.dumps(tensor(16, 32))}}}', "a name occurs twice"),
    ("[]", "cannot be read"),
    ('{"a": null}', "cannot be read"),
    ("\x00", "cannot be read"),
  ],
)  # fmt: skip
def test_a_hostile_header_is_a_clean_error(content, message, tiny, tmp_path, capsys):
  shutil.copyfile(tiny / "config.json", tmp_path / "config.json")
  text = content.encode()
  (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
  assert main(["convert", "from-hf", str(tmp_path), str(tmp_path / "out")]) == 1
  said = capsys.readouterr().err
  assert message in said
  assert len(said) < 2000


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 101])
def test_an_absurd_length_of_a_header_is_a_clean_error(length, tiny, tmp_path, capsys):
  shutil.copyfile(tiny / "config.json", tmp_path / "config.json")
  (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" * 50)
  assert main(["convert", "from-hf", str(tmp_path), str(tmp_path / "out")]) == 1
  assert "is not a safetensors file, or is truncated" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["absolute", "above", "link", "link of a folder", "circle"])
def test_what_leads_out_of_a_folder_is_refused(way, tiny, tmp_path, capsys):
  folder, outside = tmp_path / "hf", tmp_path / "outside"
  shutil.copytree(tiny, folder)
  outside.mkdir()
  shutil.move(folder / "model.safetensors", outside / "secret.safetensors")
  name = {"absolute": str(outside / "secret.safetensors"), "above": "../outside/secret.safetensors"}.get(way, "m")
  if way == "link":
    (folder / name).symlink_to(outside / "secret.safetensors")
  elif way == "link of a folder":
    name = "part/secret.safetensors"
    (folder / "part").symlink_to(outside)
  elif way == "circle":
    (folder / name).symlink_to(folder / name)
  weights = dict.fromkeys(read_header(outside / "secret.safetensors"), name)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out")]) == 2
  assert "leads out of the folder" in (said := capsys.readouterr().err) or "leads to no file" in said
  assert not (tmp_path / "out").exists()


def test_what_stands_beside_the_weights_leads_nowhere_else(tiny, tmp_path, capsys):
  """What is copied goes out again, to wherever the model is published."""
  folder = tmp_path / "hf"
  shutil.copytree(tiny, folder)
  (tmp_path / "secret").write_text("{}")
  (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out")]) == 2
  assert "'tokenizer.json', which leads out of the folder" in capsys.readouterr().err
  assert not (tmp_path / "out.unfinished").exists(), "it is seen before anything is converted"


def test_a_snapshot_of_the_hub_is_read_through_its_links(tiny, tmp_path):
  """Whose files are links to the blobs of the same model; to those of another they are refused."""
  for model in ("models--us--tiny", "models--us--other"):
    blobs, snapshot = tmp_path / model / "blobs", tmp_path / model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(tiny, blobs)
    whose = "../../blobs" if model.endswith("tiny") else "../../../models--us--tiny/blobs"
    for file in blobs.iterdir():
      (snapshot / file.name).symlink_to(f"{whose}/{file.name}")
  assert (
    HuggingFaceFolder(tmp_path / "models--us--tiny/snapshots/0123").tensors.keys()
    == HuggingFaceFolder(tiny).tensors.keys()
  )
  with pytest.raises(ConfigError, match="leads out of the folder"):
    HuggingFaceFolder(tmp_path / "models--us--other/snapshots/0123").config  # noqa: B018


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("config.json", "[" * 200_000),
    ("config.json", "[]"),
    ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
    ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
  ],
)
def test_json_of_another_form_is_a_clean_error(name, text, tiny, tmp_path, capsys):
  shutil.copytree(tiny, tmp_path / "hf")
  (tmp_path / "hf" / name).write_text(text)
  assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out"), *words("llama")]) == 1
  assert name in capsys.readouterr().err


def test_scales_of_another_shape_are_a_clean_error(tiny, tmp_path, capsys):
  name = "model.layers.0.mlp.up_proj.weight"
  scales = {name: np.zeros((80, 48), ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.zeros((3, 3), "f4")}
  folder = changed(tiny, tmp_path / "hf", lambda t: t.update(scales))
  for block in ([32, 32], [0, 32], ["a", 3], [32]):
    quantized = {"quantization_config": {"weight_block_size": block}}
    (folder / "config.json").write_text(json.dumps(HuggingFaceFolder(tiny).config | quantized))
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "out")]) == 1
    assert f"{name} is [80, 48] in blocks of {block}" in capsys.readouterr().err


@pytest.mark.parametrize("said", [[1], {"weight_block_size": 32}])
def test_a_quantization_of_another_form_is_a_clean_error(said, tiny, tmp_path, capsys):
  folder = shutil.copytree(tiny, tmp_path / "hf")
  (folder / "config.json").write_text(json.dumps(HuggingFaceFolder(tiny).config | {"quantization_config": said}))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out")]) == 2
  assert "config.json has a " in capsys.readouterr().err


@pytest.mark.parametrize("rows", [120, 130])
def test_a_vocabulary_may_be_padded_or_cut(rows, tiny, tmp_path):
  """As those of Gemma are: rows that no token names."""
  assert main(["convert", "from-hf", str(tiny), str(tmp_path / "out"), *words("llama", vocab_size=rows)]) == 0
  table, there = (
    parameters(tmp_path / "out")["embedding/table"],
    HuggingFaceFolder(tiny).tensors["model.embed_tokens.weight"].read(),
  )
  both = min(rows, len(there))
  np.testing.assert_array_equal(table[:both], there[:both])
  assert not table[both:].any()


def test_tokenizers_and_settings_go_through(tiny, tmp_path):
  folder = tmp_path / "hf"
  shutil.copytree(tiny, folder)
  (folder / "tokenizer.json").write_text("{}")
  (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
  config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 5}
  (folder / "config.json").write_text(json.dumps(config))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "params"), *words("llama")]) == 0
  assert main(["convert", "to-hf", str(tmp_path / "params"), str(tmp_path / "out")]) == 0
  assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
  assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 5}
  assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 5


@pytest.mark.parametrize("name", [name for name in model_names() if name not in ("default", "deepseek-custom")])
def test_every_model_is_found_by_its_sizes(name, tmp_path):
  """Or another with the same sizes; and sizes that have no name are read from the same description."""
  config = load_config(name, dataset_type="synthetic")
  ours = config_json_entries(config)
  (tmp_path / "config.json").write_text(json.dumps(ours))
  found = load_config(**keys_of_folder(HuggingFaceFolder(tmp_path)), dataset_type="synthetic")
  assert found.model_name != "default"
  theirs = config_json_entries(found)
  assert found.decoder_block == config.decoder_block
  assert {key: ours[key] for key in ours if key != "max_position_embeddings"} == {
    key: theirs[key] for key in theirs if key != "max_position_embeddings"
  }
  odd = next(key for key in ("num_hidden_layers", "n_layer") if key in ours)
  changed = config.model_copy(update={"base_num_decoder_layers": ours[odd] + 12})
  (tmp_path / "config.json").write_text(json.dumps(config_json_entries(changed)))
  keys = keys_of_folder(HuggingFaceFolder(tmp_path))
  assert keys["base_num_decoder_layers"] == ours[odd] + 12
  assert config_json_entries(load_config(**keys, dataset_type="synthetic")) == config_json_entries(changed)


def test_every_family_is_described():
  described = {block for block, family in FAMILIES.items() if {"HUGGING_FACE", "hugging_face"} & vars(family).keys()}
  assert described == FAMILIES.keys()


def test_four_bit_experts_are_what_transformers_makes_of_them(folder_of, tmp_path):
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  rng, tensors = (
    np.random.default_rng(0),
    {n: t.read() for n, t in HuggingFaceFolder(folder_of("gpt_oss")).tensors.items()},
  )
  expected, packed = {}, {}
  for name, tensor in tensors.items():
    experts = tensor.ndim == 3
    if not experts:
      packed[name] = tensor
      continue
    count, inputs, outputs = tensor.shape
    groups = -(-inputs // 32)
    packed[f"{name}_blocks"] = rng.integers(0, 256, (count, outputs, groups, 16), np.uint8)
    packed[f"{name}_scales"] = rng.integers(110, 130, (count, outputs, groups), np.uint8)
    both = (torch.from_numpy(packed[f"{name}_{part}"]) for part in ("blocks", "scales"))
    expected[name] = convert_moe_packed_tensors(*both).float().numpy()
  write_folder(tmp_path / "hf", packed)
  found = HuggingFaceFolder(tmp_path / "hf").tensors
  assert found.keys() == tensors.keys()
  for name, tensor in expected.items():
    assert found[name].shape == tensor.shape
    np.testing.assert_array_equal(found[name].read().astype(np.float32), tensor)


@pytest.mark.slow
def test_layers_that_predict_further_tokens_go_through(folder_of, tmp_path):
  """Where they are asked for; elsewhere they are left out. Their copies of embedding and head always are."""
  config = configure("deepseek3", mtp_num_layers=1)
  model = abstract_model(config)
  wanted, rng = tensor_layouts(model, weight_table(config, model.spec)), np.random.default_rng(0)
  there = {name: tensor.read() for name, tensor in HuggingFaceFolder(folder_of("deepseek3")).tensors.items()}
  further = {n: rng.normal(size=t.shape).astype("f4") for n, t in wanted.items() if n not in there}
  layer = "model.layers.2."
  assert all(name.startswith(layer) for name in further)
  copies = {f"{layer}{name}": there["lm_head.weight"] for name in ("embed_tokens.weight", "shared_head.head.weight")}
  description_there = HuggingFaceFolder(folder_of("deepseek3")).config | {"num_nextn_predict_layers": 1}
  write_folder(tmp_path / "hf", there | further | copies, description_there)
  for count, expected in ((1, there | further), (0, there)):
    params, back = tmp_path / f"params{count}", tmp_path / f"hf{count}"
    keys = words("deepseek3", mtp_num_layers=count)
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(params), *keys]) == 0
    assert main(["convert", "to-hf", str(params), str(back)]) == 0
    found = HuggingFaceFolder(back).tensors
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
      np.testing.assert_array_equal(found[name].read(), tensor, err_msg=name)
    assert HuggingFaceFolder(back).config["num_nextn_predict_layers"] == count
  ours = parameters(tmp_path / "params1")
  for path, name in {"join/weight": "eh_proj.weight", "token_norm/scale": "enorm.weight",
                     "hidden_norm/scale": "hnorm.weight", "norm/scale": "shared_head.norm.weight"}.items():  # fmt: skip
    np.testing.assert_array_equal(ours[f"mtp/0/{path}"], further[layer + name].T, err_msg=name)


def test_block_scaled_weights_are_multiplied_out(tiny, tmp_path):
  """Also where the last blocks are not whole; and they arrive in the checkpoint."""
  rng, name = np.random.default_rng(0), "model.layers.0.mlp.up_proj.weight"
  values, scales = (
    (rng.normal(size=(80, 48)) * 100).astype(ml_dtypes.float8_e4m3fn),
    rng.normal(size=(3, 2)).astype("f4"),
  )
  expected = np.empty((80, 48), np.float32)
  for i, j in np.ndindex(80, 48):
    expected[i, j] = np.float32(values[i, j]) * scales[i // 32, j // 32]
  folder = changed(tiny, tmp_path / "hf", lambda t: t.update({name: values, f"{name}_scale_inv": scales}))
  config = HuggingFaceFolder(tiny).config | {"quantization_config": {"weight_block_size": [32, 32]}}
  (folder / "config.json").write_text(json.dumps(config))
  assert main(["convert", "from-hf", str(folder), str(tmp_path / "out"), *words("llama")]) == 0
  up = parameters(tmp_path / "out")["groups/0/layers/0/feed_forward/up/weight"][0]
  np.testing.assert_array_equal(up, expected.T)
