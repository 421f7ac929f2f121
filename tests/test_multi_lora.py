"""Many LoRA adapters in one engine: a request's tokens are those of its adapter alone, whatever the others have."""

import gc
import json
import shutil
import threading
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxtext import LLM, ConfigError, load_config
from maxtext.data.tokenizers import train_tokenizer
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager, UnknownAdapterError
from maxtext.inference.engine import Engine, dropless
from maxtext.inference.grammar import GrammarSpec
from maxtext.inference.sampling import SamplingParams
from maxtext.layers.lora import LoraMatmul, is_adapter
from maxtext.weights.from_peft import PeftReader, adapter_keys, load_adapters
from maxtext.weights.tensor_files import read_header
from tests.cases import cases
from tests.inference_support import BYTES, finish, random_model
from tests.support import program, tiny
from tests.test_lora import checkpoint
from tests.test_parity import CASES

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3)
HOT = SamplingParams(temperature=2.0, max_tokens=10, logprobs=3, seed=5)
LONG = [(7 + 13 * i) % 250 for i in range(36)]  # in three chunks of 16
PROMPT = LONG[:15]
RANKS = {"one": 4, "two": 2, "org/three": 8}
NAMES = [None, *RANKS]
CHUNKED = {
  "use_chunked_prefill": True, "prefill_chunk_size": 16, "max_prefill_predict_length": 40,
  "enable_prefix_caching": True, "prefix_caching_hbm_byte": 2**24, "prefix_caching_dram_byte": 2**24,
}  # fmt: skip
PAGED = {"attention": "paged", "pagedattn_tokens_per_page": 4, "pagedattn_num_pages": 26}  # too few for four


def write_adapter(folder, config, seed, rank=4, only=("",)):
  """A PEFT folder with random values for all linear layers, or those with one of some words in their names."""
  rng, tensors, reader = np.random.default_rng(seed), {}, PeftReader(config)
  for name, layout in reader._target.layouts.items():
    shape = layout.shape if layout.weight.transposed else layout.shape[::-1]
    module = f"base_model.model.{name.removesuffix('.weight')}"
    if layout.slices[0].path.removesuffix("/weight") in reader.modules and any(word in module for word in only):
      tensors[f"{module}.lora_A.weight"] = rng.normal(0, 0.2, (rank, shape[1])).astype(np.float32)
      tensors[f"{module}.lora_B.weight"] = rng.normal(0, 0.2, (shape[0], rank)).astype(np.float32)
  folder.mkdir(parents=True, exist_ok=True)
  save_file(tensors, folder / "adapter_model.safetensors")
  (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank}))
  return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Adapters of the tiny model; the second has queries and values alone, the last layer only."""
  path, config = tmp_path_factory.mktemp("adapters"), tiny(vocab_size=BYTES)
  only = {"two": ("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj")}
  return {
    name: write_adapter(path / name, config, seed, rank, only.get(name, ("",)))
    for seed, (name, rank) in enumerate(RANKS.items())
  }


def answers(loaded, asked):
  """Tokens and log-probabilities of (prompt, adapter's name, sampling parameters), all at once."""
  with ExitStack() as in_use:
    requests = [
      loaded.make_request(prompt, params, adapter=in_use.enter_context(loaded.use_adapter(name)))
      for prompt, name, params in asked
    ]
    return [
      ([o.token for o in found.outputs], [o.logprob for o in found.outputs]) for found in finish(loaded, requests)
    ]


def merge(config, model, params, folder):
  """The parameters with an adapter merged into them."""
  found = PeftReader(config).read(folder, "folder", 8)
  updated = dict(params)
  for module, (a, b) in found.items():
    weight = f"{module}/weight"
    value = LoraMatmul(scale=1.0).merge(np.asarray(params[weight]), model.contracted[weight][0], a, b)
    updated[weight] = jax.device_put(value, params[weight].sharding)
  return updated


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
  """What the base and each merged model answer: {(tokens of the prompt, name, sampling parameters): ...}."""
  loaded = random_model(tmp_path_factory.mktemp("merged"), max_prefill_predict_length=40)
  base, found = dict(loaded.engine._weights), {}
  asked = [(prompt, params) for prompt in (PROMPT, LONG) for params in (GREEDY, HOT)]
  for name in NAMES:
    params = base if name is None else merge(loaded.config, loaded.engine.model, base, folders[name])
    loaded.engine.update_params(params, 0)
    for (prompt, params), answer in zip(
      asked, answers(loaded, [(prompt, None, params) for prompt, params in asked]), strict=True
    ):
      found[len(prompt), name, params] = answer
  tokens = [found[len(PROMPT), name, GREEDY][0] for name in NAMES]
  assert all(one != other for i, one in enumerate(tokens) for other in tokens[:i]), "every adapter must be felt"
  return found


LESS_EXACT = ({"dtype": "bfloat16"}, {"quantization": "int8"})
WAYS = {
  "plain": {},
  "layers apart": {"scan_layers": False},
  "chunks and prefixes": CHUNKED,
  "pages": PAGED,
  "drafts": {"num_speculative_tokens": 3},
  "drafts of the base": {"num_speculative_tokens": 3, "drafts_itself": True},
  "tensor parallelism": {"devices": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 2},
  "layers apart on a mesh": {
    "devices": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 2, "scan_layers": False,
  },
  "one prefill for equal prompts": {"multi_sampling": True},
}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "plain" else pytest.mark.slow) for way in WAYS])
def test_a_request_has_the_tokens_of_its_adapter(way, folders, expected, tmp_path):
  """Among others, which have other adapters or none, as by the merged model alone; the base's to the bit."""
  keys = {"max_prefill_predict_length": 40, "per_device_batch_size": 4} | WAYS[way]
  loaded = random_model(tmp_path, adapter_options=AdapterOptions(folders), **keys)
  asked = [(prompt, name, params) for prompt in (PROMPT, LONG) for name in NAMES for params in (GREEDY, HOT)]
  found = answers(loaded, asked)
  for (prompt, name, params), (tokens, logprobs) in zip(asked, found, strict=True):
    reference = expected[len(prompt), name, params]
    assert tokens == reference[0], (name, params)
    np.testing.assert_allclose(logprobs, reference[1], atol=1e-4, rtol=0)
  again = answers(loaded, asked[::-1])[::-1]
  assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found]


