"""Training on media that have any size: rows as the prompts of the server, the loss on any mesh, packed or not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxtext
from examples.vision.shapes import SPECIAL, write_tokenizer
from maxtext import ConfigError, SamplingParams, load_config
from maxtext.cli.main import main
from maxtext.data.conversation_media import media_places
from maxtext.data.dataloader import make_dataloader, make_packing, open_data
from maxtext.data.media import TOWERS
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import data_options
from maxtext.data.sources import open_sources
from maxtext.data.streams import PackedStreams
from maxtext.data.tokenizers import load_tokenizer
from maxtext.inference.multimodal import PromptEncoder
from maxtext.mesh.devices import make_mesh
from maxtext.training.live_engine import LiveEngine
from maxtext.training.program import Program
from tests.test_image_training import picture, write
from tests.test_media_video import encoded, film

soundfile = pytest.importorskip("soundfile")

RUN = {
  "use_sft": True, "use_multimodal": True, "vocab_size": 340, "tokenizer_type": "huggingface", "dtype": "float32",
  "max_target_length": 160, "per_device_batch_size": 2, "grain_worker_count": 0, "grain_worker_count_eval": 0,
  "enable_checkpointing": False, "jax_cache_dir": "", "init_weights_seed": 3, "base_emb_dim": 32, "base_mlp_dim": 48,
  "base_num_query_heads": 2, "base_num_kv_heads": 1, "head_dim": 16, "use_qk_norm": True, "patch_size_for_vit": 4,
  "hidden_size_for_vit": 24, "intermediate_size_for_vit": 32, "num_attention_heads_for_vit": 2,
  "num_position_embeddings_for_vit": 36, "spatial_merge_size_for_vit": 2,
}  # fmt: skip
QWEN = {
  "base_num_decoder_layers": 4, "base_moe_mlp_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "use_mrope": True,
  "out_hidden_size_for_vit": 32, "image_placeholder": "<|image_pad|>", "video_placeholder": "<|video_pad|>",
  "audio_placeholder": "<|audio_pad|>",
}  # fmt: skip
FAMILIES = {
  "qwen3_omni": QWEN | {
    "decoder_block": "qwen3_moe", "mrope_section": [4, 2, 2], "deepstack_visual_indexes_for_vit": [0, 1],
    "num_hidden_layers_for_vit": 3, "position_id_per_seconds": 13, "norm_topk_prob": True, "use_audio": True,
    "d_model_for_audio": 24, "encoder_attention_heads_for_audio": 2, "encoder_ffn_dim_for_audio": 32,
    "encoder_layers_for_audio": 1, "num_mel_bins_for_audio": 16, "downsample_hidden_size_for_audio": 8,
    "output_dim_for_audio": 32, "n_window_infer_for_audio": 200, "max_sample_len_for_audio": 400,
  },
  "qwen3_5": QWEN | {
    "decoder_block": "qwen3_5", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "shared_experts": 1,
    "gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 8, "gdn_value_head_dim": 8,
    "gdn_conv_kernel_dim": 4, "inhomogeneous_layer_cycle_interval": 4, "num_hidden_layers_for_vit": 1,
  },
  "gemma4": {
    "decoder_block": "gemma4", "base_num_decoder_layers": 6, "logits_via_embedding": True, "vision_output_length": 12,
    "v_norm_with_scale": False, "share_kv_projections": True, "sliding_window_size": 64, "global_head_dim": 32,
    "global_num_kv_heads": 1, "num_hidden_layers_for_vit": 1, "use_post_attn_norm": True, "use_post_ffw_norm": True,
  },
}  # fmt: skip
MARKS = {
  "image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>",
  "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}  # fmt: skip
TOKENS = (
  "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|audio_start|>",
  "<|audio_end|>", "<|image|>", "<|video|>", "<|image>", "<image|>",
)  # fmt: skip
TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}"
  "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
  "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
  "{{ marks[part.type] if part.type in marks else part.text }}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SIZES = [(20, 30), (9, 55), (40, 24), (8, 9), (24, 24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer, pictures of several sizes, films and sounds."""
  path = tmp_path_factory.mktemp("media")
  write_tokenizer(path / "tokenizer", (*SPECIAL, *TOKENS))
  for number, size in enumerate(SIZES):
    picture(number, size).save(path / f"{number}.png")
  for number, frames in enumerate((4, 6)):
    (path / f"{number}.mkv").write_bytes(encoded(film(frames, 16, 24), 2))
  for number, seconds in enumerate((1.0, 2.35, 1.4)):
    times = np.arange(int(16_000 * seconds)) / 16_000
    soundfile.write(path / f"{number}.wav", 0.3 * np.sin(2 * np.pi * (300 + 90 * number) * times * (1 + times)), 16_000)
  return path


