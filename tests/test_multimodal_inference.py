"""Prompts with images give the tokens of the reference, whole or in chunks, alone or beside others."""

import asyncio
import base64
import io
import json
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from maxtext import LLM, ConfigError, SamplingParams
from maxtext.configs import load_config
from maxtext.inference.multimodal import PromptEncoder
from maxtext.models.build import model_spec
from tests.inference_support import answering, ask
from tests.test_parity import randomize

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
  "{% if message.content is string %}{{ message.content }}"
  "{% else %}{% for part in message.content %}{% if part.type in marks %}{{ marks[part.type] }}"
  "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
KEYS = {
  "use_multimodal": True, "max_target_length": 128, "max_prefill_predict_length": 112, "per_device_batch_size": 2,
  "dtype": "float32", "attention": "dot_product", "jax_cache_dir": "", "use_chat_template": True,
}  # fmt: skip
TEXT = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}


class Gemma3:
  config, model = "Gemma3Config", "Gemma3ForConditionalGeneration"
  marks: ClassVar = {"image": "<start_of_image>"}
  ids: ClassVar = {"image_token_index": "<image_soft_token>"}
  special = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
  keys: ClassVar = {}
  arguments: ClassVar = {
    "text_config": {
      **TEXT, "intermediate_size": 80, "num_hidden_layers": 6, "query_pre_attn_scalar": 16, "sliding_window": 16,
    },
    "vision_config": {**VISION, "intermediate_size": 40, "vision_use_head": False},
    "mm_tokens_per_image": 4,
  }  # fmt: skip

  @staticmethod
  def media_arguments(tokens, image):
    return {"token_type_ids": (tokens == image).long()}


class Llama4:
  config, model = "Llama4Config", "Llama4ForConditionalGeneration"
  marks: ClassVar = {"image": "<|image|>"}
  ids: ClassVar = {"image_token_index": "<|patch|>"}
  keys: ClassVar = {}
  special = (
    "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
  )  # fmt: skip
  arguments: ClassVar = {
    "text_config": {
      **TEXT, "intermediate_size": 80, "intermediate_size_mlp": 80, "num_hidden_layers": 4, "num_local_experts": 4,
      "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "floor_scale": 64,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "vision_config": {
      **VISION, "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24,
      "vision_output_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
  }  # fmt: skip

  @staticmethod
  def media_arguments(tokens, image):
    return {}


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


def make_folder(family, root):
  """A tiny model with images, as published ones are: weights, config.json, tokenizer, chat template."""
  import transformers
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
  bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  turns = ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>")
  bpe.add_special_tokens([AddedToken(name, special=True) for name in (*turns, *family.special)])
  bpe.save(str(root / "tokenizer.json"))
  template = f"{{% set marks = {family.marks!r} %}}{TEMPLATE}"
  about = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
  (root / "tokenizer_config.json").write_text(json.dumps(about))
  ids, vocab = {name: bpe.token_to_id(token) for name, token in family.ids.items()}, bpe.get_vocab_size()
  arguments = family.arguments | {"text_config": family.arguments["text_config"] | {"vocab_size": vocab}} | ids
  config = getattr(transformers, family.config)(**arguments, attn_implementation="eager")
  torch.manual_seed(0)
  model = getattr(transformers, family.model)(config).float().eval()
  with torch.no_grad():
    for value in model.parameters():
      randomize(value)
    if hasattr(family, "change"):
      family.change(model, list(ids.values()))
  model.save_pretrained(root)
  return Folder(root, family, model, next(iter(ids.values())))


class Folder(NamedTuple):
  root: Path
  family: type
  reference: object
  image: int  # the token of a feature

  def llm(self, **changes):
    return LLM(self.root, **(KEYS | self.family.keys | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_folder(Gemma3, tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory):
  return make_folder(Llama4, tmp_path_factory.mktemp("llama4"))


def picture(seed, size=(20, 12)):
  from PIL import Image

  return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def as_url(image):
  file = io.BytesIO()
  image.save(file, "PNG")
  return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def question(*images, text="what is it?"):
  parts = [{"type": "image", "image": image} for image in images]
  return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def reference_tokens(folder, llm, images, prompt, count):
  """Greedy tokens of the reference for the tokens of a prompt, and their log-probabilities."""
  from maxtext.models.build import media_processors

  processor = media_processors(llm.config)["image"]
  patches = np.concatenate([processor(image).inputs for image in images])
  pixels = patches.reshape(-1, 4, 4, 3, 4, 4).transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 16, 16)
  tokens, logprobs = list(prompt), []
  for _ in range(count):
    ids = torch.tensor([tokens])
    with torch.no_grad():
      logits = folder.reference(
        input_ids=ids, pixel_values=torch.from_numpy(pixels), attention_mask=torch.ones_like(ids),
        **folder.family.media_arguments(ids, folder.image),
      ).logits  # fmt: skip
    tokens.append(int(logits[0, -1].argmax()))
    logprobs.append(float(logits[0, -1].log_softmax(-1).max()))
  return tokens[len(prompt) :], logprobs


def are_same(outputs, others):
  """Whether tokens and log-probabilities are."""
  return all(
    a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, atol=1e-4)
    for a, b in zip(outputs, others, strict=True)
  )


@pytest.fixture(scope="module")
def llm(folder):
  return folder.llm()


def test_answers_about_images_are_the_references(folder, llm):
  one, two = picture(0), picture(1, (3, 31))
  conversations = [question(one), question(one, two, text="which?"), question(text="and without?")]
  outputs = llm.chat(conversations, GREEDY)
  for images, output in zip([[one], [one, two]], outputs[:2], strict=True):
    assert output.prompt_token_ids.count(folder.image) == 4 * len(images)
    tokens, logprobs = reference_tokens(folder, llm, images, output.prompt_token_ids, len(output.token_ids))
    assert list(output.token_ids) == tokens
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
  assert folder.image not in outputs[2].prompt_token_ids
  assert not are_same(outputs[:1], llm.chat(question(two), GREEDY))


def test_answers_about_tiles_are_the_references(tiled):
  """Llama 4: an image of one tile, and one of three beside the whole."""
  llm, one, wide = tiled.llm(), picture(0, (16, 16)), picture(1, (16, 48))
  outputs = llm.chat([question(one), question(wide, one, text="which?")], GREEDY)
  for images, tiles, output in zip([[one], [wide, one]], [1, 5], outputs, strict=True):
    assert output.prompt_token_ids.count(tiled.image) == 4 * tiles
    tokens, logprobs = reference_tokens(tiled, llm, images, output.prompt_token_ids, len(output.token_ids))
    assert list(output.token_ids) == tokens
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)


