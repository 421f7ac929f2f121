"""Rollout routing replay: the trainer routes every token to the experts that the engine chose for it, exactly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import load_config
from maxtext.inference.inference_model import load_run_tokenizer
from maxtext.inference.llm import RequestOutput
from maxtext.layers.router import ROUTED_EXPERTS
from maxtext.mesh.devices import make_mesh
from maxtext.models.model import Model
from maxtext.models.routed_experts import as_vectors, vector_size
from maxtext.rl.answers import AnswerGroup, rollout_sampling
from maxtext.rl.multi_turn import _Conversation
from maxtext.rl.outcomes import Outcomes
from maxtext.rl.policy_batch import as_batch, policy_arrays, policy_shares
from maxtext.rl.remote import _as_message, _output
from maxtext.rl.sampler import rollout_engine
from maxtext.rl.tasks import Task
from maxtext.rl.train_policy import policy_updates
from maxtext.rl.trajectory import Trajectory
from maxtext.training.program import Program
from tests.support import program, random_batch, tiny
from tests.test_rl import EXPERTS, keys
from tests.test_rl import folder as tasks_folder

folder = tasks_folder
DENSE_FIRST = {
  "decoder_block": "deepseek", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 80,
  "first_num_dense_layers": 1, "shared_experts": 1, "base_num_kv_heads": 4, "attention_type": "mla", "head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("changes", [EXPERTS, DENSE_FIRST], ids=["all layers", "dense first"])
def test_tokens_are_routed_as_told(changes):
  """Another choice than the router's own is taken, its weights have gradients, and a negative one is the router's."""
  config = tiny(**changes)
  p, batch = program(config), random_batch(config)
  model = Model.of(p.model.spec, p.model.execution.replace(keep_routed_experts=True))
  state = p.init()

  @jax.jit
  def forward(params, told):
    decoder = model.bind(params | state.buffers)
    hidden, auxiliary, _ = decoder.hidden(batch.inputs, batch.positions, routed_experts=told)
    return hidden, as_vectors(auxiliary)

  hidden, own = forward(state.params, None)
  layers = config.base_num_decoder_layers - config.first_num_dense_layers
  assert own.shape == (*batch.inputs.shape, vector_size(model.spec.groups)) == (*batch.inputs.shape, layers * 2)
  told = (own + 1) % config.num_experts
  changed, taken = forward(state.params, told)
  np.testing.assert_array_equal(taken, told)
  assert jnp.abs(changed - hidden).max() > 0.01
  half = told.at[:, ::2].set(-1)
  np.testing.assert_array_equal(forward(state.params, half)[1][:, 1::2], told[:, 1::2])
  for unknown in (jnp.full_like(own, -1), own):
    np.testing.assert_array_equal(forward(state.params, unknown)[0], hidden)
  gradients = jax.grad(lambda params: jnp.square(forward(params, told)[0]).mean())(state.params)
  [routers] = [g for path, g in gradients.items() if path.endswith("router/logits/weight")]
  assert jnp.abs(routers).max() > 0


class Rollouts:
  """Answers of an engine to prompts, and the trainer that they are for."""

  def __init__(self, folder, output, **changes):
    config = load_config(
      **keys(folder, output, max_target_length=24, max_prefill_predict_length=8, **EXPERTS, **changes)
    )
    updates = policy_updates(config, jax.devices()[:1])
    self.config = updates.config
    self.program = Program.of(self.config, make_mesh(self.config, updates.devices), updates.objective, data=())
    tokenizer = load_run_tokenizer(config)
    state, sampling = self.program.init(), rollout_sampling(config, tokenizer)
    self.params = state.params | state.buffers
    engine = rollout_engine(self.config, self.program, tokenizer, None)
    prompts = [list(range(2, 3 + i % 8)) for i in range(config.batch_size) for _ in range(config.num_generations)]
    each = [replace(sampling, seed=i) for i in range(len(prompts))]
    self.outputs = engine.generate(self.params, 0, prompts, each)
    answers, groups = [Trajectory.of(output) for output in self.outputs], config.num_generations
    self.groups = [
      AnswerGroup(Task("", one.prompt_token_ids, ""), answers[i : i + groups], {}, np.arange(groups) % 2.0)
      for i, one in enumerate(answers)
      if i % groups == 0
    ]
    shares = policy_shares(self.config, Outcomes.of(self.groups))
    self.arrays = policy_arrays(self.config, self.groups, np.zeros(shares.shape), shares)

  def trainer_choices(self, replay):
    """The experts [B,S,N] that the trainer routes tokens to, and the log-probabilities of its targets."""
    model = self.program.model
    model = Model.of(model.spec, model.execution.replace(keep_routed_experts=True))
    batch = as_batch(self.arrays)

    @jax.jit
    def forward(params, batch):
      decoder = model.bind(params)
      told = batch.extra[ROUTED_EXPERTS] if replay else None
      hidden, auxiliary, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments, routed_experts=told)
      scores = jax.nn.log_softmax(decoder.logits(hidden).astype(jnp.float32))
      return as_vectors(auxiliary), jnp.take_along_axis(scores, batch.targets[..., None], -1)[..., 0]

    return jax.device_get(forward(self.params, batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_chooses_what_the_engine_chose(folder, tmp_path, dtype):
  """For every token of prompts and answers, also where a prompt is shared or has a single token."""
  rollouts = Rollouts(folder, tmp_path, dtype=dtype)
  for output in rollouts.outputs:
    assert len(output.routed_experts) == len(output.prompt_token_ids) + len(output.token_ids) - 1
    assert 0 <= output.routed_experts.min() <= output.routed_experts.max() < EXPERTS["num_experts"]
  told, read = rollouts.arrays[ROUTED_EXPERTS], rollouts.arrays["segments"] > 0
  assert (told[read] >= 0).all()
  assert (told[~read] < 0).all()
  replayed, scores = rollouts.trainer_choices(replay=True)
  np.testing.assert_array_equal(replayed[read], told[read])
  own, _ = rollouts.trainer_choices(replay=False)
  assert (own[read] == told[read]).mean() > (0.99 if dtype == "bfloat16" else 0.9999)
  wrote = rollouts.arrays["weights"] > 0
  assert np.abs(scores - rollouts.arrays["sampled_log_probs"])[wrote].max() < (0.1 if dtype == "bfloat16" else 1e-5)


def test_choices_cross_the_border_of_a_process():
  routed = np.array([[1, 0], [-1, 3], [300, 2]], np.int16)
  output = RequestOutput((5, 6), "", (7, 8), "stop", (0, 0), (-0.5, -0.25), routed_experts=routed)
  np.testing.assert_array_equal(_output((5, 6), _as_message(output)).routed_experts, routed)
  assert _output((5, 6), _as_message(replace(output, routed_experts=None))).routed_experts is None


def test_turns_keep_the_choices_that_their_answers_came_from():
  first, second = (np.full((rows, 2), value, np.int16) for rows, value in ((3, 1), (7, 2)))
  one = _Conversation(Task("", (5, 6), ""), None, (5, 6))
  one.add_answer(RequestOutput((5, 6), "", (7, 8), "stop", (0, 0), (-0.5, -0.25), routed_experts=first))
  one.add((9, 9), is_generated=False)
  told = (5, 6, 7, 8, 9, 9)
  one.add_answer(RequestOutput(told, "", (7, 8), "stop", (0, 0), (-0.5, -0.25), routed_experts=second))
  np.testing.assert_array_equal(one.trajectory().routed_experts[:, 0], [1, 1, 1, 2, 2, 2, 2])


@pytest.mark.nightly
def test_what_differs_much_was_routed_otherwise(folder, tmp_path):
  """In bfloat16, without replay: tokens that rounding sends to other experts, and with it none."""
  rollouts = Rollouts(folder, tmp_path, dtype="bfloat16", num_generations=100)
  told, wrote = rollouts.arrays[ROUTED_EXPERTS], rollouts.arrays["weights"] > 0
  (own, plain), (_, replayed) = (rollouts.trainer_choices(replay) for replay in (False, True))
  sets = [np.sort(choices.reshape(*wrote.shape, -1, EXPERTS["num_experts_per_tok"])) for choices in (own, told)]
  otherwise = (sets[0] != sets[1]).any((-1, -2)) & (rollouts.arrays["segments"] > 0)
  alike = wrote & (otherwise.cumsum(1) == 0)
  differences = {
    "routed otherwise": np.abs(plain - rollouts.arrays["sampled_log_probs"])[wrote & otherwise],
    "nothing routed otherwise so far": np.abs(plain - rollouts.arrays["sampled_log_probs"])[alike],
    "all, replayed": np.abs(replayed - rollouts.arrays["sampled_log_probs"])[wrote],
  }
  print(f"\n{otherwise.sum()} of {(rollouts.arrays['segments'] > 0).sum()} tokens are routed otherwise")
  for name, found in differences.items():
    print(f"{name}: {found.size} tokens, mean {found.mean():.4f}, largest {found.max():.3f}")
  largest = {name: found.max() for name, found in differences.items()}
  assert largest["routed otherwise"] > 0.2
  assert largest["nothing routed otherwise so far"] < 0.05
  assert largest["all, replayed"] < 0.05