ENDINGS = {"image": "png", "video": "mkv", "audio": "wav"}


def turn(*parts, answer="red"):
  """A question of texts and (kind, number), and its answer."""
  content = [
    {"type": "text", "text": part}
    if isinstance(part, str)
    else {"type": part[0], part[0]: f"{part[1]}.{ENDINGS[part[0]]}"}
    for part in parts
  ]
  return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def image(number):
  return "image", number


IMAGES = [
  [*turn(image(0), "which shape?"), *turn("how many?", answer="two")],
  turn("one two", image(1), " or ", image(2), "which colour?", answer="green"),
  turn("which?"),
  [*turn(image(3), image(0), "which?", answer="two blue"), *turn("see", image(4), "how many?")],
  turn(image(4), "how many?", answer="one two"),
]
FILMS = [
  [*turn(("video", 0), "how many?"), *turn("which?", image(3), answer="two")],
  turn("see", ("video", 1), image(0), "which?", answer="green"),
  turn("which colour?"),
]
SOUNDS = [
  [*turn(("audio", 1), "which?"), *turn("hear", ("audio", 0), image(0), ("audio", 2), "how many?", answer="two")],
  turn("which colour?"),
  turn(("audio", 2), "which?", answer="green"),
]


def keys(folder, family, rows=IMAGES, **changes):
  file = write(folder / "train.jsonl", [{"messages": messages} for messages in rows])
  template = (
    f"{{% set marks = {MARKS if 'use_mrope' in FAMILIES[family] else dict(image='<|image|>', video='<|video|>')} %}}"
  )
  where = {"tokenizer_path": str(folder / "tokenizer"), "grain_train_files": file, "grain_eval_files": file}
  return RUN | FAMILIES[family] | where | {"chat_template": template + TEMPLATE} | changes


def program_of(config, devices=1):
  return Program.of(config, make_mesh(config, jax.devices()[:devices]))


LENGTHS = {"qwen3_5": 352, "qwen3_omni": 160, "gemma4": 160}
"""Qwen 3.5 has 64 tokens for an image at least."""
LONG = {"qwen3_5": 256, "qwen3_omni": 640, "gemma4": 256}
"""With films; Qwen3-Omni has 128 tokens for two frames at least."""


def at_night(*values):
  return pytest.param(*values, marks=pytest.mark.nightly)


CASES = [
  ("qwen3_omni", IMAGES, LENGTHS),
  ("gemma4", IMAGES, LENGTHS),
  at_night("qwen3_5", IMAGES, LENGTHS),
  at_night("qwen3_omni", FILMS, LONG),
  at_night("gemma4", FILMS, LONG),
  at_night("qwen3_5", FILMS, LONG),
  at_night("qwen3_omni", SOUNDS, LENGTHS),
]
every_case = pytest.mark.parametrize(("family", "rows", "lengths"), CASES)


def swapped(rows):
  """The same questions about other media of the same size: negatives, or another sound."""
  return json.loads(
    json.dumps(rows)
    .replace('"4.png"', '"other.png"')
    .replace('"0.mkv"', '"other.mkv"')
    .replace('"2.wav"', '"other.wav"')
  )


def evaluated(folder, family, rows, devices=1, **changes):
  changes = {"eval_interval": 1, "eval_steps": -1, "generate_padding_batch_eval": True} | changes
  program = program_of(load_config(**keys(folder, family, rows, **changes)), devices)
  found = program.evaluate(program.init())
  return found["loss"], found["tokens"]


@every_case
def test_the_loss_is_the_same_packed_or_not_on_any_mesh(folder, family, rows, lengths):
  picture(9, SIZES[4]).save(folder / "other.png")
  (folder / "other.mkv").write_bytes(encoded(255 - film(4, 16, 24), 2))
  soundfile.write(folder / "other.wav", np.random.default_rng(0).normal(size=22_400) * 0.1, 16_000)
  length = {"max_target_length": lengths[family]}
  expected, tokens = evaluated(folder, family, rows, packing=False, **length)
  mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
  for devices, changes in ((1, {}), (8, mesh | {"eval_per_device_batch_size": 0.5})):
    loss, count = evaluated(folder, family, rows, devices, **length, **changes)
    assert count == tokens
    assert loss == pytest.approx(expected, abs=1e-5), changes
  blind, _ = evaluated(folder, family, swapped(rows), packing=False, **length)
  assert abs(blind - expected) > 1e-4, "the loss does not see the media"