def test_a_path_bytes_and_a_data_url_are_the_same_image(llm, tmp_path):
  image = picture(2)
  image.save(tmp_path / "a.png")
  by_url = [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": as_url(image)}}, {"type": "text", "text": "what is it?"},
  ]}]  # fmt: skip
  sources = [question(image), question(str(tmp_path / "a.png")), question((tmp_path / "a.png").read_bytes()), by_url]
  first, *others = (llm.chat(source, GREEDY) for source in sources)
  assert all(are_same(first, other) for other in others)


def test_chunks_and_prefix_caching_change_nothing(folder, llm):
  """Chunks of 16 tokens would cut the second image; prefixes are told apart by what is in an image."""
  one, two = picture(0), picture(1)
  text = "is it larger than a chunk?"
  conversations = [question(one, text=text), question(one, two, text="which?"), question(two, text=text)]
  wanted = llm.chat(conversations, GREEDY)
  assert not are_same(wanted[:1], wanted[2:])
  changes = {"use_chunked_prefill": True, "prefill_chunk_size": 16, "enable_prefix_caching": True}
  chunked = folder.llm(**changes)
  for _ in range(2):
    assert are_same(chunked.chat(conversations, GREEDY), wanted)


@pytest.mark.parametrize(
  ("messages", "said"),
  [
    (question(b"no image"), "image 0"),
    (
      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}]}],
      "base64",
    ),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/nowhere.png"}}]}], "image 0"),
    ([{"role": "user", "content": [{"type": "image", "image": None}]}], "image 0"),
    ([{"role": "user", "content": [{"type": "video", "video": "a"}]}], "video parts need"),
  ],
)
def test_what_is_no_image_is_named(llm, messages, said):
  with pytest.raises(ConfigError, match=said):
    llm.chat(messages, GREEDY)


def test_the_names_of_image_tokens_in_text_are_text(folder, llm):
  """They cannot stand for an image that is not there."""
  (output,) = llm.chat(question(text="<start_of_image><image_soft_token>"), GREEDY)
  assert folder.image not in output.prompt_token_ids
  (output,) = llm.chat(question(picture(0), text="<start_of_image><image_soft_token>"), GREEDY)
  assert output.prompt_token_ids.count(folder.image) == 4


