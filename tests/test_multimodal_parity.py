"""Models with images and audio equal their references: logits, gradients, and weights in both directions.

`-k gemma3` runs one of them.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxtext import ConfigError, load_config
from maxtext.kernels.attention import AttentionKernel
from maxtext.layers.embedding import feature_indices, sinusoids
from maxtext.layers.mel import halved
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import abstract_model, build_model, media_processors, model_spec, weight_table
from maxtext.models.execution.attention_kernel import for_spans
from maxtext.models.media import TowerInputs
from maxtext.weights.config_json import config_json_entries, hugging_face_class, keys_of_folder, our_name
from maxtext.weights.from_hugging_face import load_from_hugging_face
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.tensor_layout import to_tensors
from tests.cases import cases
from tests.test_parity import randomize

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parity

LENGTH, IMAGE = 24, 127
RUN = {
  "max_target_length": LENGTH, "per_device_batch_size": 1, "dataset_type": "synthetic", "jax_cache_dir": "",
  "dtype": "float32", "attention": "dot_product", "use_multimodal": True, "freeze_vision_encoder_params": False,
}  # fmt: skip
TEXT = {
  "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
GEMMA3 = {
  "config": "Gemma3Config",
  "model": "Gemma3ForConditionalGeneration",
  "arguments": {
    "text_config": {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "vision_config": {
      "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
      "patch_size": 4, "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
  },
}  # fmt: skip

LLAMA4 = {
  "config": "Llama4Config",
  "model": "Llama4ForConditionalGeneration",
  "arguments": {
    "text_config": {
      **TEXT, "num_hidden_layers": 4, "intermediate_size_mlp": 80, "num_local_experts": 4, "num_experts_per_tok": 1,
      "interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 8,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "vision_config": {
      "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
      "patch_size": 4, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24,
      "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "image_token_index": IMAGE,
  },
}  # fmt: skip

QWEN_VISION = {
  "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
  "num_position_embeddings": 25,
}  # fmt: skip
QWEN_TEXT = TEXT | {
  "num_hidden_layers": 4, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
  "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}  # fmt: skip
QWEN_TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": 125}
QWEN3_5 = {
  "config": "Qwen3_5MoeConfig",
  "model": "Qwen3_5MoeForConditionalGeneration",
  "arguments": {
    "text_config": {
      **QWEN_TEXT, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
      "linear_key_head_dim": 8, "linear_value_head_dim": 8,
      "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
      },
    },
    "vision_config": QWEN_VISION,
    **QWEN_TOKENS,
  },
}  # fmt: skip
QWEN3_OMNI = {
  "config": "Qwen3OmniMoeThinkerConfig",
  "model": "Qwen3OmniMoeThinkerForConditionalGeneration",
  "arguments": {
    "text_config": QWEN_TEXT,
    "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
    "audio_config": {
      "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "num_mel_bins": 16,
      "downsample_hidden_size": 8, "output_dim": 48, "n_window_infer": 100,
    },
    **QWEN_TOKENS, "audio_token_id": 126, "audio_start_token_id": 124,
  },
  "left_out": "audio_tower.",
}  # fmt: skip
QWEN3_OMNI_AUDIO = {name: about for name, about in QWEN3_OMNI.items() if name != "left_out"} | {
  "keys": {"use_audio": True, "freeze_audio_encoder_params": False},
  "arguments": QWEN3_OMNI["arguments"] | {
    "audio_config": QWEN3_OMNI["arguments"]["audio_config"] | {
      "activation_function": "relu", "max_source_positions": 13, "conv_chunksize": 3,
    },
  },
}  # fmt: skip

GEMMA4 = {
  "config": "Gemma4Config",
  "model": "Gemma4ForConditionalGeneration",
  "arguments": {
    "text_config": {
      **TEXT, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 32, "num_global_key_value_heads": 1,
      "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 8, "final_logit_softcapping": 30.0,
      "enable_moe_block": False, "use_bidirectional_attention": "vision",
    },
    "vision_config": {
      "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
      "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
      "position_embedding_size": 10, "standardize": True,
    },
    "image_token_id": IMAGE,
  },
}  # fmt: skip


@dataclass(frozen=True)
class Example:
  """Two rows of text with images: several, and one.

  Attributes:
    inputs: what the reference takes beside the tokens.
    rotary: the argument `rotary_positions` of `hidden`.
  """

  tokens: np.ndarray
  inputs: dict[str, np.ndarray]
  media: dict[str, TowerInputs]
  rotary: np.ndarray | None = None


def square_images():
  """Images of 16 patches and 4 tokens each."""
  random = np.random.default_rng(0)
  tokens = random.integers(3, 120, (2, LENGTH))
  tokens[0, 3:7] = tokens[0, 12:16] = tokens[1, 9:13] = IMAGE  # across the window of 8
  pixels = random.normal(size=(3, 3, 16, 16)).astype(np.float32)
  patches = pixels.reshape(3, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(3, 16, 48)
  inputs = np.zeros((2, 2, 16, 48), np.float32)
  inputs[0], inputs[1, 0] = patches[:2], patches[2]
  indices = feature_indices(tokens == IMAGE, np.array([8, 4]))
  return Example(tokens, {"pixel_values": pixels}, {"vision": TowerInputs(inputs, indices)})


def gemma3_example():
  example = square_images()
  return replace(example, inputs=example.inputs | {"token_type_ids": (example.tokens == IMAGE).astype(np.int64)})


def patch_places(
  grids: Sequence[tuple[int, int, int]], merged: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """`positions` [T,2], `grid` [T,2] and `segments` [T] of one input of a tower that holds several images.

  Patches are in the order in which they are merged: blocks from left to right and top to bottom, and so within a block.
  Each frame of a video is a segment.

  Args:
    grids: of the images, in order.
    merged: rows, and columns, of patches that become one token.
    length: patches of the input; what images leave is padding.

  Raises:
    ValueError: images have more patches than the input.
  """
  positions, grid, segments = (
    np.zeros((length, 2), np.int32),
    np.ones((length, 2), np.int32),
    np.zeros(length, np.int32),
  )
  first = frame = 0
  for frames, rows, columns in grids:
    places = np.indices((rows, columns), np.int32).reshape(2, rows // merged, merged, columns // merged, merged)
    places = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    for _ in range(frames):
      frame, last = frame + 1, first + len(places)
      if last > length:
        raise ValueError(f"images of {list(grids)} patches do not fit in an input of {length} patches.")
      positions[first:last], grid[first:last], segments[first:last] = places, (rows, columns), frame
      first = last
  return positions, grid, segments


def mrope_positions(
  positions: np.ndarray,
  images: np.ndarray,
  grids: Sequence[Sequence[tuple[int, int, int]]],
  merged: int,
  interval: int = 1,
) -> np.ndarray:
  """`rotary_positions` [B,S,3] (time, row, column) of tokens in the order of the text.

  Text has three equal components. Tokens of an image count from the position after the text before it: time by frame,
  and the other two by row and column. The text behind it continues after the largest of them.

  Args:
    positions: [B,S] of tokens in their document.
    images: [B,S] whether a token has a feature of an image.
    grids: of the images of each row, in order.
    merged: rows, and columns, of patches that become one token.
    interval: between frames of a video.

  Raises:
    ValueError: a row has another number of tokens of images than its grids.
  """
  found = np.repeat(np.asarray(positions, np.int32)[..., None], 3, axis=-1)
  for row, own in enumerate(grids):
    marked = np.flatnonzero(images[row])
    counts = [frames * rows * columns // merged**2 for frames, rows, columns in own]
    if sum(counts) != len(marked):
      raise ValueError(f"row {row} has {len(marked)} tokens of images, and its grids have {sum(counts)}.")
    starts = np.flatnonzero(positions[row] == 0)
    for places, (frames, rows, columns) in zip(np.split(marked, np.cumsum(counts))[:-1], own, strict=True):
      axes = np.indices((frames, rows // merged, columns // merged)).reshape(3, -1).T * (interval, 1, 1)
      behind = places[-1] + 1
      end = next((start for start in starts if start >= behind), positions.shape[1])
      found[row, places] = found[row, places[0]] + axes
      found[row, behind:end] += axes.max() + 1 - len(places)
  return found


def audio_segments(clips: Sequence[int], chunk: int, window: int, chunks: int, halvings: int = 3) -> np.ndarray:
  """`segments` [T] of one input of an audio tower that holds several clips, one after the other in whole chunks.

  Tokens attend within their window; those of the frames that a clip's last chunk lacks are padding, 0. The n-th audio
  token of a row has the n-th feature whose segment is not 0.

  Args:
    clips: number of frames of each clip.
    chunk: frames of a chunk.
    window: frames of an attention window, a multiple of `chunk`.
    chunks: of the input.
    halvings: by the tower's convolutions.
  """
  tokens, number, first = halved(chunk, halvings), 0, 0
  segments = np.zeros(chunks * tokens, np.int32)
  for frames in clips:
    for start in range(0, frames, window):
      inside, place, number = min(window, frames - start), first + start // chunk * tokens, number + 1
      segments[place : place + inside // chunk * tokens + halved(inside % chunk, halvings)] = number
    first += -(-frames // chunk) * tokens
  return segments


GRIDS = ([(1, 4, 6), (1, 4, 4)], [(1, 6, 4)])  # of the images in each row


def images_of_any_size(values=96):
  """Those of a row share an input of the tower; patches have so many values."""
  random = np.random.default_rng(0)
  tokens = random.integers(3, 120, (2, LENGTH))
  tokens[0, 3:9] = tokens[0, 13:17] = tokens[1, 9:15] = IMAGE
  tokens[0, 2] = tokens[0, 12] = tokens[1, 8] = QWEN_TOKENS["vision_start_token_id"]
  patches = random.normal(size=(64, values)).astype(np.float32)
  inputs = np.zeros((2, 1, 48, values), np.float32)
  inputs[0, 0, :40], inputs[1, 0, :24] = patches[:40], patches[40:]
  places = (np.stack(arrays)[:, None] for arrays in zip(*(patch_places(own, 2, 48) for own in GRIDS), strict=True))
  indices = feature_indices(tokens == IMAGE, np.array([10, 6]))
  positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
  return Example(
    tokens,
    {"pixel_values": patches, "image_grid_thw": np.array([*GRIDS[0], *GRIDS[1]])},
    {"vision": TowerInputs(inputs, indices, *places)},
    mrope_positions(positions, tokens == IMAGE, GRIDS, 2),
  )


def qwen3_5_example():
  example = images_of_any_size()
  return replace(example, inputs=example.inputs | {"mm_token_type_ids": (example.tokens == IMAGE).astype(np.int64)})


def audio_and_images():
  """Clips of 130, 20 and 9 mel frames, two in one input, of which 17, 3 and 2 tokens are made; and an image."""
  random, example, clips = np.random.default_rng(1), images_of_any_size(), ((130,), (20, 9))
  tokens = random.integers(3, 120, (2, LENGTH))
  tokens[0, 0] = tokens[1, 0] = tokens[1, 6] = 124
  tokens[0, 1:18] = tokens[1, 1:4] = tokens[1, 7:9] = 126
  tokens[1, 11], tokens[1, 12:18] = QWEN_TOKENS["vision_start_token_id"], IMAGE
  mels = [random.normal(size=(16, frames)).astype(np.float32) for frames in (130, 20, 9)]
  inputs = np.zeros((2, 1, 2, 16, 100), np.float32)
  inputs[0, 0, 0], inputs[0, 0, 1, :, :30] = mels[0][:, :100], mels[0][:, 100:]
  inputs[1, 0, 0, :, :20], inputs[1, 0, 1, :, :9] = mels[1], mels[2]
  segments = np.stack([audio_segments(own, 100, 100, 2) for own in clips])
  indices = np.full(tokens.shape, -1, np.int32)
  for row in range(2):
    indices[row, tokens[row] == 126] = np.flatnonzero(segments[row])
  images, marked = example.media["vision"], tokens == IMAGE
  vision = replace(images, indices=feature_indices(marked, np.array([0, 6])))
  padded = np.stack([np.pad(mel, ((0, 0), (0, 130 - mel.shape[1]))) for mel in mels])
  mask = np.arange(130) < np.array([[130], [20], [9]])
  return Example(
    tokens,
    {
      "pixel_values": example.inputs["pixel_values"][40:], "image_grid_thw": np.array(GRIDS[1]),
      "input_features": padded, "feature_attention_mask": mask.astype(np.int64),
    },
    {"vision": vision, "audio": TowerInputs(inputs, indices, segments=segments[:, None])},
    mrope_positions(np.broadcast_to(np.arange(LENGTH), tokens.shape), marked, [[], GRIDS[1]], 2),
  )  # fmt: skip


def gemma4_example():
  """The reference takes an image at a time, whose patches are in another order, with columns before rows."""
  example = images_of_any_size(48)
  patches, found = example.inputs["pixel_values"], []
  for grid in (*GRIDS[0], *GRIDS[1]):
    own, patches = np.split(patches, [math.prod(grid)])
    places = patch_places([grid], 2, len(own))[0]
    order, padding = np.lexsort(places.T[::-1]), ((0, 24 - len(own)), (0, 0))
    found.append((np.pad(own[order], padding), np.pad(places[order, ::-1], padding, constant_values=-1)))
  pixels, positions = (np.stack(arrays) for arrays in zip(*found, strict=True))
  types = (example.tokens == IMAGE).astype(np.int64)
  inputs = {"pixel_values": pixels, "image_position_ids": positions.astype(np.int64), "mm_token_type_ids": types}
  return replace(example, inputs=inputs, rotary=None)


CASES = {
  "gemma4": (GEMMA4, gemma4_example),
  "gemma3": (GEMMA3, gemma3_example),
  "llama4": (LLAMA4, square_images),
  "qwen3_5": (QWEN3_5, qwen3_5_example),
  "qwen3_omni": (QWEN3_OMNI, images_of_any_size),
  "qwen3_omni_audio": (QWEN3_OMNI_AUDIO, audio_and_images),
}
every_case = pytest.mark.parametrize("case", cases(CASES, tuple(CASES)))


class Reference:
  """A tiny model of transformers, every weight random, and what it computes of the example."""

  def __init__(self, case, folder):
    import transformers

    about, example = CASES[case]
    self.keys = about.get("keys", {})
    self.left_out = about.get("left_out", "nothing")
    self.example, self.folder, self.kind = example(), folder, getattr(transformers, about["model"])
    config = getattr(transformers, about["config"])(**about["arguments"], attn_implementation="eager")
    torch.manual_seed(0)
    self.model = self.kind(config).float().eval()
    with torch.no_grad():
      for value in self.model.parameters():
        randomize(value)
      for name, value in self.model.named_buffers():
        if ".std_" in name:
          value.copy_(1.0 + 0.1 * torch.randn_like(value))
    self.model.save_pretrained(folder)

  def logits(self, model):
    tokens = torch.from_numpy(self.example.tokens).long()
    inputs = {name: torch.from_numpy(value) for name, value in self.example.inputs.items()}
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits

  def gradients(self, loss, folder):
    """Of all weights, by the names of its files."""
    self.model.zero_grad()
    loss.backward()
    model = copy.deepcopy(self.model)
    with torch.no_grad():
      for value, own in zip(model.parameters(), self.model.parameters(), strict=True):
        value.copy_(torch.zeros_like(value) if own.grad is None else own.grad)
      for value in model.buffers():
        value.zero_()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@cache
def folder_of(case, root):
  return Reference(case, Path(root) / case)


@pytest.fixture
def reference(case, tmp_path_factory):
  return folder_of(case, tmp_path_factory.getbasetemp() / "multimodal")


def ours(reference, **changes):
  keys = keys_of_folder(HuggingFaceFolder(reference.folder))
  config = load_config(**(keys | RUN | reference.keys | changes))
  model = build_model(config, make_mesh(config, jax.devices()[:1]))
  return config, model, load_from_hugging_face(config, model, str(reference.folder))


def logits_of(model, params, example):
  decoder = model.bind(params)
  positions = jnp.broadcast_to(jnp.arange(LENGTH), example.tokens.shape)
  inputs = {"media": example.media, "rotary_positions": example.rotary}
  return decoder.logits(decoder.hidden(jnp.asarray(example.tokens), positions, **inputs)[0])


@every_case
def test_logits_and_gradients(case, reference, tmp_path):
  config, model, params = ours(reference)
  theirs = reference.logits(reference.model)
  direction = np.random.default_rng(1).normal(size=theirs.shape).astype(np.float32)

  def loss(params):
    logits = logits_of(model, params, reference.example)
    return jnp.vdot(logits, direction), logits

  gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  gradients |= {name: jnp.zeros_like(gradients[name]) for name in model.buffers}
  np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4)
  tensors = reference.gradients((theirs * torch.from_numpy(direction)).sum(), tmp_path)
  about = hugging_face_class(config)
  wanted = {our_name(n, about): t for n, t in tensors.items() if not n.startswith(reference.left_out)}
  found = to_tensors(model, weight_table(config, model.spec), {n: np.asarray(g) for n, g in gradients.items()})
  assert wanted.keys() == found.keys()
  for name, gradient in wanted.items():
    np.testing.assert_allclose(found[name], gradient, atol=1e-4 * max(1.0, np.abs(gradient).max()), err_msg=name)


@every_case
def test_an_image_matters_to_all_tokens_after_it_and_its_own_ones(case, reference):
  _, model, params = ours(reference)
  plain = np.asarray(logits_of(model, params, reference.example))
  changed = {n: replace(t, inputs=t.inputs * 0.5) for n, t in reference.example.media.items()}
  other = replace(reference.example, media=changed)
  moved = np.abs(np.asarray(logits_of(model, params, other)) - plain).max(-1)
  first = int((reference.example.tokens[0] >= 126).argmax())
  assert (moved[0, :first] == 0).all()
  assert (moved[0, first:] > 0).all()


@every_case
def test_the_reference_reads_what_is_written(case, reference, tmp_path):
  import json

  from safetensors.numpy import save_file

  config, model, params = ours(reference)
  tensors = to_tensors(model, weight_table(config, model.spec), {n: np.asarray(p) for n, p in params.items()})
  save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
  (tmp_path / "config.json").write_text(json.dumps(config_json_entries(config)))
  again, about = reference.kind.from_pretrained(tmp_path, output_loading_info=True)
  assert not [name for name in about["missing_keys"] if reference.left_out not in name]
  assert not about["unexpected_keys"]
  read, written = (
    {name: value for name, value in model.state_dict().items() if reference.left_out not in name}
    for model in (again, reference.model)
  )
  assert read.keys() == written.keys()
  for name, value in read.items():
    assert torch.equal(value, written[name]), name


@every_case
def test_encoders_are_frozen_unless_asked_for_and_projectors_are_not(case, reference):
  _, model, _ = ours(reference, **{key: True for key in RUN | reference.keys if key.startswith("freeze_")})
  towers = {name for name in model.params if name.startswith("towers/")}
  assert towers
  assert all(name.split("/")[2] in ("projector", "deepstack") for name in towers)
  _, model, _ = ours(reference)
  constants = {"towers/vision/adapter/mean", "towers/vision/adapter/scale"}
  assert not [name for name in model.buffers if name.startswith("towers/") and name not in constants]


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_omni"])
def test_rotary_positions_of_text_and_images(case, reference):
  """A document of the second half of a row has those that it has alone."""
  example, inputs = reference.example, {n: torch.from_numpy(a) for n, a in reference.example.inputs.items()}
  tokens = torch.from_numpy(example.tokens).long()
  inputs.pop("pixel_values")
  theirs = reference.model.model.get_rope_index(tokens, attention_mask=torch.ones_like(tokens), **inputs)[0]
  np.testing.assert_array_equal(example.rotary, theirs.permute(1, 2, 0).numpy())
  positions, images = (np.tile(a, 2) for a in (np.arange(LENGTH)[None], example.tokens[:1] == IMAGE))
  packed = mrope_positions(positions, images, [GRIDS[0] * 2], 2)
  np.testing.assert_array_equal(packed, np.tile(example.rotary[:1], (1, 2, 1)))
  with pytest.raises(ValueError, match="row 0 has 20 tokens of images, and its grids have 10"):
    mrope_positions(positions, images, [GRIDS[0]], 2)


GEMMA3_ROWS = {"vocab_size": 262208, "override_model_config": True}  # 64 more than the text models: the image token's


# With the encoders: of Gemma 3 and Llama 4, the parameters of the published files; of the others, those of the text
# model and of the reference's encoder with the sizes of the named model.
@pytest.mark.parametrize(
  ("name", "count", "changes"),
  [
    ("gemma3-4b", 4_300_079_472, GEMMA3_ROWS),
    ("gemma3-12b", 12_187_325_040, GEMMA3_ROWS),
    ("gemma3-27b", 27_432_406_640, GEMMA3_ROWS),
    ("gemma4-26b", 25_805_936_206, {}),
    ("gemma4-31b", 31_273_088_876, {}),
    ("llama4-17b-16e", 108_641_793_536, {}),
    ("llama4-17b-128e", 401_583_781_376, {}),
    ("qwen3-omni-30b-a3b", 31_071_278_320, {}),
    ("qwen3-omni-30b-a3b", 31_071_278_320 + 647_927_168, {"use_audio": True}),
    ("qwen3.5-397b-a17b", 396_802_360_816, {}),
  ],
)
def test_parameter_counts_with_encoders(name, count, changes):
  config = load_config(name, use_multimodal=True, dataset_type="synthetic", **changes)
  assert abstract_model(config).size == count


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"model_name": "llama3.1-8b", "use_multimodal": True}, "use_multimodal=true: .* has no vision encoder"),
    ({"model_name": "gemma3-4b", "use_audio": True}, "use_audio=true: .* has no audio encoder"),
    ({"model_name": "llama4-17b-16e", "use_multimodal": True, "use_mrope": True}, "use_mrope=True has no effect here"),
    (
      {"model_name": "llama4-17b-16e", "use_multimodal": True, "pixel_shuffle_ratio_for_vit": 0.3},
      "pixel_shuffle_ratio_for_vit=0.3 must be 1 over a number that divides the 24 patches",
    ),
    (
      {"model_name": "qwen3-omni-30b-a3b", "use_multimodal": True, "mrope_section": [24, 20, 10]},
      r"mrope_section=\[24, 20, 10\] must be three numbers whose sum is 64",
    ),
    (
      {"model_name": "qwen3-omni-30b-a3b", "use_multimodal": True, "deepstack_visual_indexes_for_vit": [8, 30]},
      r"deepstack_visual_indexes_for_vit=\[8, 30\] must be layers from 0 to 26",
    ),
    (
      {"model_name": "qwen3-omni-30b-a3b", "use_audio": True, "activation_function_for_audio": "swish"},
      "activation_function_for_audio=swish must be one of gelu, ",
    ),
    (
      {"model_name": "qwen3-omni-30b-a3b", "use_audio": True, "max_source_positions_for_audio": 12},
      "max_source_positions_for_audio=12 must be at least 13",
    ),
    (
      {"model_name": "qwen3-omni-30b-a3b", "use_audio": True, "num_conv_layers_for_audio": 0},
      "num_conv_layers_for_audio=0",
    ),
  ],
)
def test_keys_that_no_encoder_can_have(keys, message):
  with pytest.raises(ConfigError, match=message):
    abstract_model(load_config(**keys, override_model_config=True, dataset_type="synthetic"))


def test_convolutions_and_their_positions_are_as_many_and_as_long_as_the_keys_say():
  keys = {"num_conv_layers_for_audio": 2, "max_timescale_for_audio": 500.0}
  config = load_config("qwen3-omni-30b-a3b", use_audio=True, dataset_type="synthetic", **keys)
  model = abstract_model(config)
  (tower,) = model.spec.towers
  assert (tower.front_end.count, tower.front_end.longest, tower.length) == (2, 500.0, 100 * 25)
  convolved = {path for path in model.params if "/convolutions/" in path}
  assert convolved == {path for path in weight_table(config, model.spec) if "/convolutions/" in path}
  assert len(convolved) == 4
  sounds = media_processors(config)["audio"](np.zeros(16_000 + 5 * 160, np.float32))
  assert sounds.features == 25 + 2
  wide, narrow = (sinusoids(jnp.arange(4)[None], 8, jnp.float32, longest) for longest in (1e4, 500.0))
  np.testing.assert_allclose(narrow[0, 1, 3], np.sin(1 / 500), rtol=1e-5)
  assert not np.allclose(wide, narrow)


def test_kernels_that_cannot_see_both_ways_are_not_chosen():
  keys = {"use_multimodal": True, "dataset_type": "synthetic"}
  spec = {name: model_spec(load_config(name, **keys)) for name in ("gemma3-4b", "llama4-17b-16e")}
  for kernel in ("splash", "cudnn"):
    fast = AttentionKernel(kernel)
    assert for_spans(load_config("gemma3-4b", **keys), spec["gemma3-4b"], fast).kernel == "chunked"
    assert for_spans(load_config("llama4-17b-16e", **keys), spec["llama4-17b-16e"], fast) is fast
    with pytest.raises(ConfigError, match="attention=chunked"):
      for_spans(load_config("gemma3-4b", attention="flash", **keys), spec["gemma3-4b"], fast)