@every_case
def test_trainer_and_engine_say_the_same_after_each_prompt(folder, family, rows, lengths):
  """Of packed rows, the likeliest tokens at the beginning of every answer are those of the engine's prefill."""
  length = lengths[family]
  config = load_config(**keys(folder, family, rows, max_target_length=length, num_epoch=1, per_device_batch_size=1))
  options, program = data_options(config), program_of(config)
  state = program.init()
  params = state.params | state.buffers
  said = program.forward(
    lambda decoder, batch: jax.nn.log_softmax(
      decoder.logits(
        decoder.hidden(
          batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
        )[0]
      ).astype(jnp.float32)
    )
  )
  trained, loader = {}, make_dataloader(options, program.batch)
  packed = 0
  for fed in loader:
    found, batch = np.asarray(said(params, fed.batch)), jax.tree.map(np.asarray, fed.batch)
    packed = max(packed, batch.segments.max())
    for row, start in zip(*np.nonzero((batch.weights > 0) & (np.roll(batch.weights, 1, axis=1) == 0)), strict=True):
      first = np.flatnonzero(batch.segments[row] == batch.segments[row, start])[0]
      trained.setdefault(tuple(batch.inputs[row, first : start + 1].tolist()), []).append(found[row, start])
  assert packed > 1
  tokenizer = load_tokenizer(options.tokenizer)
  encoder, params_of = (
    PromptEncoder.of(config, tokenizer, 1000),
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=5),
  )
  engine = LiveEngine(config, program.model, tokenizer, params_of, 1, length + 8, length)
  prompts = [
    encoder.chat(in_folder(folder, messages[:end]), {}) for messages in rows for end in range(1, len(messages), 2)
  ]
  outputs = engine.generate(params, 0, [tokens for tokens, _ in prompts], params_of, [media for _, media in prompts])
  assert sum(map(len, trained.values())) == len(prompts)
  for (tokens, _), output in zip(prompts, outputs, strict=True):
    likeliest = output.top_logprobs[0]
    assert len(likeliest) == 5
    for own in trained[tuple(tokens)]:
      for token, value in likeliest.items():
        assert own[token] == pytest.approx(value, abs=1e-4)


def in_folder(folder, messages):
  """The messages with whole paths."""
  found = json.dumps(messages)
  for ending in ENDINGS.values():
    for number in range(5):
      found = found.replace(f'"{number}.{ending}"', json.dumps(str(folder / f"{number}.{ending}")))
  return json.loads(found)


PARTS = {
  "qwen3_omni": st.one_of(
    st.tuples(st.just("image"), st.integers(0, 4)),
    st.tuples(st.just("audio"), st.integers(0, 2)),
    st.tuples(st.just("video"), st.integers(0, 1)),
    st.sampled_from(["one ", "<|image_pad|>", "<|audio_pad|>", "which shape?"]),
  ),
  "gemma4": st.one_of(
    st.tuples(st.sampled_from(["image", "video"]), st.integers(0, 1)), st.sampled_from(["<|video|>", "which shape?"])
  ),
  "qwen3_5": st.one_of(st.tuples(st.just("image"), st.integers(0, 4)), st.tuples(st.just("video"), st.just(0))),
}


