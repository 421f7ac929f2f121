"""Training on images: rows of text and images, whatever the files; the loss on any mesh, packed or not; the encoder."""

import base64
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxtext
from examples.vision.shapes import SPECIAL, TEMPLATE, write_tokenizer
from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.data.conversation_media import media_places
from maxtext.data.dataloader import make_dataloader, make_packing, open_data
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import data_options
from maxtext.data.sources import open_sources
from maxtext.data.streams import PackedStreams, Rows
from maxtext.data.tokenizers import load_tokenizer
from maxtext.inference.multimodal import PromptEncoder
from maxtext.mesh.devices import make_mesh
from maxtext.training.objectives.preference import PreferenceOptimization
from maxtext.training.program import Program

Image = pytest.importorskip("PIL.Image")

TINY = {
  "use_sft": True, "decoder_block": "gemma3", "vocab_size": 320, "base_emb_dim": 32, "base_mlp_dim": 48,
  "base_num_decoder_layers": 2, "base_num_query_heads": 2, "base_num_kv_heads": 1, "head_dim": 16,
  "logits_via_embedding": True, "use_qk_norm": True, "local_rope_max_timescale": 10000, "sliding_window_size": 64,
  "use_multimodal": True, "image_placeholder": "<start_of_image>", "image_size_for_vit": 16, "patch_size_for_vit": 4,
  "hidden_size_for_vit": 24, "intermediate_size_for_vit": 32, "num_attention_heads_for_vit": 2,
  "num_hidden_layers_for_vit": 1, "vision_output_length": 4, "tokenizer_type": "huggingface", "dtype": "float32",
  "max_target_length": 96, "per_device_batch_size": 2, "grain_worker_count": 0, "grain_worker_count_eval": 0,
  "enable_checkpointing": False, "jax_cache_dir": "", "init_weights_seed": 3,
}  # fmt: skip
TILED = {
  "decoder_block": "llama4", "image_placeholder": "<start_of_image>", "tile_size_for_vit": 16,
  "intermediate_size_for_vit": 96, "projector_input_dim_for_vit": 24, "projector_output_dim_for_vit": 24,
  "vision_output_dim_for_vit": 24, "vision_output_length": -1, "local_rope_max_timescale": -1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer, and pictures of several sizes."""
  path = tmp_path_factory.mktemp("images")
  write_tokenizer(path / "tokenizer")
  write_tokenizer(path / "tiled", (*SPECIAL, "<|patch|>", "<|image_start|>", "<|image_end|>"))
  for number in range(6):
    picture(number, (8 + 5 * number, 16)).save(path / f"{number}.png")
  return path


def picture(seed, size=(16, 16)):
  return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def png(image):
  file = io.BytesIO()
  image.save(file, "PNG")
  return file.getvalue()


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def talk(number, *images):
  """Two turns, the second with the last image."""
  first, last = [{"type": "image", "image": f"{i}.png"} for i in images[:-1]], images[-1:]
  second = [{"type": "image", "image": f"{i}.png"} for i in last]
  return {"messages": [
    {"role": "user", "content": [*first, {"type": "text", "text": f"which {number}?"}]},
    {"role": "assistant", "content": ("red", "green circle", "one two three")[number % 3]},
    {"role": "user", "content": [*second, {"type": "text", "text": "how many?"}]},
    {"role": "assistant", "content": "two"},
  ]}  # fmt: skip


MIXED = [talk(0, 0), talk(1), talk(2, 1, 2), talk(3, 3, 4, 5), talk(4), talk(5, 2), talk(6, 0, 5), talk(7)]


def keys(folder, rows=MIXED, **changes):
  file = write(folder / "train.jsonl", rows)
  tokenizer = {"tokenizer_path": str(folder / "tokenizer"), "grain_train_files": file, "grain_eval_files": file}
  return TINY | tokenizer | changes


def rows_of(config, rows, count):
  """The first rows of the data."""
  options = data_options(config)
  mixture = SourceMixture(open_sources(options, options.train), rows, 0, True, 1, options.vocab_size)
  packing = make_packing(options, options.length)
  streams = PackedStreams(mixture, packing, range(rows), media=options.media)
  return [streams.rows(range(rows)) for _ in range(count)]


PARTS = st.lists(
  st.one_of(st.integers(0, 5), st.sampled_from(["one ", "<start_of_image>", "which shape?"])), max_size=4
)
TALKS = st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=6)


def as_messages(parts_of_turns):
  messages = []
  for number, parts in enumerate(parts_of_turns):
    content = [
      {"type": "image", "image": f"{part}.png"} if isinstance(part, int) else {"type": "text", "text": part}
      for part in parts
    ]
    messages += [
      {"role": "user", "content": content},
      {"role": "assistant", "content": ("red", "two blue")[number % 2]},
    ]
  return messages


@settings(max_examples=25, deadline=None)
@given(
  talks=TALKS, length=st.integers(24, 96), packing=st.sampled_from(["first_fit", "best_fit", "concat_then_split", ""]),
  slots=st.sampled_from([-1, 1, 2, 4]), tiled=st.booleans(), most=st.sampled_from([-1, 1, 3]),
)  # fmt: skip
def test_placeholders_and_features_agree_and_no_example_is_split(folder, talks, length, packing, slots, tiled, most):
  """For random conversations: prompts are the server's, and each row has the very inputs of its images, in order."""
  rows = [{"messages": as_messages(turns)} for turns in talks]
  changes = {"packing": bool(packing), "grain_packing_type": packing or "first_fit", "max_target_length": length}
  changes |= {"image_slots_per_row": slots, "max_num_images_per_example": most}
  if tiled:
    changes |= TILED | {"tokenizer_path": str(folder / "tiled")}
  config = load_config(**keys(folder, rows, **changes))
  options = data_options(config)
  media, shape = options.media, options.media.rooms["vision"].shape
  prompts = PromptEncoder.of(config, load_tokenizer(options.tokenizer), 1000)
  documents = open_sources(options, options.train)[0].documents
  expected = []
  for number, row in enumerate(rows):
    found = documents.encoding.sequences(documents.values(documents.read([number])[0]))
    absolute = json.loads(
      json.dumps(row["messages"]).replace(".png", ".png").replace('"image": "', f'"image": "{folder}/')
    )
    spans = [(one, begin) for one in found for begin, _ in one.answers]
    assert len(spans) == len(row["messages"]) // 2
    for turn, (one, begin) in enumerate(spans):
      tokens, prompted = prompts.chat(absolute[: 2 * turn + 1], {})
      assert one.tokens[:begin] == tokens
      inputs = inputs_of(one.media[:begin], media)
      wanted = [] if prompted is None else [processed.inputs for _, processed in prompted.media]
      assert len(inputs) == len(wanted)
      assert all(map(np.array_equal, inputs, wanted))
    for one in documents.encoding.fitting(found):
      assert len(one.tokens) <= length + 1
      inputs = inputs_of(one.media, media)
      assert most < 0 or len(inputs) <= most
      expected.append((one.tokens, np.concatenate(inputs) if inputs else np.zeros((0, shape.patches, shape.values))))
  seen = []
  for made in rows_of(config, 1, 2 * len(rows)):
    row_inputs, indices = (made.media.towers["vision"][name][0] for name in ("inputs", "indices"))
    assert row_inputs.shape[0] == media.rooms["vision"].slots
    assert not row_inputs[(indices.max() + 1) // shape.features :].any()
    for segment in range(1, made.segments.max() + 1):
      here = made.segments[0] == segment
      own = indices[here][indices[here] >= 0]
      tokens = [int(made.inputs[0][here][0]), *made.targets[0][here].tolist()]
      seen.append((tokens, row_inputs[np.unique(own // shape.features)]))
      assert not made.loss_weights[0][here][:-1][indices[here][1:] >= 0].any(), "no token of an image trains"
  assert sorted(tokens for tokens, _ in seen) == sorted(tokens for tokens, _ in expected)
  for tokens, inputs in seen:
    assert any(tokens == a and np.array_equal(inputs, b) for a, b in expected)


def inputs_of(sequence, options):
  """The tower's inputs of each medium of a sequence, in order."""
  return [medium.process(options).inputs for medium, _ in media_places(sequence)]


def test_columns_of_paths_bytes_and_lists_are_the_same_images(folder):
  """JSON lines with paths beside them, Parquet with bytes as the `datasets` library has them, and parts of messages."""
  pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
  texts = [[{"role": "user", "content": f"which {n}?"}, {"role": "assistant", "content": "red"}] for n in range(3)]
  chosen = [[], ["0.png"], ["1.png", "2.png"]]
  by_path = [{"messages": text, "image": paths} for text, paths in zip(texts, chosen, strict=True)]
  by_path[1]["image"] = "0.png"
  in_parts = [
    {"messages": [{"role": "user", "content": [
      *({"type": "image", "image": path} for path in paths), {"type": "text", "text": text[0]["content"]},
    ]}, text[1]]}
    for text, paths in zip(texts, chosen, strict=True)
  ]  # fmt: skip
  marked = [{**row, "messages": [{"role": "user", "content": [
    *({"type": "image"} for _ in paths), {"type": "text", "text": text[0]["content"]},
  ]}, text[1]]} for row, text, paths in zip(by_path, texts, chosen, strict=True)]  # fmt: skip
  structs = [[{"bytes": (folder / path).read_bytes(), "path": None} for path in paths] for paths in chosen]
  table = pyarrow.table({"messages": texts, "pictures": structs})
  parquet.write_table(table, folder / "rows.parquet")
  in_parquet = {"grain_train_files": str(folder / "rows.parquet"), "grain_file_type": "parquet"}
  made = [
    rows_of(load_config(**keys(folder, rows) | changes), 1, 1)[0]
    for rows, changes in (
      (by_path, {}), (in_parts, {}), (marked, {}), (by_path, in_parquet | {"train_image_column": ["pictures"]}),
      (in_parts, {"train_image_column": []}),
    )
  ]  # fmt: skip
  assert made[0].media.towers["vision"]["indices"].max() + 1 == 3 * 4
  for other in made[1:]:
    assert np.array_equal(made[0].inputs, other.inputs)
    assert all(map(np.array_equal, jax.tree.leaves(made[0].media), jax.tree.leaves(other.media)))


USER, ANSWER = {"role": "user", "content": "which?"}, {"role": "assistant", "content": "red"}
BAD = {"type": "image", "image": "nowhere.png"}


def opened(folder, rows, **changes):
  config = load_config(**keys(folder, rows, **changes))
  return open_data(data_options(config), Program.of(config, make_mesh(config, jax.devices()[:1])).batch)


@pytest.mark.parametrize(
  ("row", "changes", "said"),
  [
    ({"messages": [{**USER, "content": [BAD]}, ANSWER]}, {}, "record 0: image 0: .*nowhere.png"),
    ({"messages": [USER, ANSWER], "image": "https://a.b/c.png"}, {}, "nothing is fetched"),
    ({"messages": [USER, ANSWER], "image": 3}, {}, "a path, bytes, a data URL or a PIL image, not int"),
    ({"messages": [USER, ANSWER], "image": "data:image/png;base64,@@"}, {}, "no valid base64"),
    ({"messages": [{**USER, "content": [{"type": "image"}]}, ANSWER]}, {}, "more parts of images than the 0"),
    ({"messages": [USER, {**ANSWER, "content": [{"type": "image", "image": "0.png"}]}]}, {}, "an answer has media"),
    ({"messages": [USER, ANSWER], "image": "0.png"}, {"chat_template_path": "plain.jinja"}, "0 placeholders"),
    (
      {"prompt": "a", "completion": "b", "image": "0.png"},
      {"use_chat_template": False, "train_data_columns": ["prompt", "completion"]},
      "use_chat_template=true",
    ),
    ({"messages": [USER, ANSWER], "image": "0.png"}, {"max_target_length": 3}, "max_target_length=3 leaves no room"),
    ({"messages": [{**USER, "content": [BAD]}, ANSWER]}, {"image_slots_per_row": 0}, "only parts of type 'text'"),
  ],
)
def test_what_is_wrong_is_named(folder, row, changes, said):
  (folder / "plain.jinja").write_text(TEMPLATE.replace("'<start_of_image>'", "''"))
  if "chat_template_path" in changes:
    changes = {"chat_template_path": str(folder / "plain.jinja")}
  with pytest.raises(ConfigError, match=said):
    opened(folder, [row], **changes)


def test_a_damaged_picture_is_named_with_its_row_when_it_is_read(folder):
  picture(5, (64, 64)).save(folder / "whole.jpg")
  whole = (folder / "whole.jpg").read_bytes()
  (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
  rows = [{"messages": [USER, ANSWER], "image": name} for name in ("0.png", "cut.jpg")]
  with pytest.raises(ConfigError, match=r"record 1: .*cut.jpg: The image cannot be decoded"):
    rows_of(load_config(**keys(folder, rows)), 1, 1)


def evaluated(folder, devices=1, **changes):
  changes = {"eval_interval": 1, "eval_steps": -1, "generate_padding_batch_eval": True} | changes
  config = load_config(**keys(folder, **changes))
  program = Program.of(config, make_mesh(config, jax.devices()[:devices]))
  found = program.evaluate(program.init())
  return found["loss"], found["tokens"]


def test_the_loss_is_the_same_packed_or_not_on_any_mesh(folder):
  expected, tokens = evaluated(folder, packing=False, max_num_images_per_example=3)
  for devices, changes in (
    (1, {"image_slots_per_row": 4}),
    (
      8,
      {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "ici_tensor_parallelism": 2,
        "eval_per_device_batch_size": 0.5,
      },
    ),
  ):
    loss, count = evaluated(folder, devices, **changes)
    assert count == tokens
    assert loss == pytest.approx(expected, abs=1e-5), changes
  blind, _ = evaluated(folder, packing=False, max_num_images_per_example=3, rows=[
    json.loads(json.dumps(row).replace("0.png", "4.png")) for row in MIXED
  ])  # fmt: skip
  assert abs(blind - expected) > 1e-4, "the loss does not see the images"


def fed(folder, config, state=None):
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  return make_dataloader(data_options(config), program.batch, state)


def test_images_resume_with_the_next_batch_in_any_process(folder):
  """From the state after three batches, made by a reader process instead of a thread."""
  config = load_config(**keys(folder, num_epoch=20))
  loader = fed(folder, config)
  wanted = [next(loader) for _ in range(6)]
  state = jax.tree.map(np.asarray, wanted[2].iterator_state())
  again = fed(folder, load_config(**keys(folder, num_epoch=20, grain_worker_count=1)), state)
  for one in wanted[3:]:
    other = next(again).batch
    assert all(map(np.array_equal, jax.tree.leaves(one.batch), jax.tree.leaves(other)))
  assert any((np.asarray(one.batch.media["vision"].indices) >= 0).any() for one in wanted[3:])
  loader.close(), again.close()


def test_every_host_makes_its_rows_alone(folder):
  options = data_options(load_config(**keys(folder, MIXED * 3)))
  mixture = SourceMixture(open_sources(options, options.train), 4, 0, True, 1, options.vocab_size)

  def made(streams):
    rows = PackedStreams(mixture, make_packing(options, options.length), streams, media=options.media)
    return [rows.rows(range(len(streams))) for _ in range(2)]

  for whole, *parts in zip(made(range(4)), made([0, 1]), made([2, 3]), strict=True):
    joined = Rows.join(parts)
    assert all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(joined)))
    assert (whole.media.towers["vision"]["indices"] >= 0).any(axis=1).sum() > 1


def coloured(folder, name, swapped):
  """Conversations about a red or a blue picture; with `swapped`, the picture is either, whatever the answer."""
  for colour, value in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
    Image.new("RGB", (16, 16), value).save(folder / f"{colour}.png")
  draws = np.random.default_rng(0).integers(0, 2, (64, 2))
  rows = [
    {"messages": [USER, {**ANSWER, "content": ("red", "blue")[answer]}],
     "image": f"{('red', 'blue')[other if swapped else answer]}.png"}
    for answer, other in draws
  ]  # fmt: skip
  return write(folder / name, rows)


def test_the_loss_falls_by_what_is_in_the_pictures(folder):
  """And stays at that of a guess where pictures and answers do not belong together. The encoder learns."""
  changes = {"freeze_vision_encoder_params": False, "num_epoch": 100, "learning_rate": 5e-3, "steps": 45}
  config = load_config(**keys(folder, **changes, image_slots_per_row=5, per_device_batch_size=4))
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  front, losses = "towers/vision/front_end/weight", {}
  for swapped in (False, True):
    file = coloured(folder, f"{swapped}.jsonl", swapped)
    options = data_options(load_config(**keys(folder, **changes, image_slots_per_row=5) | {"grain_train_files": file}))
    state, loader, found = program.init(), make_dataloader(options, program.batch), []
    before = np.asarray(state.params[front])
    for _ in range(45):
      state, metrics = program.step(state, next(loader).batch)
      found.append(float(metrics["loss"]))
    loader.close()
    losses[swapped] = np.mean(found[-5:])
    assert not np.allclose(state.params[front], before)
  guess = np.log(2) / 2  # of a colour; the end of the turn is certain
  assert losses[False] < 0.2 * guess < 0.8 * guess < losses[True], losses


def test_a_frozen_encoder_leaves_its_projector_to_train(folder):
  model = Program.of(config := load_config(**keys(folder)), make_mesh(config, jax.devices()[:1])).model
  assert {name.split("/")[2] for name in model.params if name.startswith("towers/")} == {"projector"}


@pytest.mark.parametrize(
  "changes", [{"image_slots_per_row": 0}, {"use_sft": False, "dataset_type": "synthetic"}], ids=["SFT", "pre-training"]
)
def test_text_alone_leaves_encoder_and_projector_as_they_are(folder, changes):
  """Weight decay would shrink what no gradient reaches, until pictures mean nothing."""
  config = load_config(**keys(folder, **changes, freeze_vision_encoder_params=False))
  model = Program.of(config, make_mesh(config, jax.devices()[:1])).model
  assert [name for name in model.params if name.startswith("towers/")] == []
  assert {name.split("/")[2] for name in model.buffers if name.startswith("towers/")} >= {"projector", "front_end"}


def test_data_show_has_the_pictures_where_they_stand(folder, tmp_path, capsys):
  file = write(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER], "image": str(folder / "1.png")}])
  config = tmp_path / "tiny.yml"
  config.write_text(json.dumps(TINY | {"base_config": "sft.yml", "tokenizer_path": str(folder / "tokenizer")}))
  command = ["data", "show", str(config), f"grain_train_files={file}", "per_device_batch_size=1", "num_epoch=9"]
  assert main([*command, "--rows", "1"]) == 0
  shown = capsys.readouterr().out
  assert "⟦<start_of_image>⟧[image 16x16, 4 tokens]⟦<end_of_image>⟧" in shown
  assert re.search(r"images in (\d) of 24 slots", shown)[1] == str(shown.count("[image"))
  assert main([*command, "--rows", "1", "--html", str(tmp_path / "rows.html")]) == 0
  (first, *_) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', (tmp_path / "rows.html").read_text())
  shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(first))))
  wanted = Image.open(folder / "1.png").resize((16, 16), Image.Resampling.BILINEAR)
  assert np.array_equal(shown, np.asarray(wanted))


