"""LoRA: adapters train beside a frozen base wherever a model runs, and go out to PEFT, and into merged weights."""

import copy
import json
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint.metadata import ArrayMetadata
from maxtext.checkpoint.options import array_storage
from maxtext.checkpoint.stream import StreamWriter
from maxtext.configs.loader import values_and_origins
from maxtext.inference.resolve import resolve_model
from maxtext.layers.lora import LoraMatmul, adapted_module, adapter_paths, is_adapter
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from tests.cases import cases
from tests.support import TINY, losses, program, random_batch, tiny
from tests.test_dpo import dpo_keys
from tests.test_dpo import folder as dpo_data
from tests.test_dpo import losses as dpo_losses
from tests.test_matmul_seam import stepped, values
from tests.test_parity import CASES, RUN, references, torch

transformers = pytest.importorskip("transformers")

__all__ = ["dpo_data", "references"]  # fixtures

LORA = {"lora_rank": 4, "lora_alpha": 8.0}
TRAINED = LORA | {"learning_rate": 3e-2, "warmup_steps_fraction": 0.0, "steps": 4, "per_device_batch_size": 8}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
WAYS = {
  "unrolled": {"scan_layers": False},
  "less remat": {"remat_policy": "minimal"},
  "accumulation": {"gradient_accumulation_steps": 4, "per_device_batch_size": 2},
  "mesh": {
    "devices": 8, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2,
    "per_device_batch_size": 1,
  },
  "explicit": {
    "devices": 4, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "shard_mode": "explicit",
    "per_device_batch_size": 2,
  },
  "pipeline": {
    "devices": 4, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 2,
    "num_pipeline_microbatches": 4,
  },
}  # fmt: skip


MARKS = {"mesh": ()}


def trained_losses(devices=1, **keys):
  return losses(tiny(**EXPERTS | TRAINED | keys), devices)


@cache
def one_device():
  return trained_losses()


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, pytest.mark.nightly)) for way in WAYS])
def test_adapters_train_the_same_wherever_a_model_runs(way):
  assert one_device()[0] - one_device()[-1] > 0.1, "they must be felt"
  np.testing.assert_allclose(trained_losses(**WAYS[way]), one_device(), rtol=2e-4)


def test_only_adapters_train_and_have_optimizer_state():
  config = tiny(**TRAINED)
  p, plain = program(config), program(tiny())
  assert all(map(is_adapter, p.model.params))
  assert p.model.buffers.keys() == plain.model.params.keys()
  moments = [leaf for leaf in jax.tree.leaves(p.state.opt_state) if leaf.ndim]
  assert sum(m.size for m in moments) == 2 * sum(s.size for s in p.model.params.values())
  state, base = p.init(), plain.init().params
  batch = random_batch(config, rows=8)
  first = None
  for _ in range(3):
    state, metrics = p.step(state, batch)
    first = metrics["loss"] if first is None else first
  _, unadapted = plain.step(plain.init(), batch)
  np.testing.assert_allclose(first, unadapted["loss"], rtol=1e-6, err_msg="it starts as the base")
  assert float(metrics["loss"]) < float(first) - 0.1
  for name, value in base.items():
    np.testing.assert_array_equal(state.buffers[name], value, err_msg=name)
  assert all(float(jnp.abs(value).max()) > 0 for value in state.params.values())


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["absmax", "delayed"])
def test_adapters_of_quantized_matmuls_are_not_quantized(method):
  keys = {"quantization": "int8", "act_quantization_calibration_method": method}
  found = trained_losses(**keys)
  assert found[0] - found[-1] > 0.1
  np.testing.assert_allclose(found, one_device(), rtol=2e-2)
  assert np.abs(found - one_device()).max() > 1e-5, "the base is quantized"
  model = program(tiny(**EXPERTS | TRAINED | keys)).model
  assert all(map(is_adapter, model.params))


