"""Models with images equal their references: logits, gradients, and weights in both directions.

`-k gemma3` runs one of them.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import load_config
from maxtext.layers.embedding import feature_indices
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import abstract_model, build_model, weight_table
from maxtext.models.media import TowerInputs
from maxtext.weights.config_json import config_json_entries, keys_of_folder
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


@dataclass(frozen=True)
class Example:
  """Two rows of text with images: several, and one.

  Attributes:
    inputs: what the reference takes beside the tokens.
  """

  tokens: np.ndarray
  inputs: dict[str, np.ndarray]
  media: dict[str, TowerInputs]


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


CASES = {"gemma3": (GEMMA3, gemma3_example), "llama4": (LLAMA4, square_images)}
every_case = pytest.mark.parametrize("case", cases(CASES, tuple(CASES)))


class Reference:
  """A tiny model of transformers, every weight random, and what it computes of the example."""

  def __init__(self, case, folder):
    import transformers

    about, example = CASES[case]
    self.example, self.folder, self.kind = example(), folder, getattr(transformers, about["model"])
    config = getattr(transformers, about["config"])(**about["arguments"], attn_implementation="eager")
    torch.manual_seed(0)
    self.model = self.kind(config).float().eval()
    with torch.no_grad():
      for value in self.model.parameters():
        randomize(value)
    self.model.save_pretrained(folder)

  def logits(self, model):
    tokens = torch.from_numpy(self.example.tokens).long()
    inputs = {name: torch.from_numpy(value) for name, value in self.example.inputs.items()}
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits


@cache
def folder_of(case, root):
  return Reference(case, Path(root) / case)


@pytest.fixture
def reference(case, tmp_path_factory):
  return folder_of(case, tmp_path_factory.getbasetemp() / "multimodal")


def ours(reference, **changes):
  keys = keys_of_folder(HuggingFaceFolder(reference.folder))
  config = load_config(**(keys | RUN | changes))
  model = build_model(config, make_mesh(config, jax.devices()[:1]))
  return config, model, load_from_hugging_face(config, model, str(reference.folder))


def logits_of(model, params, example):
  decoder = model.bind(params)
  positions = jnp.broadcast_to(jnp.arange(LENGTH), example.tokens.shape)
  return decoder.logits(decoder.hidden(jnp.asarray(example.tokens), positions, media=example.media)[0])


@every_case
def test_logits_and_gradients(case, reference):
  config, model, params = ours(reference)
  theirs = reference.logits(reference.model)
  direction = np.random.default_rng(1).normal(size=theirs.shape).astype(np.float32)

  def loss(params):
    logits = logits_of(model, params, reference.example)
    return jnp.vdot(logits, direction), logits

  gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4)
  reference.model.zero_grad()
  (theirs * torch.from_numpy(direction)).sum().backward()
  wanted = {name: parameter.grad.numpy() for name, parameter in reference.model.named_parameters()}
  found = to_tensors(model, weight_table(config, model.spec), {n: np.asarray(g) for n, g in gradients.items()})
  assert len(found) >= len(wanted)
  for name, gradient in found.items():
    theirs_of = wanted[_in_memory(name, wanted)]
    np.testing.assert_allclose(gradient, theirs_of, atol=1e-4 * max(1.0, np.abs(theirs_of).max()), err_msg=name)


def _in_memory(name, known):
  """The parameter in the reference's modules that a tensor of its files is."""
  if name in known:
    return name
  tail = name.replace("language_model.model.", "language_model.").replace("vision_tower.vision_model.", "vision_tower.")
  (found,) = [other for other in known if other.endswith(tail)]
  return found


@every_case
def test_an_image_matters_to_all_tokens_after_it_and_its_own_ones(case, reference):
  _, model, params = ours(reference)
  plain = np.asarray(logits_of(model, params, reference.example))
  changed = {n: replace(t, inputs=t.inputs * 0.5) for n, t in reference.example.media.items()}
  other = replace(reference.example, media=changed)
  moved = np.abs(np.asarray(logits_of(model, params, other)) - plain).max(-1)
  assert (moved[0, :3] == 0).all()
  assert (moved[0, 3:] > 0).all()


@every_case
def test_the_reference_reads_what_is_written(case, reference, tmp_path):
  import json

  from safetensors.numpy import save_file

  config, model, params = ours(reference)
  tensors = to_tensors(model, weight_table(config, model.spec), {n: np.asarray(p) for n, p in params.items()})
  save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
  (tmp_path / "config.json").write_text(json.dumps(config_json_entries(config)))
  again, about = reference.kind.from_pretrained(tmp_path, output_loading_info=True)
  assert not about["missing_keys"]
  assert not about["unexpected_keys"]
  for (name, value), other in zip(again.named_parameters(), reference.model.parameters(), strict=True):
    assert torch.equal(value, other), name


@every_case
def test_encoders_are_frozen_unless_asked_for_and_projectors_are_not(case, reference):
  _, model, _ = ours(reference, freeze_vision_encoder_params=True)
  towers = {name for name in model.params if name.startswith("towers/")}
  assert towers
  assert all("/projector/" in name for name in towers)
  _, model, _ = ours(reference)
  assert not any(name.startswith("towers/") for name in model.buffers)


GEMMA3_ROWS = {"vocab_size": 262208, "override_model_config": True}  # 64 more than the text models: the image token's


# Parameters of the published files, with the encoders.
@pytest.mark.parametrize(
  ("name", "count", "changes"),
  [
    ("gemma3-4b", 4_300_079_472, GEMMA3_ROWS),
    ("gemma3-12b", 12_187_325_040, GEMMA3_ROWS),
    ("gemma3-27b", 27_432_406_640, GEMMA3_ROWS),
    ("llama4-17b-16e", 108_641_793_536, {}),
    ("llama4-17b-128e", 401_583_781_376, {}),
  ],
)
def test_parameter_counts_with_encoders(name, count, changes):
  config = load_config(name, use_multimodal=True, dataset_type="synthetic", **changes)
  assert abstract_model(config).size == count
