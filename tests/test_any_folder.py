"""Any Hugging Face folder of a supported family answers as transformers does, with sizes that no named model has.

Sizes, RoPE, norms, tokenizer and generation settings are those of the folder's own files.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxtext import LLM, ConfigError, SamplingParams
from maxtext.data.tokenizers import train_tokenizer
from maxtext.inference.sampling import MAX_STOP_TOKENS
from maxtext.weights.generation_config import end_token_ids
from maxtext.weights.resolve import resolve_source
from tests.cases import cases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

ABOUT = {
  name: case["reference"]
  for name, case in json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text()).items()
  if "model" in case["reference"]  # the others are not in transformers
}
SIZES = {"vocab_size": 261, "hidden_size": 56, "n_embd": 56, "intermediate_size": 72, "n_inner": 72}
TOKEN_IDS = {f"{medium}_token_id": 259 for medium in ("image", "audio", "video")}
PROMPT = "The owl sees 7 mice"
NEW_TOKENS = 10
RUN = {"dtype": "float32", "max_target_length": 48, "max_prefill_predict_length": 32, "per_device_batch_size": 1}
QUICK = ("llama",)
GATE = (*QUICK, "gpt2_as_gpt3", "deepseek3")


def odd(arguments):
  """The arguments of a tiny reference with other sizes; those of towers stay, but for what they hand to the text."""
  changed = {name: SIZES.get(name, TOKEN_IDS.get(name, value)) for name, value in arguments.items()}
  if "text_config" in changed:
    changed["text_config"] = odd(changed["text_config"])
    changed["vision_config"] = changed["vision_config"] | {"out_hidden_size": SIZES["hidden_size"]}
    changed["audio_config"] = changed["audio_config"] | {"output_dim": SIZES["hidden_size"]}
  return changed


def write_folder(case, folder, **settings):
  """A folder with random weights, a tokenizer of bytes, and generation settings; and its transformers model."""
  about = ABOUT[case]
  config = getattr(transformers, about["config"])(**odd(about["arguments"]), attn_implementation="eager")
  torch.manual_seed(about.get("seed", 0))
  model = getattr(transformers, about["model"])(config).float().eval()
  with torch.no_grad():
    for value in model.parameters():
      value.copy_(torch.randn_like(value) * 0.1 + (value if value.ndim < 2 else 0.0))
  model.save_pretrained(folder)
  train_tokenizer([], 258, 0, folder)
  (folder / "generation_config.json").write_text(json.dumps(settings))
  return model


def greedy(model, prompt, ends=None):
  """What transformers generates after a prompt."""
  settings = transformers.GenerationConfig(
    do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=ends, pad_token_id=0, bos_token_id=None
  )
  with torch.no_grad():
    return model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", cases(ABOUT, QUICK, GATE))
def test_answers_like_transformers(case, tmp_path):
  model = write_folder(case, tmp_path)
  prompt = transformers.AutoTokenizer.from_pretrained(tmp_path)(PROMPT).input_ids
  free = greedy(model, prompt)
  end = next(token for token in free[4:] if token < 258)
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, end]}))
  llm = LLM(tmp_path, **RUN)
  (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
  assert list(output.prompt_token_ids) == prompt
  assert list(output.token_ids) == free[: free.index(end) + 1]
  assert output.finish_reason == "stop"
  (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0))
  assert list(output.token_ids) == free
  sequence = [*prompt, *free]
  with torch.no_grad():
    expected = torch.log_softmax(model(torch.tensor([sequence])).logits[0, :-1], -1)
  expected = expected[range(len(sequence) - 1), sequence[1:]].numpy()
  np.testing.assert_allclose(llm.score(sequence), expected, atol=1e-4)
  np.testing.assert_allclose(output.logprobs, expected[len(prompt) - 1 :], atol=1e-4)


def test_one_command(tmp_path):
  """The folder is all that `maxtext decode` is told of its model."""
  model = write_folder("llama", tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  expected = greedy(model, tokenizer(PROMPT).input_ids, ends=257)
  words = [f"{key}={value}" for key, value in RUN.items()]
  command = [sys.executable, "-m", "maxtext", "decode", str(tmp_path), f"prompt={PROMPT}", "--max-tokens", "10", *words]
  done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.rstrip("\n") == PROMPT + tokenizer.decode(expected, skip_special_tokens=True).rstrip("\n")


def folder_of(tmp_path, **changes):
  """A folder without weights: what is read before them."""
  about = ABOUT["llama"]["arguments"] | SIZES | {"model_type": "llama", "hidden_act": "silu"}
  (tmp_path / "config.json").write_text(json.dumps(about | changes))
  train_tokenizer([], 258, 0, tmp_path)
  return tmp_path


def test_generation_settings_are_defaults(tmp_path):
  folder = folder_of(tmp_path)
  settings = tmp_path / "generation_config.json"
  settings.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9}))
  found = resolve_source(str(folder), {}).config
  assert SamplingParams.of(found) == SamplingParams(temperature=0.6, top_p=0.9, top_k=50)
  found = resolve_source(str(folder), {"decode_sampling_strategy": "greedy"}).config
  assert SamplingParams.of(found).temperature == 0, "what the user says wins"
  settings.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
  assert SamplingParams.of(resolve_source(str(folder), {}).config).temperature == 0
  for wrong in (
    {"temperature": "hot"},
    {"temperature": 0},
    {"top_p": 2},
    {"top_k": -1},
    {"top_p": True},
    {"top_k": 1e999},
  ):
    settings.write_text(json.dumps({"do_sample": True, **wrong}))
    with pytest.raises(ConfigError, match="generation_config.json has .*" + next(iter(wrong))):
      resolve_source(str(folder), {})


def test_end_tokens_of_a_folder(tmp_path):
  folder, settings = folder_of(tmp_path, eos_token_id=7), tmp_path / "generation_config.json"
  assert end_token_ids(str(folder)) == (7,)
  settings.write_text(json.dumps({"eos_token_id": [3, 5]}))
  assert end_token_ids(str(folder)) == (3, 5)
  settings.write_text(json.dumps({"eos_token_id": ["</s>"]}))
  with pytest.raises(ConfigError, match="eos_token_id="):
    end_token_ids(str(folder))
  settings.write_text(json.dumps({"eos_token_id": list(range(20))}))
  assert len(end_token_ids(str(folder))) + 3 == MAX_STOP_TOKENS, "three are the tokenizer's"
  assert end_token_ids("") == () == end_token_ids(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
  ("settings", "processor", "begins"),
  [
    ({}, None, False),
    ({}, {"type": "ByteLevel"}, False),
    ({}, {"type": "Sequence", "processors": None}, False),
    ({}, {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}]}, True),
    ({}, {"type": "Sequence", "processors": [{"single": [{"SpecialToken": {"id": "<|begin|>"}}]}]}, True),
    ({}, {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}, False),
    ({"add_bos_token": True}, None, True),
    ({"add_bos_token": False}, {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a"}}]}, False),
  ],
)
def test_documents_begin_as_the_tokenizer_says(tmp_path, settings, processor, begins):
  folder = folder_of(tmp_path)
  for name, entries in (("tokenizer_config.json", settings), ("tokenizer.json", {"post_processor": processor})):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
  assert resolve_source(str(folder), {}).config.add_bos is begins
  assert resolve_source(str(folder), {"add_bos": not begins}).config.add_bos is not begins


def test_a_folder_that_is_not_supported_says_why_and_what_is(tmp_path):
  with pytest.raises(ConfigError, match=r"model_type=mamba, and this version reads .*gpt2, .*llama, "):
    resolve_source(str(folder_of(tmp_path, model_type="mamba")), {})
  with pytest.raises(ConfigError, match="activation tanh, and this version reads"):
    resolve_source(str(folder_of(tmp_path, hidden_act="tanh")), {})
  rope = {"rope_type": "longrope", "rope_theta": 10000.0}
  with pytest.raises(ConfigError, match="rope_type=longrope, and this version reads"):
    resolve_source(str(folder_of(tmp_path, rope_parameters=rope)), {})


@pytest.mark.parametrize("content", ['{"model_type": "lla', "[1]", '"llama"', "{}"])
def test_a_broken_config_is_named(tmp_path, content):
  (tmp_path / "config.json").write_text(content)
  with pytest.raises(ConfigError, match=r"config\.json"):
    LLM(tmp_path)