@settings(max_examples=25, deadline=None)
@given(
  data=st.data(), family=st.sampled_from(list(FAMILIES)), length=st.integers(24, 600),
  packing=st.sampled_from(["first_fit", "best_fit", "concat_then_split", ""]),
  slots=st.sampled_from([-1, 8, 60]), most=st.sampled_from([-1, 1, 2]), truncate=st.booleans(),
)  # fmt: skip
def test_placeholders_and_features_agree_and_no_example_is_split(
  folder, data, family, length, packing, slots, most, truncate
):
  """For random conversations: prompts and positions are the server's, and each row has the very inputs of its media."""
  turns = st.lists(st.lists(PARTS[family], max_size=3), min_size=1, max_size=2)
  rows = [
    [message for parts in talk for message in turn(*parts, answer="two blue")]
    for talk in data.draw(st.lists(turns, min_size=1, max_size=4))
  ]
  changes = {"packing": bool(packing), "grain_packing_type": packing or "first_fit", "max_target_length": length}
  changes |= {"image_slots_per_row": slots, "max_num_images_per_example": most, "use_truncation": truncate}
  config = load_config(**keys(folder, family, rows, **changes))
  options = data_options(config)
  prompts = PromptEncoder.of(config, load_tokenizer(options.tokenizer), 5000)
  documents, expected = open_sources(options, options.train)[0].documents, []
  for number, messages in enumerate(rows):
    found = documents.encoding.sequences(documents.values(documents.read([number])[0]))
    spans = [(one, begin) for one in found for begin, _ in one.answers]
    prompted = [prompts.chat(in_folder(folder, messages[:end]), {}) for end in range(1, len(messages), 2)]
    for (one, begin), (tokens, media) in zip(spans, prompted, strict=True):
      assert one.tokens[:begin] == tokens
      features = [medium.features for medium, _ in media_places(one.media[:begin])]
      assert features == ([] if media is None else [processed.features for _, processed in media.media])
    for one in documents.encoding.fitting(found):
      assert len(one.tokens) <= length + 1
      (last,) = [media for tokens, media in prompted if one.tokens[: one.answers[-1][0]] == tokens]
      expected.append((one.tokens, last))
  mixture = SourceMixture(open_sources(options, options.train), 1, 0, True, 1, options.vocab_size)
  streams = PackedStreams(mixture, make_packing(options, options.length), [0], media=options.media)
  seen = []
  for made in (streams.rows([0]) for _ in range(2 * len(rows))):
    for segment in range(1, made.segments.max() + 1):
      here = np.flatnonzero(made.segments[0] == segment)
      tokens = [int(made.inputs[0][here[0]]), *made.targets[0][here].tolist()]
      seen.append(tokens)
      prompt = next(media for wanted, media in expected if wanted == tokens)
      check_sequence(options, made, here, prompt)
  assert sorted(seen) == sorted(tokens for tokens, _ in expected)


def check_sequence(options, rows, here, prompt):
  """The media of a sequence in a row are those of its longest prompt, and nothing of them trains."""
  wanted = {} if prompt is None else dict.fromkeys(TOWERS.values(), 0)
  for tower, medium in () if prompt is None else prompt.media:
    arrays = {name: array[0] for name, array in rows.media.towers[tower].items()}
    places = here[np.flatnonzero(arrays["indices"][here] >= 0)]
    first = wanted[tower]
    wanted[tower] += medium.features
    features = arrays["indices"][places[first : wanted[tower]]]
    assert len(features) == medium.features
    if tower == "vision":
      patches = features[:, None] * 4 + np.arange(4)
      np.testing.assert_array_equal(
        arrays["inputs"][0][patches.reshape(-1)], medium.inputs.reshape(-1, medium.inputs.shape[-1])
      )
      np.testing.assert_array_equal(arrays["positions"][0][patches.reshape(-1)], medium.grid[..., 1:].reshape(-1, 2))
      segments = arrays["segments"][0][patches.reshape(-1)].reshape(len(medium.inputs), -1)
      assert (segments == segments[:, :1]).all()
      assert (np.diff(segments[:, 0]) == 1).all()
    else:
      chunks = np.unique(features // 13)
      np.testing.assert_array_equal(arrays["inputs"][0][chunks].swapaxes(1, 2), medium.inputs)
      assert (arrays["segments"][0][features] > 0).all()
  for tower, arrays in rows.media.towers.items():
    marked = arrays["indices"][0][here] >= 0
    assert marked.sum() == wanted.get(tower, 0)
    assert not rows.loss_weights[0][here][:-1][marked[1:]].any(), "no token of a medium trains"
  if rows.media.rotary_positions is not None:
    length = 0 if prompt is None else min(len(prompt.keys), len(here))
    found, behind = rows.media.rotary_positions[0][here], np.arange(length, len(here))[:, None]
    if prompt is not None:
      np.testing.assert_array_equal(found[:length], prompt.rotary_positions[:length])
    offset = 0 if prompt is None else prompt.rotary_offset
    np.testing.assert_array_equal(found[length:], np.repeat(behind + offset, 3, axis=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_media_resume_with_the_next_batch_in_any_process(folder, workers):
  """From the state after two batches: images, sound and positions are those of a run that went on."""
  rows = [*IMAGES, *SOUNDS]
  config = load_config(**keys(folder, "qwen3_omni", rows, num_epoch=20))
  options, program = data_options(config), program_of(config)
  loader = make_dataloader(options, program.batch)
  wanted = [next(loader) for _ in range(4)]
  state = jax.tree.map(np.asarray, wanted[1].iterator_state())
  again = load_config(**keys(folder, "qwen3_omni", rows, num_epoch=20, grain_worker_count=workers))
  other = make_dataloader(data_options(again), program.batch, state)
  for one in wanted[2:]:
    assert all(map(np.array_equal, jax.tree.leaves(one.batch), jax.tree.leaves(next(other).batch)))
  loader.close(), other.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "rows"), [("qwen3_omni", SOUNDS), ("qwen3_5", IMAGES), ("gemma4", FILMS)])
def test_a_run_on_media_resumes_bit_by_bit(folder, tmp_path, family, rows):
  """With encoders and projectors trained, and micro-batches; the loss falls."""
  changes = {
    "freeze_vision_encoder_params": False, "num_epoch": 200, "learning_rate": 1e-2, "enable_checkpointing": True,
    "checkpoint_period": 3, "max_target_length": 352, "gradient_accumulation_steps": 2, "per_device_batch_size": 1,
    "learning_rate_schedule_steps": 6, "base_output_directory": str(tmp_path),
  }  # fmt: skip
  changes |= {"freeze_audio_encoder_params": False} if family == "qwen3_omni" else {}
  for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
    maxtext.train(load_config(**keys(folder, family, rows, **changes, run_name=name, steps=steps)))
  whole, parts = (
    {row["step"]: row["loss"] for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())}
    for name in ("whole", "parts")
  )
  assert whole == parts
  assert whole[6] < whole[1]