def checkpoint(folder, config, params):
  """Parameters as a checkpoint, with the keys of their run."""
  arrays = {name: ArrayMetadata(value.shape, str(value.dtype)) for name, value in params.items()}
  writer = StreamWriter(array_storage(config), folder, arrays, [])
  for name, value in params.items():
    writer.put(name, (), np.asarray(value))
  return writer.finish(0, values_and_origins(config, {}))


def answers(config, inputs, positions):
  """The parameters that a run starts with, and its logits."""
  model = program(config).model
  params = load_weights(config, model, model.params | model.buffers)

  @jax.jit
  def logits(params):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(inputs, positions)[0])

  return params, np.asarray(logits(params))


# Families without a reference that PEFT could adapt, and why.
WITHOUT_PEFT = {
  "qwen3_custom": "transformers has no such model",
  "qwen3_omni_thinker": "its modules have other names than its files, and those are the names here",
}


# Where PEFT takes the name of any gate_proj, up_proj or down_proj for that of the experts.
TAKEN_FOR_EXPERTS = ("deepseek2_236b", "deepseek2_lite", "deepseek3", "deepseek32", "kimi_k2", "qwen3_next")


def linear_layers(case, model):
  """The names of all linear layers of a reference, but for head and routers, which have no adapters here."""
  kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
  names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
  left_out = r"lm_head|router" + (r"|(gate|up|down)_proj$" if case in TAKEN_FOR_EXPERTS else "")
  return [name for name in names if not re.search(left_out, name)]


