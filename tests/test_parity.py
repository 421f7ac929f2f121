"""Every family equals its reference: `tests/data/tiny_models.json` names a tiny reference and our keys for each.

A family's file is found by itself, and without a tiny model of its own it fails here. `-k gemma3` runs one of them.
"""

import copy
import json
from functools import cache, cached_property
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext import load_config
from maxtext.models.build import FAMILIES, weight_table
from maxtext.training.objectives.base import Models, StepContext
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.weights.tensor_layout import from_tensors, to_tensors
from tests.cases import cases
from tests.support import program, random_batch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parity

CASES = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
LENGTH = 24  # longer than the windows and chunks of the tiny models
RUN = {"max_target_length": LENGTH, "per_device_batch_size": 1, "dataset_type": "synthetic", "jax_cache_dir": ""}

QUICK = ("llama", "deepseek3")  # the quick run takes these; `-k` finds any other
every_case = pytest.mark.parametrize("case", cases(CASES, QUICK))

# What the gate takes where families differ by their blocks alone; `-m nightly` takes the others.
UNROLLED = ("gemma3", "deepseek3")  # a cycle with a remainder, and two groups
# Attention with sinks, latent attention with an indexer, a delta net; experts. Dense ones are in test_parallelism.
MESHED = ("gpt_oss", "deepseek32", "qwen3_next")
LOW = ("gemma3", *MESHED)


def every_case_but_nightly(*gate):
  return pytest.mark.parametrize("case", cases(CASES, gate=gate))


def test_every_family_has_a_tiny_model():
  assert {case["keys"]["decoder_block"] for case in CASES.values()} == {block.value for block in FAMILIES}


def configure(case, **changes):
  return load_config(**(CASES[case]["keys"] | RUN | {"dtype": "float32"} | changes))


class Published:
  """A tiny model of transformers, every weight random: the usual initial values hide mistakes."""

  def __init__(self, about, folder):
    import transformers

    self.folder = folder
    config = getattr(transformers, about["config"])(**about["arguments"], attn_implementation="eager")
    config.pad_token_id = None  # a padding token's row would get no gradient
    torch.manual_seed(about.get("seed", 0))  # a router's near tie is a leap: some seeds have wider margins
    self.model = getattr(transformers, about["model"])(config).float().eval()
    stored = self.model.state_dict()
    with torch.no_grad():
      for value in (*self.model.parameters(), *(b for name, b in self.model.named_buffers() if name in stored)):
        randomize(value)
    self.model.get_input_embeddings().weight.data *= 10  # as large as what norms give: bfloat16 would be all noise
    self.tensors = self._saved("weights", self.model)

  def logits(self, tokens, dtype=None):
    return copy.deepcopy(self.model).to(dtype)(tokens).logits if dtype else self.model(tokens).logits

  def gradients(self, loss):
    """Named and laid out as the weights' files are."""
    model = copy.deepcopy(self.model)
    loss(lambda tokens: model(tokens).logits).backward()
    for parameter in model.parameters():
      parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return self._saved("gradients", model)

  def _saved(self, name, model):
    from safetensors.numpy import load_file

    model.save_pretrained(self.folder / name)
    tensors = load_file(self.folder / name / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("visual.", "audio_tower."))}


class Plain:
  """The same for a model that transformers does not have."""

  def __init__(self, about, folder):
    from tests.plain_models import MODELS

    shapes, self.forward = MODELS[about["plain"]]
    torch.manual_seed(about.get("seed", 0))
    self.values = {name: randomize(torch.ones(shape)) for name, shape in shapes().items()}
    self.values["model.embed_tokens.weight"] *= 10
    self.tensors = {name: value.numpy() for name, value in self.values.items()}

  def logits(self, tokens, dtype=torch.float32):
    return self.forward({name: value.to(dtype) for name, value in self.values.items()}, tokens)

  def gradients(self, loss):
    leaves = {name: value.clone().requires_grad_() for name, value in self.values.items()}
    loss(lambda tokens: self.forward(leaves, tokens)).backward()
    return {name: leaf.grad.numpy() for name, leaf in leaves.items()}


def randomize(value):
  """Vectors stay around what they start from: some norms scale by their weight, others by one more."""
  return value.copy_(torch.randn_like(value) * 0.1 + (value if value.ndim < 2 else 0.0))