def test_decode_with_an_image_path(folder, tmp_path, capsys):
  from maxtext.cli.main import main

  picture(0).save(tmp_path / "a.png")
  keys = [f"{name}={json.dumps(value) if isinstance(value, bool) else value}" for name, value in KEYS.items()]
  command = ["decode", str(folder.root), "prompt=what is it?", f"image_path={tmp_path / 'a.png'}", *keys]
  assert main(command) in (0, None)
  shown = capsys.readouterr().out
  assert shown.startswith("what is it?")
  assert len(shown.strip()) > len("what is it?")


def test_a_model_of_text_names_the_key(folder):
  llm = folder.llm(use_multimodal=False)
  with pytest.raises(ConfigError, match="use_multimodal=true"):
    llm.chat(question(picture(0)), GREEDY)


def test_a_missing_package_is_told_before_the_first_request(llm, monkeypatch):
  monkeypatch.setitem(sys.modules, "PIL.Image", None)
  with pytest.raises(ConfigError, match=r"pip install 'maxtext\[multimodal\]'"):
    PromptEncoder.of(llm.config, llm.tokenizer, 100)


def test_parts_of_text_are_joined_by_lines(llm):
  parts = [{"type": "text", "text": text} for text in ("what", "is it?")]
  both = [llm.chat([{"role": "user", "content": one}], GREEDY)[0] for one in (parts, "what\nis it?")]
  assert both[0].prompt_token_ids == both[1].prompt_token_ids


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("num_channels_for_vit", 1), ("patch_size_for_vit", 0), ("vision_output_length", 0), ("image_size_for_vit", 0),
    ("mrope_section", [0, 2, 2]), ("n_window_for_audio", -1),
  ],
)  # fmt: skip
def test_sizes_that_no_encoder_has_are_named(key, value):
  keys = {"model_name": "gemma3-4b", "use_multimodal": True, "override_model_config": True, key: value}
  with pytest.raises(ConfigError, match=key):
    model_spec(load_config(**keys))


@pytest.mark.parametrize("name", ["gemma4-26b", "llama4-17b-16e"])
def test_a_size_of_images_that_changes_nothing_is_named(name):
  keys = {"model_name": name, "use_multimodal": True, "image_size_for_vit": 448}
  with pytest.raises(ConfigError, match="image_size_for_vit=448 has no effect"):
    model_spec(load_config(**keys))


def asked(*urls, text="what is it?"):
  parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
  content = [*parts, {"type": "text", "text": text}]
  return {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}


def bomb():
  """A small file of 400 megapixels."""
  from PIL import Image

  file = io.BytesIO()
  Image.new("1", (20000, 20000)).save(file, "PNG")
  return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_the_server_answers_about_images_as_the_engine_does(llm):
  async def all_of_them():
    with answering(llm._model) as (_, app):
      url = as_url(picture(0))
      status, body = await ask(app, "/v1/chat/completions", asked(url))
      assert status == 200, body
      answer, (wanted,) = json.loads(body), llm.chat(question(picture(0)), GREEDY)
      assert answer["choices"][0]["message"]["content"] == wanted.text
      assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
      hostile = {
        "https://example.com/a.png": "only data URLs", "/etc/passwd": "only data URLs",
        "file:///etc/passwd": "only data URLs",
        "data:image/png;base64,AAAA": "image 0", "data:image/png,AAAA": "base64", bomb(): "image 0",
        as_url(picture(0))[:200]: "image 0",
      }  # fmt: skip
      for url, said in hostile.items():
        status, body = await ask(app, "/v1/chat/completions", asked(url))
        assert (status, said in body) == (400, True), (url[:60], body)
      status, body = await ask(app, "/v1/chat/completions", asked(*[as_url(picture(0, (1, 1)))] * 40))
      assert (status, "tokens" in body) == (400, True), body
      reserved = asked(as_url(picture(0))) | {"chat_template_kwargs": {"expand": "x"}}
      assert "cannot be set here" in (await ask(app, "/v1/chat/completions", reserved))[1]
      body = asked("") | {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]}
      assert (await ask(app, "/v1/chat/completions", body))[0] == 400
      status, again = await ask(app, "/v1/chat/completions", asked(as_url(picture(0))))
      assert (status, json.loads(again)["choices"]) == (200, answer["choices"])

  asyncio.run(all_of_them())