@pytest.mark.parametrize("keys", [{}, *(pytest.param(k, marks=pytest.mark.nightly) for k in LESS_EXACT)])
def test_neighbours_do_not_change_a_bit(keys, folders, tmp_path):
  """Of the base neither, whose answers are those of an engine without tables of adapters."""
  keys = {"per_device_batch_size": 4} | keys
  loaded = random_model(tmp_path, adapter_options=AdapterOptions(folders), **keys)
  asked = [(PROMPT, name, params) for name in NAMES for params in (GREEDY, HOT)]
  among = answers(loaded, asked)
  assert [answers(loaded, [one])[0] for one in asked] == among
  assert len(set(map(str, among))) == len(asked), "every adapter must be felt"
  assert answers(random_model(tmp_path, **keys), asked[:2]) == among[:2]


def test_it_is_what_the_engine_with_that_adapter_alone_computes(folders, expected, tmp_path):
  """As `lora_input_adapters_path` serves one adapter."""
  keys = {"vocab_size": BYTES, "max_target_length": 96, "max_prefill_predict_length": 40, "per_device_batch_size": 2}
  config = tiny(**keys).model_copy(update={"lora_input_adapters_path": folders["one"]})
  config = config.model_copy(update=adapter_keys(config))
  model = program(config).model
  base = model.init(0)[1]
  params = {**base, **load_adapters(config, model, base)}
  engine = Engine(model, params, 2, 96, 40)
  engine.insert(engine.prefill(LONG), 0, LONG, GREEDY)
  steps = [engine.decode_step([True, False]) for _ in range(10)]
  tokens, logprobs = expected[len(LONG), "one", GREEDY]
  assert [int(step.token_ids[0]) for step in steps] == tokens
  np.testing.assert_allclose([step.logprobs[0] for step in steps], logprobs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_weights_at_rest_in_few_bits(weight_format, folders, tmp_path):
  """Of a folder, by its name alone: as `lora_input_adapters_path` serves one adapter on them."""
  config = tiny(vocab_size=BYTES, max_target_length=96)
  checkpoint(tmp_path / "base", config, jax.jit(program(config).model.init)(0)[0])
  train_tokenizer([], BYTES, 0, tmp_path)
  keys = {
    "weight_format": weight_format, "tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path),
    "max_prefill_predict_length": 40, "per_device_batch_size": 1, "weight_block_size": 8, "jax_cache_dir": "",
  }  # fmt: skip
  many = LLM(tmp_path / "base", adapters=folders, **keys)
  found = many.generate([PROMPT] * 4, GREEDY, adapter=NAMES)
  for output, name in zip(found[:3:2], (None, "two"), strict=True):
    one = LLM(tmp_path / "base", **keys | ({"lora_input_adapters_path": folders[name]} if name else {}))
    (alone,) = one.generate(PROMPT, GREEDY)
    assert alone.token_ids == output.token_ids
    np.testing.assert_allclose(alone.logprobs, output.logprobs, atol=1e-4, rtol=0)
  assert len({output.token_ids for output in found}) == 4, "every adapter must be felt"


FAMILIES = ("llama", "gemma3", "qwen3_next", "mixtral", "deepseek3", "gpt2_as_gpt3")


@pytest.mark.parametrize("case", cases(FAMILIES, (), ("deepseek3",)))
def test_families(case, tmp_path):
  """Logits of a prefilled chunk, and of steps after it, as by merged weights: fused, latent and recurrent layers."""
  keys = CASES[case]["keys"] | {
    "max_target_length": 48, "max_prefill_predict_length": 32, "per_device_batch_size": 3, "dataset_type": "synthetic",
    "jax_cache_dir": "", "dtype": "float32",
  } | ({"mla_naive_kvcache": False} if case == "deepseek3" else {})  # fmt: skip
  config = load_config(**keys)
  model = dropless(program(config).model)
  shapes = model.params | model.buffers
  params = {
    name: jnp.asarray(np.random.default_rng(i).normal(0, 0.1, s.shape), s.dtype)
    for i, (name, s) in enumerate(sorted(shapes.items()))
  }
  folders = {f"{seed}": write_adapter(tmp_path / f"{seed}", config, seed) for seed in range(2)}
  manager = AdapterManager(config, AdapterOptions(folders))
  engine = Engine(model, dict(params), 3, 48, 32, chunk_size=16, adapters=manager.matmul)
  manager.start(engine)
  prompt = [token % config.vocab_size for token in LONG[:24]]

  def written(engine, slots):
    for slot, adapter in enumerate(slots):
      engine.insert(engine.prefill(prompt, adapter), slot, prompt, GREEDY, adapter=adapter)
    return np.array([engine.decode_step([True] * 3).top_logprobs for _ in range(6)])

  found = written(engine, [0, 1, 2])
  alone = Engine(model, dict(params), 3, 48, 32, chunk_size=16)
  base = written(alone, [0, 0, 0])
  np.testing.assert_allclose(found[:, 0], base[:, 0], atol=1e-5)
  for slot, folder in enumerate(folders.values(), 1):
    alone.update_params(merge(config, model, params, folder), slot)
    reference = written(alone, [0, 0, 0])
    np.testing.assert_allclose(found[:, slot], reference[:, slot], atol=2e-4)
    assert np.abs(reference - base).max() > 1e-2, "the adapter must be felt"


def test_structured_outputs(folders, tmp_path):
  loaded = random_model(tmp_path, per_device_batch_size=4, adapter_options=AdapterOptions(folders))
  grammar = loaded.grammar_compiler.compile(GrammarSpec("regex", "regex", "[a-f]{3}-[0-9]{2}"))

  def written(names):
    with ExitStack() as in_use:
      adapters = [in_use.enter_context(loaded.use_adapter(name)) for name in names]
      requests = [loaded.make_request(PROMPT, HOT, grammar, adapter) for adapter in adapters]
      return [found.text for found in finish(loaded, requests)]

  texts = written(NAMES)
  assert all(len(text) == 6 and text[3] == "-" for text in texts)
  assert len(set(texts)) > 1
  assert [written([name])[0] for name in NAMES] == texts


def live_bytes():
  gc.collect()
  return sum(array.nbytes for array in jax.live_arrays())


def test_adapters_come_and_go_without_compilation_and_leave_nothing(folders, expected, tmp_path):
  """Two places, three adapters that take turns a hundred times while requests run, caches of prefixes among it."""
  llm = LLM.of(random_model(tmp_path, adapter_options=AdapterOptions(max_loras=2), **CHUNKED))
  compiled = []

  def listen(name, seconds, **_):
    if "compile" in name or "trace" in name:
      compiled.append(name)

  def turn(number):
    name, other = list(RANKS)[number % 3], list(RANKS)[(number + 1) % 3]
    llm.load_adapter("here", folders[name])
    llm.load_adapter("there", folders[other])
    outputs = llm.generate([LONG] * 3, GREEDY, adapter=["here", None, "there"])
    for output, used in zip(outputs, (name, None, other), strict=True):
      assert list(output.token_ids) == expected[len(LONG), used, GREEDY][0], "never the keys and values of another"
    assert llm.adapters == ["here", "there"]
    llm.unload_adapter("here")
    llm.unload_adapter("there")

  for number in range(3):
    turn(number)
  llm._scheduler._prefix_cache.clear()
  before = live_bytes()
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for number in range(33):
      turn(number)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert compiled == []
  llm._scheduler._prefix_cache.clear()
  assert live_bytes() == before
  assert llm.adapters == []


def test_score(folders, expected, tmp_path):
  llm = LLM.of(random_model(tmp_path, adapter_options=AdapterOptions(folders)))
  for name in NAMES:
    tokens, logprobs = expected[len(PROMPT), name, GREEDY]
    scores = llm.score([*PROMPT, *tokens], adapter=name)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(scores, logprobs, atol=1e-4, rtol=0)
  with pytest.raises(UnknownAdapterError):
    llm.score(PROMPT, adapter="none")


def test_an_unloaded_adapter_finishes_its_requests(folders, expected, tmp_path):
  """Its name is gone at once, and its place is another's when the last request has ended."""
  loaded = random_model(tmp_path, adapter_options=AdapterOptions({"one": folders["one"]}, max_lora_rank=8))
  scheduler, manager = loaded.make_scheduler(), loaded.adapters
  with loaded.use_adapter("one") as adapter:
    request = loaded.make_request(PROMPT, GREEDY, adapter=adapter)
    scheduler.submit(request)
    outputs = [output for _ in range(4) for output in scheduler.step()]
    manager.unload("one")
    with pytest.raises(UnknownAdapterError, match="'one' is not loaded"), loaded.use_adapter("one"):
      pass
    with pytest.raises(ConfigError, match="All 1 slots of adapters are taken, 1 of them until the requests of"):
      manager.load("one", folders["org/three"], "folder")
    outputs += scheduler.run()
  assert [output.token for output in outputs] == expected[len(PROMPT), "one", GREEDY][0]
  manager.load("one", folders["org/three"], "folder")
  assert answers(loaded, [(PROMPT, "one", GREEDY)])[0][0] == expected[len(PROMPT), "org/three", GREEDY][0]


def test_two_loads_of_one_name_at_once(folders, tmp_path):
  loaded = random_model(tmp_path, adapter_options=AdapterOptions(max_loras=4))
  ends, start = [], threading.Barrier(4)

  def load(folder):
    start.wait()
    try:
      loaded.adapters.load("same", folder, "folder")
      ends.append("loaded")
    except ConfigError as error:
      ends.append(str(error))

  threads = [threading.Thread(target=load, args=(folders[name],)) for name in ("one", "two", "one", "two")]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert ends.count("loaded") == 1
  assert sum("'same' is loaded already" in end for end in ends) == 3
  assert len(loaded.adapters._free) == 3, "no slot is lost"


BAD_NAMES = ["", ".", "..", "../one", "a/../b", "/one", "a/b/c", "a b", "a\nb", "é", "-x", "x" * 129, "x" * 10_000]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names(name):
  with pytest.raises(ConfigError, match="is no name of an adapter") as error:
    AdapterOptions({name: "folder"})
  assert len(str(error.value)) < 500


@pytest.fixture(scope="module")
def roomy(folders, tmp_path_factory):
  """Room for one adapter more than it has, of rank 4."""
  options = AdapterOptions({"one": folders["one"]}, max_loras=2, max_lora_rank=4)
  return random_model(tmp_path_factory.mktemp("roomy"), adapter_options=options)


# What is done to the names and values of an adapter's tensors, and what is said of it.
HOSTILE = {
  "another shape": (lambda name, value: (name, value[:, :-1] if "lora_A" in name else value), "the adapter's own base"),
  "another base": (lambda name, value: (name.replace("q_proj", "c_attn"), value), "no linear layer of that name"),
  "experts": (lambda name, value: (name.replace("mlp.", "mlp.experts.0."), value), "no linear layer of that name"),
  "not finite": (lambda name, value: (name, value * np.nan), "not finite"),
  "half": (lambda name, value: (name.replace("lora_B", "lora_B.default"), value[:1]), "says rank 4"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(case, folders, roomy, tmp_path):
  """Each is refused with a sentence, and changes nothing."""
  change, message = HOSTILE[case]
  shutil.copy(f"{folders['one']}/adapter_config.json", tmp_path)
  tensors = load_file(f"{folders['one']}/adapter_model.safetensors")
  save_file(dict(change(*pair) for pair in tensors.items()), tmp_path / "adapter_model.safetensors")
  assert_refused(roomy, tmp_path, message)


def test_folders_that_do_not_fit(folders, roomy, tmp_path):
  """Another rank, DoRA, and files that are missing or cut off."""
  dora = tmp_path / "dora"
  shutil.copytree(folders["one"], dora)
  tensors = load_file(dora / "adapter_model.safetensors")
  sizes = {
    name.replace("lora_B.weight", "lora_magnitude_vector"): len(b) for name, b in tensors.items() if "_B." in name
  }
  save_file(tensors | {n: np.ones(k, np.float32) for n, k in sizes.items()}, dora / "adapter_model.safetensors")
  about = json.loads((dora / "adapter_config.json").read_text())
  (dora / "adapter_config.json").write_text(json.dumps(about | {"use_dora": True}))
  assert_refused(roomy, dora, "is DoRA, which cannot be served beside other adapters")
  assert_refused(roomy, folders["org/three"], "has rank 8, which is above max_lora_rank=4")
  assert_refused(roomy, tmp_path, r"has no adapter_config\.json")
  shutil.copy(f"{folders['one']}/adapter_config.json", tmp_path)
  assert_refused(roomy, tmp_path, r"has no adapter_model\.safetensors")
  content = open(f"{folders['one']}/adapter_model.safetensors", "rb").read()  # noqa: SIM115
  (tmp_path / "adapter_model.safetensors").write_bytes(content[:-9])
  assert_refused(roomy, tmp_path, "is truncated")


def assert_refused(roomy, folder, message):
  before = {path: np.asarray(table) for path, table in roomy.engine._tables.items()}
  with pytest.raises(ConfigError, match=message) as error:
    roomy.adapters.load("new", str(folder), "lora_path")
  assert str(folder) in str(error.value)
  assert roomy.adapters.names == ["one"]
  assert len(roomy.adapters._free) == 1
  for path, table in before.items():
    np.testing.assert_array_equal(roomy.engine._tables[path], table)


def test_a_file_that_is_cut_off_while_it_is_read(folders, roomy, tmp_path, monkeypatch):
  """Through a map of the file, that would end the process."""
  shutil.copytree(folders["one"], tmp_path / "one")

  def cut(file):
    header = read_header(file)
    file.write_bytes(file.read_bytes()[:-20_000])
    return header

  monkeypatch.setattr("maxtext.weights.from_peft.read_header", cut)
  assert_refused(roomy, tmp_path / "one", "was cut off while it was read")


def test_what_is_loaded_already_and_what_is_not(folders, roomy):
  with pytest.raises(ConfigError, match="'one' is loaded already"):
    roomy.adapters.load("one", folders["two"], "lora_path")
  roomy.adapters.load("two", folders["two"], "lora_path")
  with pytest.raises(ConfigError, match="All 2 slots of adapters are taken: unload one"):
    roomy.adapters.load("more", folders["two"], "lora_path")
  roomy.adapters.unload("two")
  with pytest.raises(UnknownAdapterError, match="'two' is not loaded"):
    roomy.adapters.unload("two")
  assert len(roomy.adapters._free) == 1


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_loras": 0}, "max_loras=0: it must be from 1"),
    ({"max_lora_rank": 10**6}, "max_lora_rank=1000000: it must be from 1"),
    ({"max_loras": 1, "folders": {"a": "x", "b": "y"}}, "max_loras=1 is too small for 2 adapters"),
  ],
)
def test_limits(options, message):
  with pytest.raises(ConfigError, match=message):
    AdapterOptions(**options)


def test_folders_of_the_start_are_named_by_their_flag(tmp_path):
  with pytest.raises(ConfigError, match=rf"--lora one={tmp_path} has no adapter_config\.json: give the folder"):
    AdapterManager(tiny(), AdapterOptions({"one": str(tmp_path)}))


def test_a_model_with_adapters_of_its_own_is_no_base(folders):
  with pytest.raises(ConfigError, match=r"the model has adapters of its own \(lora_rank=2\): serve its base"):
    AdapterManager(tiny(lora_rank=2), AdapterOptions(folders))


def test_parameters_are_swapped_below_adapters(folders, expected, tmp_path):
  llm = LLM.of(random_model(tmp_path, adapter_options=AdapterOptions(folders)))
  model = llm.engine.model
  assert not any(map(is_adapter, model.params))
  other = {path: array * 1.5 if path.endswith("query/weight") else array for path, array in llm.engine._weights.items()}
  first = llm.generate(PROMPT, GREEDY, adapter="one")
  llm.update_params(other, 1)
  changed = llm.generate(PROMPT, GREEDY, adapter="one")
  assert changed[0].token_ids != first[0].token_ids
  llm.engine.update_params(merge(llm.config, model, other, folders["one"]), 2)
  again = llm.generate(PROMPT, GREEDY)
  assert changed[0].token_ids == again[0].token_ids, "the adapter is on the new base"