@pytest.mark.parity
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases(sorted(CASES.keys() - WITHOUT_PEFT), (), ("llama",)))
def test_peft_and_we_compute_the_same(case, dora, references, tmp_path):
  """An adapter of all linear layers that PEFT wrote, read here; written from here, read by PEFT; and merged by both."""
  peft = pytest.importorskip("peft")
  reference = references(case)
  base, batch = reference.model.folder / "weights", reference.batch
  settings = peft.LoraConfig(
    r=4,
    lora_alpha=6,
    target_modules=linear_layers(case, reference.model.model),
    use_rslora=case == "gemma3",
    use_dora=dora,
    task_type="CAUSAL_LM",
  )
  theirs = peft.get_peft_model(copy.deepcopy(reference.model.model), settings).eval()
  torch.manual_seed(1)
  with torch.no_grad():
    for name, value in theirs.named_parameters():
      if "lora_" in name:
        random = torch.randn_like(value) * 0.1
        value.copy_(value * (1 + random) if "magnitude" in name else random)
    expected = theirs(reference.inputs).logits.numpy()
  theirs.save_pretrained(tmp_path / "theirs")
  scale = np.abs(expected).max()
  assert np.abs(expected - reference.logits).max() > 1e-2 * scale, "the adapter must be felt"

  keys = RUN | {"dtype": "float32", "lora_input_adapters_path": str(tmp_path / "theirs")}
  config = resolve_source(str(base), keys).config
  params, logits = answers(config, batch.inputs, batch.positions)
  np.testing.assert_allclose(logits, expected, atol=1e-5 * scale)

  run = checkpoint(tmp_path / "run", config, params)
  ours = maxtext.convert(run, tmp_path / "ours", to="peft")
  again = peft.PeftModel.from_pretrained(copy.deepcopy(reference.model.model), ours).eval()
  with torch.no_grad():
    np.testing.assert_allclose(again(reference.inputs).logits.numpy(), expected, atol=1e-5 * scale)
  config = resolve_source(str(base), keys | {"lora_input_adapters_path": str(ours)}).config
  np.testing.assert_allclose(answers(config, batch.inputs, batch.positions)[1], expected, atol=1e-5 * scale)

  whole = maxtext.convert(run, tmp_path / "merged", to="huggingface")
  config = resolve_source(str(whole), RUN | {"dtype": "float32"}).config
  assert not config.lora_rank
  np.testing.assert_allclose(answers(config, batch.inputs, batch.positions)[1], expected, atol=1e-5 * scale)
  tensors = load_file(whole / "model.safetensors")
  theirs.merge_and_unload().save_pretrained(tmp_path / "merged by them")
  for name, value in load_file(tmp_path / "merged by them" / "model.safetensors").items():
    np.testing.assert_allclose(tensors[name], value, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A base as a checkpoint, and an adapter of it as PEFT writes them."""
  path, config = tmp_path_factory.mktemp("lora"), tiny(**LORA, lora_targets=["query$", "down$"])
  model = program(config).model
  params, buffers = jax.jit(model.init)(0)
  checkpoint(path / "base", tiny(), buffers)
  shaken = {name: value + 0.1 * np.cos(np.arange(value.size).reshape(value.shape)) for name, value in params.items()}
  maxtext.convert(checkpoint(path / "run", config, buffers | shaken), path / "peft", to="peft")
  return path


def loaded(folder, adapter, **keys):
  config = resolve_source(
    None, TINY | {"load_parameters_path": str(folder / "base"), "lora_input_adapters_path": str(adapter)} | keys
  ).config
  model = program(config).model
  return config, load_weights(config, model, model.params | model.buffers)


def test_a_folder_says_rank_scale_and_modules(folder):
  config, params = loaded(folder, folder / "peft")
  layer = "groups/0/layers/0"
  assert (config.lora_rank, config.lora_alpha, config.use_rslora) == (4, 8.0, False)
  assert config.lora_targets == [f"^{layer}/feed_forward/down$", f"^{layer}/mixer/query$"]
  a, b = adapter_paths(f"{layer}/mixer/query")
  assert (params[a].shape, params[b].shape) == ((2, 48, 4), (2, 4, 4, 8))
  assert {name for name in params if is_adapter(name)} == {a, b, *adapter_paths(f"{layer}/feed_forward/down")}


A, B = "q_proj.lora_A.weight", "q_proj.lora_B.weight"
HOSTILE = {
  "rank": ({"r": 10**12}, {}, "r=1000000000000: it must be a whole number from 1 to 65536"),
  "another rank": ({"r": 5}, {}, r"says rank 5: A must be \[5, inputs\]"),
  "no rank": ({"r": "4"}, {}, "r=4: it must be a whole number"),
  "alpha": ({"lora_alpha": float("nan")}, {}, "lora_alpha=nan: it must be a number above 0"),
  "DoRA": ({"use_dora": True}, {}, r"has no .*lora_magnitude_vector: write the adapter again"),
  "another kind": ({"peft_type": "IA3"}, {}, "peft_type=IA3, and only LORA is read"),
  "patterns": ({"rank_pattern": {"(a+)+$": 4}}, {}, "it must be a table of names of modules"),
  "half": ({}, {B: None}, r"has no .*q_proj\.lora_B\.weight: write the adapter again"),
  "inputs": ({}, {A: lambda a: a[:, :-1]}, r"whose weight is \[32, 48\] in this model: give the adapter's own base"),
  "outputs": ({}, {B: lambda b: b[:-1]}, r"whose weight is \[32, 48\] in this model"),
  "integers": ({}, {A: lambda a: a.astype(np.int32)}, "neither A nor B"),
  "not finite": ({}, {A: lambda a: a * np.nan}, "not finite: take another adapter"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused(name, folder, tmp_path):
  entries, tensors, message = HOSTILE[name]
  about = json.loads((folder / "peft" / "adapter_config.json").read_text())
  (tmp_path / "adapter_config.json").write_text(json.dumps(about | entries))
  found = load_file(folder / "peft" / "adapter_model.safetensors")
  for ending, change in tensors.items():
    full = f"base_model.model.model.layers.0.self_attn.{ending}"
    value = found.pop(full)
    found |= {} if change is None else {full: np.ascontiguousarray(change(value))}
  save_file(found, tmp_path / "adapter_model.safetensors")
  with pytest.raises(ConfigError, match=message) as error:
    loaded(folder, tmp_path)
  assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.nothing", "lm_head", "model.layers.7.self_attn.q_proj"])
def test_modules_that_are_not_there_are_refused(module, folder, tmp_path):
  (tmp_path / "adapter_config.json").write_text((folder / "peft" / "adapter_config.json").read_text())
  pair = {"A": np.zeros((4, 48), np.float32), "B": np.zeros((128, 4), np.float32)}
  save_file(
    {f"base_model.model.{module}.lora_{n}.weight": a for n, a in pair.items()}, tmp_path / "adapter_model.safetensors"
  )
  with pytest.raises(ConfigError, match=f"an adapter of {module}, and decoder_block=llama2 has no linear layer"):
    loaded(folder, tmp_path)


def test_folders_that_are_none_are_refused(folder, tmp_path):
  with pytest.raises(ConfigError, match=r"has no adapter_config\.json: give the folder"):
    loaded(folder, tmp_path)
  (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
  (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
  with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; a pickle such as adapter_model\.bin"):
    loaded(folder, tmp_path)
  (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
  with pytest.raises(ConfigError, match="is not a safetensors file, or is truncated"):
    loaded(folder, tmp_path)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"lora_rank": 8}, r"lora_rank=8 contradicts .*adapter_config\.json, which says 4: leave it out"),
    ({"load_parameters_path": ""}, "set load_parameters_path to their base"),
    ({"trainable_parameters_mask": ["a"]}, "lora_rank trains the adapters alone"),
    ({"lora_input_adapters_path": "", "lora_rank": 2, "lora_targets": ["mixer/", "qery"]}, "'qery' gives no module an"),
    ({"lora_input_adapters_path": "", "lora_rank": 2, "lora_targets": ["("]}, "is not a regular expression"),
    ({"lora_input_adapters_path": "", "lora_rank": 2, "lora_targets": []}, "lora_targets is empty"),
  ],
)
def test_keys_that_do_not_fit_are_named(keys, message, folder):
  with pytest.raises(ConfigError, match=message):
    loaded(folder, folder / "peft", **keys)


def test_adapters_of_a_run_are_not_lost(folder):
  config, plain = tiny(load_parameters_path=str(folder / "run")), program(tiny()).model
  with pytest.raises(ConfigError, match="has LoRA adapters, and this run, with lora_rank=0, would leave them out"):
    load_weights(config, plain, plain.params)
  narrow = tiny(**LORA | {"lora_targets": ["query$"]}, load_parameters_path=str(folder / "run"))
  model = program(narrow).model
  with pytest.raises(ConfigError, match="with lora_rank=4, would leave them out"):
    load_weights(narrow, model, model.params | model.buffers)
  for changes in ({"lora_rank": 0}, {"lora_targets": ["query$"]}):
    with pytest.raises(ConfigError, match=r"has the LoRA adapter .*, and lora_rank or lora_targets would leave it out"):
      maxtext.convert(folder / "run", folder / "merged", to="huggingface", **changes)
  config = tiny(**LORA, load_parameters_path=str(folder / "base"))
  model = program(config).model
  assert not any(map(is_adapter, load_weights(config, model, model.params | model.buffers))), "they start fresh"
  other = tiny(**LORA, base_num_decoder_layers=3, load_parameters_path=str(folder / "base"))
  with pytest.raises(ConfigError, match=r"this run wants float32\[3"):
    load_weights(other, model, program(other).model.buffers)
  config = resolve_source(str(folder / "run"), {}).config
  assert (config.lora_rank, config.lora_targets) == (4, ["query$", "down$"]), "the next run trains the same adapters"


def test_names_that_peft_takes_for_experts_are_said(tmp_path, caplog):
  config = load_config(**CASES["deepseek3"]["keys"] | RUN, **LORA, lora_targets=["shared/down$"])
  params, buffers = jax.jit(program(config).model.init)(0)
  maxtext.convert(checkpoint(tmp_path / "run", config, params | buffers), tmp_path / "peft", to="peft")
  assert "PEFT may take model.layers.1.mlp.shared_experts.down_proj for weights of routed experts" in caplog.text


def test_experts_that_peft_cannot_express_are_named(tmp_path):
  config = tiny(**EXPERTS | LORA)
  model = program(config).model
  params, buffers = jax.jit(model.init)(0)
  run = checkpoint(tmp_path / "run", config, params | buffers)
  with pytest.raises(
    ConfigError, match=r"PEFT cannot express the adapters of groups/0/layers/0/feed_forward/experts/do"
  ):
    maxtext.convert(run, tmp_path / "peft", to="peft")
  assert not (tmp_path / "peft").exists()
  with pytest.raises(ConfigError, match="trained without LoRA"):
    maxtext.convert(checkpoint(tmp_path / "plain", tiny(), buffers), tmp_path / "peft", to="peft")


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(folder, tmp_path):
  keys = {
    "load_parameters_path": str(folder / "base"), "base_output_directory": str(tmp_path), "enable_checkpointing": True,
    "checkpoint_period": 2, "learning_rate_schedule_steps": 4, "enable_tensorboard": False,
  }  # fmt: skip
  whole = maxtext.train(tiny(**TRAINED | keys, run_name="whole"))
  maxtext.train(tiny(**TRAINED | keys | {"steps": 2}, run_name="parts"))
  parts = maxtext.train(tiny(**TRAINED | keys, run_name="parts"))
  base, _ = jax.jit(program(tiny()).model.init)(0)
  for name, value in (whole.params | whole.buffers).items():
    np.testing.assert_array_equal(value, (parts.params | parts.buffers)[name], err_msg=name)
    if not is_adapter(name):
      np.testing.assert_array_equal(value, base[name], err_msg=name)
  config = resolve_model(str(tmp_path / "parts"), {})
  model = program(config).model
  for name, value in load_weights(config, model, model.params | model.buffers).items():
    np.testing.assert_array_equal(value, (parts.params | parts.buffers)[name], err_msg=f"served: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("precomputed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_preferences_start_at_ln_2(precomputed, dpo_data, tmp_path):
  keys = dpo_keys(dpo_data, precompute_ref_log_probs=precomputed, **LORA)
  history = dpo_losses(keys, tmp_path / "reference", steps=3)
  assert history.losses[0] == pytest.approx(math.log(2), abs=5e-7)
  assert history.losses[-1] < history.losses[0] - 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["deepseek3"])
def test_merged_equals_unmerged_with_experts_and_absorbed_matmuls(case):
  keys = CASES[case]["keys"] | RUN | {"dtype": "float32", "mla_naive_kvcache": False}
  model = program(load_config(**keys, **LORA)).model
  params = {
    n: v + 0.1 * np.cos(np.arange(v.size).reshape(v.shape)) if is_adapter(n) else v for n, v in values(model).items()
  }
  plain = {name: np.asarray(value) for name, value in params.items() if not is_adapter(name)}
  for module in {adapted_module(name) for name in params if is_adapter(name)}:
    weight, (a, b) = f"{module}/weight", (np.asarray(params[path]) for path in adapter_paths(module))
    plain[weight] = LoraMatmul(scale=2.0).merge(plain[weight], model.contracted[weight][0], a, b)
  expected = np.asarray(stepped(program(load_config(**keys)).model, plain))
  found = np.asarray(stepped(model, params))
  np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
  without = stepped(model, {n: jnp.zeros_like(v) if is_adapter(n) else v for n, v in params.items()})
  assert np.abs(without - expected).max() > 1e-2 * np.abs(expected).max(), "the adapters must be felt"
