"""Knowledge distillation: a student learns the teacher's distribution of the next token beside the token itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import compares_features, training_steps
from maxtext.data.batch import Batch
from maxtext.data.options import media_options
from maxtext.data.teacher_outputs import TEACHER_LOG_PROBS, TEACHER_TOKENS
from maxtext.kernels.cross_entropy import cross_entropy, tiled
from maxtext.kernels.divergence import kl_divergence, top_k_kl_divergence
from maxtext.layers.block import MIXER_OUTPUT
from maxtext.models.build import model_spec
from maxtext.models.spec import DecoderSpec
from maxtext.training.objectives.base import (
  BATCH,
  LENGTH,
  Field,
  FrozenModel,
  Metrics,
  Models,
  Objective,
  StepContext,
  token_batch,
)
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.teacher import TEACHER, saved_outputs, teacher_config


@dataclass(frozen=True)
class Ramp:
  """A value that goes to another one over a run.

  Attributes:
    start: at step 0.
    end: after the last step.
    steps: of the run.
    shape: of the way between.
  """

  start: float
  end: float | None = None
  steps: int = 1
  shape: Literal["constant", "linear", "cosine"] = "constant"

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    """The value after so many steps."""
    return jnp.asarray(_SHAPES[self.shape](self)(step), jnp.float32)

  @property
  def is_zero(self) -> bool:
    """Whether it is 0 throughout."""
    return self.start == 0 and (self.shape == "constant" or not self.end)


def _cosine(ramp: Ramp) -> optax.Schedule:
  assert ramp.end is not None, "checked with the configuration"
  start, end = ramp.start, ramp.end
  half = optax.cosine_decay_schedule(1.0, ramp.steps)
  return lambda step: end + (start - end) * half(step)


def _linear(ramp: Ramp) -> optax.Schedule:
  assert ramp.end is not None, "checked with the configuration"
  return optax.linear_schedule(ramp.start, ramp.end, ramp.steps)


_SHAPES: Mapping[str, Callable[[Ramp], optax.Schedule]] = {
  "constant": lambda ramp: optax.constant_schedule(ramp.start),
  "linear": _linear,
  "cosine": _cosine,
}


@dataclass(frozen=True)
class KnowledgeDistillation(Objective):
  """alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy + beta * distance of features, for each target.

  Losses of layers and of multi-token prediction are added whole.

  Attributes:
    teacher: the frozen model; None where the data brings its likeliest tokens (`TeacherOutputs`).
    labels: the loss of the targets, and what is added to it.
    alpha: weight of the teacher's distribution.
    temperature: T, which divides the logits of both models.
    beta: weight of the features: the outputs of attention, or of what a layer has in its place.
    feature_loss: how features are compared.
    layers: whose features are compared; None is all.
    top_k: tokens of the teacher that the data brings for each target.
    vocab_size: tokens that these distributions are of.
  """

  teacher: FrozenModel | None
  labels: LanguageModeling
  alpha: Ramp = Ramp(0.5)
  temperature: Ramp = Ramp(1.0)
  beta: Ramp = Ramp(0.0)
  feature_loss: Literal["cosine", "l2"] = "cosine"
  layers: tuple[int, ...] | None = None
  top_k: int = 0
  vocab_size: int = 0

  @staticmethod
  def is_chosen(config: MaxTextConfig) -> bool:
    """Whether a run has a teacher that counts. Where alpha and beta are 0 for the whole run, and neither its data nor
    its first weights come from a teacher, it is plain training."""
    alpha, _, beta = _ramps(config)
    if config.offline_data_dir:
      return True
    starts = bool(config.distill_weights_copy_map) or config.learn_to_init_mode
    return bool(config.teacher_overrides) and (starts or not (alpha.is_zero and beta.is_zero))

  @staticmethod
  def of(config: MaxTextConfig) -> "KnowledgeDistillation":
    """As configured.

    Raises:
      ConfigError: the teacher's configuration is wrong, or has features that cannot be compared with the student's.
    """
    c, saved = config, saved_outputs(config)
    teacher = None if saved else teacher_config(config)
    if teacher is not None and media_options(c) is not None and not teacher.use_multimodal:
      raise ConfigError("use_multimodal=true: the teacher is a model of text: leave use_multimodal out for both.")
    if teacher is not None and compares_features(c):
      _check_features(c, model_spec(c), model_spec(teacher))
    return KnowledgeDistillation(
      None if teacher is None else FrozenModel(teacher),
      LanguageModeling(c.z_loss_multiplier, c.num_vocab_tiling, c.mtp_loss_scaling_factor),
      *_ramps(c),
      c.distill_feature_loss_type,
      None if c.distill_layer_indices is None else tuple(c.distill_layer_indices),
      saved.saved.top_k if saved else 0,
      saved.saved.vocab_size if saved else 0,
    )

  def batch(self, rows: int, length: int) -> Any:
    """The batch of the configured data, with the teacher's likeliest tokens where there is no teacher."""
    declared = token_batch(rows, length)
    if self.teacher is not None:
      return declared
    tokens, log_probs = (
      Field((rows, length, self.top_k), dtype, (BATCH, LENGTH, None)) for dtype in (jnp.int32, jnp.float32)
    )
    return replace(declared, extra={TEACHER_TOKENS: tokens, TEACHER_LOG_PROBS: log_probs})

  @property
  def frozen(self) -> Mapping[str, FrozenModel]:
    """The teacher."""
    return {} if self.teacher is None else {TEACHER: self.teacher}

  def __call__(self, models: Models, batch: Batch, context: StepContext) -> tuple[jax.Array, Metrics]:
    """The sum over all targets, each times its weight."""
    student = models.decoder
    alpha, temperature, beta = (ramp(context.step) for ramp in (self.alpha, self.temperature, self.beta))
    hidden, auxiliary, _ = student.hidden(
      batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
    )
    compare, known, teacher_auxiliary = self._compared(models, batch, temperature)

    def of_tile(hidden: jax.Array, targets: jax.Array, *known: jax.Array) -> dict[str, jax.Array]:
      """Logits, of both models, exist for one tile at a time."""
      ours, z_loss = student.logits(hidden), self.labels.z_loss
      hard = cross_entropy(ours, targets, 0.0)
      z = {"z_loss": cross_entropy(ours, targets, z_loss) - hard} if z_loss else {}
      return {"hard_loss": hard, **z, **compare(ours, targets, *known)}

    tokens = tiled(of_tile, self.labels.tiles, hidden, batch.targets, *known)
    tokens["soft_loss"] = jnp.square(temperature) * tokens["kl"]
    losses = alpha * tokens["soft_loss"] + (1.0 - alpha) * tokens["hard_loss"] + tokens.get("z_loss", 0.0)
    if not self.beta.is_zero:
      tokens["feature_loss"] = self._distance(auxiliary, teacher_auxiliary)
      losses = losses + beta * tokens["feature_loss"]
    further, metrics = self.labels.further_losses(student, hidden, auxiliary, batch)
    weight = self.weight(batch)
    schedule = {"distill_alpha": alpha, "distill_temperature": temperature, "distill_beta": beta}
    ramped = {name: schedule[name] * weight for name, ramp in self._ramped.items() if ramp.shape != "constant"}
    own = {name: (values * batch.weights).sum() for name, values in tokens.items()}
    return (losses * batch.weights).sum() + further, metrics | own | ramped

  def _compared(
    self, models: Models, batch: Batch, temperature: jax.Array
  ) -> tuple[Callable[..., dict[str, jax.Array]], tuple[jax.Array, ...], list[Any]]:
    """The function that compares a tile of the student's logits with the teacher, its other arguments, and the
    teacher's auxiliary outputs."""
    if self.teacher is None:

      def compare_saved(ours: jax.Array, _: jax.Array, tokens: jax.Array, log_probs: jax.Array) -> dict[str, jax.Array]:
        return {"kl": top_k_kl_divergence(ours, tokens, log_probs, temperature, self.vocab_size)}

      return compare_saved, (batch.extra[TEACHER_TOKENS], batch.extra[TEACHER_LOG_PROBS]), []
    teacher = models.frozen[TEACHER]
    read, auxiliary, _ = jax.lax.stop_gradient(
      teacher.hidden(
        batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
      )
    )

    def compare(ours: jax.Array, targets: jax.Array, read: jax.Array) -> dict[str, jax.Array]:
      theirs = jax.lax.stop_gradient(teacher.logits(read))
      return {"kl": kl_divergence(ours, theirs, temperature), "teacher_loss": cross_entropy(theirs, targets, 0.0)}

    return compare, (read,), auxiliary

  def tokens(self, batch: Batch) -> jax.Array:
    """Tokens that the model reads, also those without a weight in the loss."""
    return self.labels.tokens(batch)

  @property
  def _ramped(self) -> dict[str, Ramp]:
    return {"distill_alpha": self.alpha, "distill_temperature": self.temperature, "distill_beta": self.beta}

  def _distance(self, student: list[Any], teacher: list[Any]) -> jax.Array:
    """The mean distance [B,S] over the layers, from the auxiliary outputs of both decoders."""
    pairs = zip(features(student, self.layers), features(teacher, self.layers), strict=True)
    distances = [
      _DISTANCES[self.feature_loss](ours.astype(jnp.float32), jax.lax.stop_gradient(theirs).astype(jnp.float32))
      for ours, theirs in pairs
    ]
    return sum(distances, jnp.zeros(())) / len(distances)