@pytest.mark.parametrize(
  ("messages", "changes", "said"),
  [
    (turn(("audio", "short"), "which?"), {}, "audio 0: .* less than a second"),
    (turn(("audio", 1), "which?"), {"use_audio": False}, "trained on image and video parts"),
    (turn(("video", "none"), "which?"), {}, "record 0: video 0: .*none.mkv"),
    (turn(("audio", 0), "which?"), {"max_target_length": 12}, "max_target_length=12 leaves no room for a sound"),
    (turn(image(0), "which?"), {"use_audio_in_video": True}, "use_audio_in_video=True: the sound track"),
  ],
)
def test_what_is_wrong_is_named(folder, messages, changes, said):
  soundfile.write(folder / "short.wav", np.zeros(9_000), 16_000)
  config = load_config(**keys(folder, "qwen3_omni", [messages], **changes))
  with pytest.raises(ConfigError, match=said):
    open_data(data_options(config), program_of(config).batch)


def test_data_show_has_the_media_where_they_stand(folder, tmp_path, capsys):
  config = tmp_path / "tiny.yml"
  config.write_text(json.dumps(keys(folder, "qwen3_omni", SOUNDS, num_epoch=9) | {"base_config": "sft.yml"}))
  assert (
    main(["data", "show", str(config), "per_device_batch_size=1", "--rows", "8", "--html", str(tmp_path / "a.html")])
    == 0
  )
  shown = (tmp_path / "a.html").read_text() + capsys.readouterr().out
  assert "[image 32x16, 8 tokens]" in shown  # 20 pixels are rounded to two of 8
  assert "[sound, 13 tokens]" in shown


def test_dropout_of_the_projector_changes_the_loss_of_training_and_not_of_evaluation(folder):
  """Of features alone: rows of text have the same loss; and the same step draws the same masks."""
  steps = {}
  for rate in (0.0, 0.5):
    for rows in (IMAGES, [turn("which?")]):
      config = load_config(
        **keys(folder, "qwen3_omni", rows, projector_dropout_for_vit=rate, use_audio=False, num_epoch=9)
      )
      program = program_of(config)
      loader = make_dataloader(data_options(config), program.batch)
      batch = next(loader).batch
      losses = [float(program.step(program.init(), batch)[1]["loss"]) for _ in range(2)]
      assert losses[0] == losses[1]
      steps[rate, len(rows)] = losses[0]
      loader.close()
  assert steps[0.0, 1] == steps[0.5, 1]
  assert abs(steps[0.0, len(IMAGES)] - steps[0.5, len(IMAGES)]) > 1e-4
  assert evaluated(folder, "qwen3_omni", IMAGES, projector_dropout_for_vit=0.5, use_audio=False) == evaluated(
    folder, "qwen3_omni", IMAGES, use_audio=False
  )
