"""Prompts with images of any size, sound and video give the tokens of the reference's `generate`."""

import asyncio
import base64
import io
import json
import resource
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext import ConfigError
from maxtext.inference.multimodal import PromptEncoder
from maxtext.models.media import tower_inputs
from maxtext.models.spec import towers_of
from maxtext.serving.fetch import FetchLimits
from maxtext.serving.limits import ServerLimits
from tests.inference_support import answering, ask
from tests.test_media_video import encoded, film
from tests.test_multimodal_inference import GREEDY, KEYS, are_same, asked, make_folder, picture
from tests.test_multimodal_parity import GEMMA4, QWEN3_5, QWEN3_OMNI

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

LENGTHS = {"max_target_length": 544, "max_prefill_predict_length": 512}


def grids(processed):
  """Frames, rows and columns of patches of each medium."""
  return torch.tensor([[len(one.inputs), *(one.grid[..., 1:].max((0, 1)) + 1)] for one in processed])


def patches(processed):
  return torch.from_numpy(np.concatenate([one.inputs.reshape(-1, one.inputs.shape[-1]) for one in processed]))


class Qwen:
  keys: ClassVar = LENGTHS
  marks: ClassVar = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
  }  # fmt: skip
  ids: ClassVar = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
  }  # fmt: skip
  special = (*ids.values(), "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")

  @staticmethod
  def inputs(media, tokens, config):
    found = {}
    if images := media.get("image"):
      found |= {"pixel_values": patches(images), "image_grid_thw": grids(images)}
    if videos := media.get("video"):
      found |= {"pixel_values_videos": patches(videos), "video_grid_thw": grids(videos)}
    return found


class Qwen35(Qwen):
  config, model, arguments = QWEN3_5["config"], QWEN3_5["model"], QWEN3_5["arguments"]

  @staticmethod
  def inputs(media, tokens, config):
    types = (tokens == config.image_token_id) * 1 + (tokens == config.video_token_id) * 2
    return Qwen.inputs(media, tokens, config) | {"mm_token_type_ids": types}