class Reference:
  """What a case is compared with, computed once."""

  def __init__(self, case, folder):
    about = CASES[case]["reference"]
    self.batch = random_batch(configure(case), rows=4)
    self.model = (Plain if "plain" in about else Published)(about, folder)
    self.tensors = self.model.tensors
    self.inputs, self.targets = (torch.from_numpy(np.array(t)).long() for t in (self.batch.inputs, self.batch.targets))

  @cached_property
  def logits(self):
    return self.model.logits(self.inputs).detach().numpy()

  @cached_property
  def low_logits(self):
    """In bfloat16."""
    return self.model.logits(self.inputs, torch.bfloat16).detach().float().numpy()

  @cached_property
  def gradients(self):
    def loss(logits):
      each = torch.nn.functional.cross_entropy(
        logits(self.inputs).flatten(0, 1), self.targets.flatten(), reduction="none"
      )
      return (each * torch.from_numpy(self.batch.weights).flatten()).sum()

    return self.model.gradients(loss)


@pytest.fixture(scope="session")
def references(tmp_path_factory):
  return cache(lambda case: Reference(case, tmp_path_factory.mktemp(case)))


def loaded(config, reference, devices=1):
  """A model with the reference's weights."""
  model = program(config, devices).model
  params = from_tensors(model, weight_table(config, model.spec), reference.tensors)
  return model, {name: jax.device_put(value, model.struct(name).sharding) for name, value in params.items()}


def run(model, params, batch):
  """Logits, and the gradients of the loss."""

  @jax.jit
  def both(params):
    trained = {name: params[name] for name in model.params}

    def loss(trained):
      return LanguageModeling()(Models(model.bind(params | trained)), batch, StepContext())[0]

    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0]), jax.grad(loss)(trained)

  return both(params)


def relative(a, b):
  return float(np.linalg.norm(np.asarray(a, np.float64) - b) / (np.linalg.norm(b) or 1.0))


def check(config, reference, devices=1):
  model, params = loaded(config, reference, devices)
  logits, gradients = run(model, params, reference.batch)
  np.testing.assert_allclose(logits, reference.logits, atol=1e-4, rtol=0)
  expected = from_tensors(model, weight_table(config, model.spec), reference.gradients)
  wrong = {name: relative(value, expected[name]) for name, value in gradients.items()}
  assert max(wrong.values()) < 1e-3, wrong


@every_case
def test_logits_and_gradients(case, references):
  check(configure(case), references(case))


@pytest.mark.slow
@every_case_but_nightly(*UNROLLED)
def test_logits_and_gradients_unrolled(case, references):
  check(configure(case, scan_layers=False), references(case))


@pytest.mark.slow
@every_case_but_nightly(*LOW)
def test_bfloat16(case, references):
  reference = references(case)
  model, params = loaded(configure(case, dtype="bfloat16"), reference)
  decoder = model.bind(params)
  logits = decoder.logits(decoder.hidden(reference.batch.inputs, reference.batch.positions)[0])
  ours, theirs = (
    np.median([relative(low, high) for low, high in zip(rows(found), rows(reference.logits), strict=True)])
    for found in (logits, reference.low_logits)
  )
  assert ours < 0.02
  assert ours < 1.25 * theirs, "transformers' own bfloat16 is nearer"


def rows(logits):
  """Of each token. Their median leaves out tokens that rounding sent to another expert, as happens in any code."""
  return np.asarray(logits).reshape(-1, logits.shape[-1])


@every_case
def test_tensors_go_out_as_they_came_in(case, references):
  reference = references(case)
  config = configure(case)
  model = program(config).model
  table = weight_table(config, model.spec)
  params = from_tensors(model, table, reference.tensors)
  back = to_tensors(model, table, params)
  assert back.keys() == reference.tensors.keys()
  for name, tensor in reference.tensors.items():
    assert back[name].shape == tensor.shape, name
    np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_every_tensor_is_accounted_for(references):
  reference, config = references("llama"), configure("llama")
  model, tensors = program(config).model, dict(reference.tensors)
  table = weight_table(config, model.spec)
  with pytest.raises(ValueError, match="no parameter takes: extra"):
    from_tensors(model, table, tensors | {"extra": np.zeros(1)})
  del tensors["model.layers.1.mlp.up_proj.weight"]
  with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
    from_tensors(model, table, tensors)


@pytest.mark.slow
@pytest.mark.mesh
@every_case_but_nightly(*MESHED)
def test_on_a_mesh(case, references):
  """FSDP by tensors, and by experts where there are any."""
  experts = 2 if CASES[case]["keys"].get("num_experts", 1) > 1 else 1
  sizes = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": experts}
  check(configure(case, **sizes), references(case), devices=4 * experts)