@pytest.mark.nightly
def test_a_model_prefers_answers_by_what_is_in_the_pictures(folder):
  """DPO: the answer that names the colour is chosen, so that only the picture tells which."""
  file, rows = coloured(folder, "pairs.jsonl", swapped=False), []
  for row in map(json.loads, Path(file).read_text().splitlines()):
    question, answer = row["messages"]
    other = {**answer, "content": "blue" if answer["content"] == "red" else "red"}
    rows.append({"prompt": [question], "chosen": [answer], "rejected": [other], "image": row["image"]})
  columns = {"train_data_columns": ["prompt", "chosen", "rejected"], "use_sft": False, "use_dpo": True}
  changes = {"freeze_vision_encoder_params": False, "num_epoch": 100, "learning_rate": 3e-3, "per_device_batch_size": 4}
  config = load_config(**keys(folder, rows, **columns, **changes, precompute_ref_log_probs=False, steps=30))
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  state, frozen, loader = program.init(), program.init_frozen(), make_dataloader(data_options(config), program.batch)
  for step in range(30):
    batch = next(loader).batch
    assert (np.asarray(batch.media["vision"].indices) >= 0).sum() == 2 * 4 * int(PreferenceOptimization().weight(batch))
    state, metrics = program.step(state, batch, frozen)
    assert step or float(metrics["loss"]) == pytest.approx(np.log(2), abs=1e-4)
  loader.close()
  assert metrics["reward_accuracy"] > 0.9
  with pytest.raises(ConfigError, match=r"precompute_ref_log_probs=True: .* image_slots_per_row=0"):
    data_options(load_config(**keys(folder, rows, **columns)))


@pytest.mark.nightly
def test_a_run_on_images_resumes_bit_by_bit(folder, tmp_path):
  """With the encoder and its projector trained, and micro-batches."""
  changes = {
    "freeze_vision_encoder_params": False,
    "num_epoch": 60,
    "learning_rate": 1e-2,
    "enable_checkpointing": True,
    "checkpoint_period": 3,
  }
  changes |= {"gradient_accumulation_steps": 2, "per_device_batch_size": 1, "base_output_directory": str(tmp_path)}
  changes |= {"learning_rate_schedule_steps": 6}
  for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
    maxtext.train(load_config(**keys(folder, **changes, run_name=name, steps=steps)))
  whole, parts = (
    {row["step"]: row["loss"] for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())}
    for name in ("whole", "parts")
  )
  assert whole == parts
  assert whole[6] < whole[1]