class Omni(Qwen):
  config, model = QWEN3_OMNI["config"], QWEN3_OMNI["model"]
  arguments: ClassVar = QWEN3_OMNI["arguments"] | {"position_id_per_seconds": 13}
  ids: ClassVar = Qwen.ids | {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>"}
  keys: ClassVar = LENGTHS | {"use_audio": True}

  @staticmethod
  def inputs(media, tokens, config):
    found = Qwen.inputs(media, tokens, config)
    if videos := media.get("video"):
      found["video_second_per_grid"] = torch.ones(len(videos))
    sounds = [*media.get("audio", ()), *(one.sound for one in media.get("video", ()) if one.sound)]
    if sounds:
      mels = [one.inputs.reshape(-1, one.inputs.shape[-1])[one.grid[..., 0].reshape(-1) >= 0] for one in sounds]
      longest = max(map(len, mels))
      padded = np.stack([np.pad(mel, ((0, longest - len(mel)), (0, 0))) for mel in mels])
      mask = np.arange(longest) < np.array([len(mel) for mel in mels])[:, None]
      found["input_features"] = torch.from_numpy(padded.swapaxes(1, 2).copy())
      found["feature_attention_mask"] = torch.from_numpy(mask.astype(np.int64))
      found["use_audio_in_video"] = any(one.sound for one in media.get("video", ()))
    return found


class Gemma4:
  config, model = GEMMA4["config"], GEMMA4["model"]
  arguments: ClassVar = GEMMA4["arguments"] | {
    "vision_config": GEMMA4["arguments"]["vision_config"] | {"position_embedding_size": 40}
  }
  marks: ClassVar = {"image": "<|image|>", "video": "<|video|>"}
  ids: ClassVar = {"image_token_id": "<|image|>", "video_token_id": "<|video|>"}
  special = (*ids.values(), "<|image>", "<image|>")
  keys: ClassVar = LENGTHS | {"vision_output_length": 16}

  @staticmethod
  def change(model, ids):
    """To the reference, placeholders that it has generated are padding, so that they must look like it here."""
    table = model.get_input_embeddings().weight
    table[ids] = table[0].clone()

  @staticmethod
  def inputs(media, tokens, config):
    found = {"mm_token_type_ids": (tokens == config.image_token_id) * 1 + (tokens == config.video_token_id) * 2}
    for kind, names in {
      "image": ("pixel_values", "image_position_ids"), "video": ("pixel_values_videos", "video_position_ids"),
    }.items():  # fmt: skip
      slots = [slot for one in media.get(kind, ()) for slot in zip(one.inputs, one.grid[..., 1:], strict=True)]
      if slots:  # in rows, with columns before rows
        most, rows = max(len(values) for values, _ in slots), []
        for values, places in slots:
          order, padding = np.lexsort(places.T[::-1]), ((0, most - len(values)), (0, 0))
          rows.append(
            (np.pad(values[order], padding), np.pad(places[order, ::-1].astype(int), padding, constant_values=-1))
          )
        found |= dict(
          zip(names, (torch.from_numpy(np.stack(arrays)) for arrays in zip(*rows, strict=True)), strict=True)
        )
    if videos := media.get("video"):
      found["num_frames_per_video"] = torch.tensor([len(one.inputs) for one in videos])
    return found


def at_night(name):
  return pytest.param(name, marks=pytest.mark.nightly)


FAMILIES = {"gemma4": Gemma4, "qwen3_5": Qwen35, "qwen3_omni": Omni}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
  return cache(lambda name: make_folder(FAMILIES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def llm_of(folder_of):
  return cache(lambda name: folder_of(name).llm())


def reference_answer(folder, processors, parts, output):
  """Greedy tokens of the reference after the same prompt, and their log-probabilities."""
  from maxtext.media.audio import load_sound
  from maxtext.media.images import load_image
  from maxtext.media.video import load_video

  load, media = {"image": load_image, "audio": load_sound, "video": load_video}, {}
  for part in parts:
    if (kind := part["type"]) != "text":
      media.setdefault(kind, []).append(processors[kind](load[kind](part[kind])))
  tokens = torch.tensor([output.prompt_token_ids])
  inputs = folder.family.inputs(media, tokens, folder.reference.config)
  found = folder.reference.generate(
    input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=len(output.token_ids), do_sample=False,
    eos_token_id=None, output_logits=True, return_dict_in_generate=True, **inputs,
  )  # fmt: skip
  return found.sequences[0, tokens.shape[1] :].tolist(), [float(x[0].log_softmax(-1).max()) for x in found.logits]


def check(folder, llm, conversations, **changes):
  """Compares answers with those of the reference, where prompts are made with other values of some keys."""
  config = llm.config.model_copy(update=changes)
  prompts = PromptEncoder.of(config, llm.tokenizer, llm.engine.max_prompt_len)
  outputs = llm._generate([prompts.chat(one, {}) for one in conversations], GREEDY, None, None)
  for (message,), output in zip(conversations, outputs, strict=True):
    tokens, logprobs = reference_answer(folder, prompts.processors, message["content"], output)
    assert list(output.token_ids) == tokens
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
  return outputs


def turn(*parts):
  """A user's message of texts and (kind, source)."""
  pairs = [("text", part) if isinstance(part, str) else part for part in parts]
  content = [{"type": kind, kind: value} for kind, value in pairs]
  return [{"role": "user", "content": content}]


def image(seed, size):
  return "image", picture(seed, size)


IMAGES = [
  turn(image(0, (20, 30)), "what is it?"),
  turn("see", image(1, (9, 55)), " and ", image(2, (40, 24)), "which is larger?"),
]


@pytest.mark.parametrize("name", [at_night("qwen3_5"), "gemma4", "qwen3_omni"])
def test_answers_about_images_of_any_size_are_the_references(folder_of, llm_of, name):
  """One, and two within text."""
  llm = llm_of(name)
  outputs = check(folder_of(name), llm, IMAGES)
  assert not are_same(outputs[:1], llm.chat(turn(image(3, (20, 30)), "what is it?"), GREEDY))


@pytest.mark.parametrize("name", [at_night("qwen3_5"), at_night("gemma4"), "qwen3_omni"])
def test_chunks_and_prefix_caching_change_nothing(folder_of, llm_of, name):
  """Chunks cut images whose tokens do not see each other both ways, and the second round continues behind them."""
  wanted = llm_of(name).chat(IMAGES, GREEDY)
  chunked = folder_of(name).llm(use_chunked_prefill=True, prefill_chunk_size=32, enable_prefix_caching=True)
  for _ in range(2):
    assert are_same(chunked.chat(IMAGES, GREEDY), wanted)


def tone(seconds, hertz=440.0):
  """A file of a tone that rises."""
  times = np.arange(int(16_000 * seconds)) / 16_000
  file = io.BytesIO()
  soundfile.write(file, 0.3 * np.sin(2 * np.pi * hertz * times * (1 + times)), 16_000, format="WAV")
  return file.getvalue()


SOUNDS = [
  turn(("audio", tone(2.3)), "what is said?"),
  turn("hear", ("audio", tone(1.4)), image(0, (20, 30)), ("audio", tone(1.0, 200.0)), "and see: which is louder?"),
  turn(("audio", tone(0.4)), "a word?"),  # alone, since the reference pads short ones to the length of others
]


def test_answers_about_sounds_are_the_references(folder_of, llm_of):
  """Chunks with and without padding; several, with an image between them; and less than a chunk."""
  llm = llm_of("qwen3_omni")
  check(folder_of("qwen3_omni"), llm, SOUNDS)
  with pytest.raises(ConfigError, match="video 0: The file is no video"):
    llm.chat(turn(("video", tone(0.5)), "what happens?"))
  with pytest.raises(ConfigError, match="audio 1: A int is no file"):
    llm.chat(turn(("audio", tone(0.5)), ("audio", 0), "what is said?"))


FILM = encoded(film(4, 16, 24), 2)
SPOKEN = np.random.default_rng(0).integers(-9000, 9000, (96_000, 2)).astype(np.int16)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_about_videos_are_the_references(folder_of, llm_of, name):
  """Alone, and beside an image."""
  conversations = [turn(("video", FILM), "what happens?"), turn(image(0, (8, 9)), "see", ("video", FILM), "the same?")]
  check(folder_of(name), llm_of(name), conversations)


def test_answers_about_videos_with_sound_are_the_references(folder_of, llm_of):
  """The sound is between the frames; a silent film is as without."""
  folder, llm = folder_of("qwen3_omni"), llm_of("qwen3_omni")
  spoken = encoded(film(4, 16, 24), 2, sound=SPOKEN)
  conversation = turn(("audio", tone(1.2)), "before", ("video", spoken), "what is said, and by whom?")
  (output,) = check(folder, llm, [conversation], use_audio_in_video=True)
  silent, (unheard,) = (turn(("video", FILM), "and now?"), llm.chat(conversation, GREEDY))
  assert len(unheard.prompt_token_ids) < len(output.prompt_token_ids)
  config = llm.config.model_copy(update={"use_audio_in_video": True})
  hearing = PromptEncoder.of(config, llm.tokenizer, llm.engine.max_prompt_len)
  assert hearing.chat(silent, {})[0] == llm._model.prompts.chat(silent, {})[0]


def odd_images():
  """Of modes and sizes that go wrong elsewhere."""
  from PIL import Image

  for mode in ("L", "LA", "1", "P", "RGBA", "I;16"):
    yield picture(4, (13, 21)).convert("L" if mode == "I;16" else mode).convert(mode)
  for size in ((1, 1), (1, 150), (190, 1), (7, 500)):
    yield picture(5, size)
  turned, file = Image.Exif(), io.BytesIO()
  turned[0x0112] = 6
  picture(6, (10, 50)).save(file, "JPEG", exif=turned)
  yield file.getvalue()


PARTS = st.one_of(
  st.sampled_from([("image", one) for one in odd_images()]),
  st.sampled_from([0.011, 0.3, 0.999, 1.0, 1.011]).map(lambda seconds: ("audio", tone(seconds))),
  st.sampled_from(["a", "<|image_pad|>", "<|audio_pad|> <|vision_start|>", "\n"]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(PARTS, min_size=1, max_size=6))
def test_placeholders_are_as_many_as_features(llm_of, parts):
  """In any conversation, with the names of tokens in its text; and towers make as many."""
  llm = llm_of("qwen3_omni")
  tokens, media = llm._model.prompts.chat(turn(*parts, "?"), {})
  assert (media is None) == all(isinstance(part, str) for part in parts)
  if media is None:
    return
  features = sum(one.features for _, one in media.media)
  towers = {tower.name: tower for tower in towers_of(llm.engine.model.spec)}
  assert sorted(media.indices[media.indices >= 0]) == list(range(features))
  assert ((media.keys < 0) == (media.indices >= 0)).all()
  assert len(tokens) == len(media.keys) == len(media.rotary_positions)
  for name, one in media.media:
    assert sum(int(real.sum()) for _, real in tower_inputs(towers[name], one)) == one.features
  assert (np.diff(media.rotary_positions[media.indices < 0].max(1)) > 0).all()


@pytest.mark.nightly
def test_decode_with_paths(folder_of, tmp_path, capsys):
  from maxtext.cli.main import main

  files = {"audio_path": ("a.wav", tone(0.5)), "video_path": ("b.mkv", FILM)}
  keys = KEYS | Omni.keys | {"prompt": "what is it?", "image_path": str(tmp_path / "c.png")}
  picture(0).save(tmp_path / "c.png")
  for key, (name, data) in files.items():
    (tmp_path / name).write_bytes(data)
    keys[key] = str(tmp_path / name)
  written = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()]
  assert main(["decode", str(folder_of("qwen3_omni").root), *written]) in (0, None)
  shown = capsys.readouterr().out
  assert shown.startswith("what is it?")
  assert len(shown.strip()) > len("what is it?")


def heard(data, form="wav"):
  part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}
  body = asked()
  body["messages"][0]["content"].insert(0, part)
  return body


def bomb():
  """An hour of silence in few bytes."""
  file = io.BytesIO()
  soundfile.write(file, np.zeros(3600 * 8_000, np.int16), 8_000, format="FLAC")
  return file.getvalue()


def test_the_server_answers_about_sounds_and_refuses_hostile_ones(llm_of):
  """Memory stays as it was: what is too long is not decoded further."""
  llm = llm_of("qwen3_omni")

  async def all_of_them():
    with answering(llm._model) as (_, app):
      status, body = await ask(app, "/v1/chat/completions", heard(tone(1.2)))
      assert status == 200, body
      answer, (wanted,) = json.loads(body), llm.chat(turn(("audio", tone(1.2)), "what is it?"), GREEDY)
      assert answer["choices"][0]["message"]["content"] == wanted.text
      assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": 0, "audio_tokens": 16}
      silence, before = bomb(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
      hostile = [
        (silence, "longer than the limit"), (silence[: len(silence) // 2], "audio 0"), (b"RIFF" * 20, "audio 0"),
        (b"", "audio 0"), (tone(0.005), "160 at least"), (FILM, "audio 0"),
      ]  # fmt: skip
      for data, said in hostile:
        status, body = await ask(app, "/v1/chat/completions", heard(data))
        assert (status, said in body) == (400, True), (data[:20], body)
      for wrong in (heard(b"", "ogg"), heard(b"") | {"messages": [{"role": "user", "content": [{"type": "video"}]}]}):
        assert (await ask(app, "/v1/chat/completions", wrong))[0] == 400
      assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10
      assert (await ask(app, "/v1/chat/completions", heard(tone(1.2))))[0] == 200

  asyncio.run(all_of_them())


def test_media_beyond_what_a_server_holds_are_too_many(llm_of, monkeypatch):
  llm = llm_of("qwen3_omni")
  monkeypatch.setattr("maxtext.serving.server._MOST_MEDIA_BYTES", 1000)

  async def one():
    with answering(llm._model) as (_, app):
      return await ask(app, "/v1/chat/completions", heard(tone(1.2))), await ask(app, "/v1/chat/completions", asked())

  (status, body), (text, _) = asyncio.run(one())
  assert (status, "queue of media is full" in body, text) == (429, True, 200)


def shown(url, kind="video_url"):
  body = asked()
  body["messages"][0]["content"].insert(0, {"type": kind, kind: {"url": url}})
  return body


def in_data_url(data, kind="video/x-matroska"):
  return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_the_server_answers_about_videos_and_refuses_hostile_ones(llm_of, monkeypatch):
  """Also where they are fetched, with sound between their frames."""
  llm = llm_of("qwen3_omni")
  monkeypatch.setattr("maxtext.serving.server._MOST_VIDEO_PIXELS", 100_000)
  page, sent = encoded(film(4, 32, 32), 2, sound=np.zeros((4, 2), np.int16)), []

  async def answer(reader, writer):
    sent.append(await reader.readuntil(b"\r\n\r\n"))
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + page)
    writer.close()

  async def all_of_them():
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
      host = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
      limits = ServerLimits(max_queued_requests=8, fetch=FetchLimits((host,)))
      with answering(llm._model, limits) as (_, app):
        found = [await ask(app, "/v1/chat/completions", shown(url)) for url in (in_data_url(page), f"http://{host}/a")]
        (wanted,) = llm.chat(turn(("video", page), "what is it?"), GREEDY)
        for status, body in found:
          assert status == 200, body
          assert json.loads(body)["choices"][0]["message"]["content"] == wanted.text
          assert json.loads(body)["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hostile = [
          (in_data_url(page[: len(page) // 8]), "video 0"), (in_data_url(b"#EXTM3U\n/etc/passwd"), "no video"),
          (in_data_url(tone(0.5)), "video 0"), (in_data_url(b""), "video 0"), ("data:,x", "base64"),
          (in_data_url(encoded(np.zeros((200, 32, 32, 3), np.uint8), 100)), "204,800 pixels"),
          ("http://169.254.169.254/", "not allowed"), ("/etc/passwd", "http or https"), (f"http://{host[:-1]}/", "not"),
        ]  # fmt: skip
        for url, said in hostile:
          status, body = await ask(app, "/v1/chat/completions", shown(url))
          assert (status, said in body) == (400, True), (url[:60], body)
          status, body = await ask(app, "/tokenize", {"messages": shown(url)["messages"]})
          assert (status, said in body) == (400, True), (url[:60], body)
        status, body = await ask(app, "/tokenize", {"messages": shown(in_data_url(page))["messages"]})
        assert (status, json.loads(body)["tokens"]) == (200, list(wanted.prompt_token_ids))
        assert (await ask(app, "/v1/chat/completions", shown(f"http://{host}/b", "image_url")))[0] == 400
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
        assert len(sent) == 2

  asyncio.run(all_of_them())