def features(auxiliary: list[Any], layers: tuple[int, ...] | None) -> list[jax.Array]:
  """The outputs of attention [B,S,E] of some layers, or of all, from the auxiliary outputs of a decoder."""
  found = [(layer[MIXER_OUTPUT], repeat) for cycle in auxiliary for repeat in range(_repeats(cycle)) for layer in cycle]
  chosen = found if layers is None else [found[layer] for layer in layers]
  return [outputs[repeat] for outputs, repeat in chosen]


def _repeats(cycle: list[Any]) -> int:
  return cycle[0][MIXER_OUTPUT].shape[0]


def _cosine_distance(a: jax.Array, b: jax.Array) -> jax.Array:
  return 1.0 - optax.losses.cosine_similarity(a, b, epsilon=1e-8)


def _mean_squared_error(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.square(a - b).mean(-1)


_DISTANCES = {"cosine": _cosine_distance, "l2": _mean_squared_error}


def _ramps(config: MaxTextConfig) -> tuple[Ramp, Ramp, Ramp]:
  """alpha, temperature, beta."""
  c, steps = config, max(training_steps(config), 1)
  return (
    Ramp(c.distill_alpha, c.distill_alpha_end, steps, c.distill_alpha_schedule),
    Ramp(c.distill_temperature, c.distill_temperature_end, steps, c.distill_temperature_schedule),
    Ramp(c.distill_beta, c.distill_beta_end, steps, c.distill_beta_schedule),
  )


def _check_features(config: MaxTextConfig, student: DecoderSpec, teacher: DecoderSpec) -> None:
  if student.width != teacher.width:
    raise ConfigError(
      f"distill_beta={config.distill_beta} compares layers of one width: the student's is {student.width}, the "
      f"teacher's {teacher.width}. Leave it out."
    )
  ours, theirs = (sum(len(group.cycle) * group.repeats for group in spec.groups) for spec in (student, teacher))
  indices = config.distill_layer_indices
  if indices is None and ours != theirs:
    raise ConfigError(
      f"distill_beta={config.distill_beta} compares layer by layer, and the student has {ours} layers, the teacher "
      f"{theirs}: name the layers with distill_layer_indices."
    )
  most = min(ours, theirs) - 1
  if indices == []:
    raise ConfigError("distill_layer_indices=[] names no layer: leave it out for all, or name some.")
  for index in indices or ():
    if not isinstance(index, int) or not 0 <= index <= most:
      raise ConfigError(f"distill_layer_indices={indices}: {index} must be a layer of both models, 0 to {most}.")
