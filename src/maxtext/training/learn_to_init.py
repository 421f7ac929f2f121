"""Learn-to-init: the weights of a student are linear maps of those of its frozen teacher, and the maps are trained.

The state of such a run has the maps as parameters and the student's weights, which follow from them, as buffers. So its
checkpoints, evaluations and samples are those of an ordinary student.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from string import ascii_lowercase

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.parameter_paths import join
from maxtext.mesh.explicit import auto_axes, is_explicit
from maxtext.models.model import Model, Params
from maxtext.training.teacher import WeightSource, copied_weights, weight_sources

_ROWS = ("vocab", None)  # axes whose indices mean the same in both models: tokens, positions, taps of a convolution


@dataclass(frozen=True)
class LinearMap:
  """How a weight of the student follows from the teacher's of the same path.

  Attributes:
    weight: the student's.
    source: the teacher's.
    axes: the logical axes of both.
    stacked: number of leading dimensions (layers, experts); each index has maps of its own.
    taken: for dimensions that are indexed and not mapped, the teacher's index for each of the student's.
    factors: the dimensions that each map, by its name, is over.
    inputs: dimensions that a matmul contracts.
  """

  weight: jax.ShapeDtypeStruct
  source: jax.ShapeDtypeStruct
  axes: tuple[str | None, ...]
  stacked: int
  taken: Mapping[int, np.ndarray]
  factors: Mapping[str, tuple[int, ...]]
  inputs: tuple[int, ...]

  @staticmethod
  def of(path: str, student: Model, teacher: Model, general: bool) -> "LinearMap":
    """Maps of the input and of the output dimensions, or, if `general`, one map of all; a vector has one anyway."""
    weight, source, axes = student.struct(path), teacher.struct(path), student.logical_axes[path]
    stacked, contracted = student.contracted[path]
    mapped = [dim for dim in range(stacked, len(axes)) if axes[dim] not in _ROWS]
    inputs = tuple(dim for dim in mapped if dim < stacked + contracted)
    outputs = tuple(dim for dim in mapped if dim not in inputs)
    factors = {"whole": (*inputs, *outputs)} if general else {"input": inputs, "output": outputs}
    taken = {
      dim: np.arange(size) if dim >= stacked else _evenly_spaced(size, source.shape[dim])
      for dim, size in enumerate(weight.shape)
      if dim not in mapped and size != source.shape[dim]
    }
    used = {name: dims for name, dims in factors.items() if dims} or {"whole": ()}
    return LinearMap(weight, source, axes, stacked, taken, used, inputs)

  def __call__(self, maps: Mapping[str, jax.Array], source: jax.Array) -> jax.Array:
    """The student's weight. Where it has more rows than the teacher, they are zero."""
    found = source.astype(jnp.float32)
    for dim, index in self.taken.items():
      found = jnp.take(found, index, axis=dim, mode="fill", fill_value=0)
    old = ascii_lowercase[: found.ndim]
    for name, dims in self.factors.items():
      new = "".join(c.upper() if dim in dims else c for dim, c in enumerate(old))
      matrix = old[: self.stacked] + "".join(new[dim] for dim in dims) + "".join(old[dim] for dim in dims)
      found = jnp.einsum(f"{matrix},{old}->{new}", maps[name], found, precision="highest")
    return found.astype(self.weight.dtype)

  def first(self) -> dict[str, jax.Array]:
    """Maps that select evenly spaced indices: identities where sizes are equal. Copies of an input share its weight."""
    found = {}
    for name, dims in self.factors.items():
      letters = ascii_lowercase[: len(dims)]
      terms = ",".join(f"{c.upper()}{c}" for c in letters)
      selections = [self._selection(dim) for dim in dims] or [jnp.ones(())]
      value = jnp.einsum(f"{terms}->{letters.upper()}{letters}", *selections, precision="highest")
      found[name] = jnp.broadcast_to(value, self._shape(name))
    return found

  def structs(self, student: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """The maps, [stacked..., student's dimensions..., teacher's dimensions...] in float32, where they live."""
    sharding, found = student.execution.sharding, {}
    for name, dims in self.factors.items():
      own = (*self.axes[: self.stacked], *(self.axes[dim] for dim in dims))
      axes = (*own, *("embed", *[None] * len(dims))[: len(dims)])
      shape = self._shape(name)
      place = sharding.rules.sharding(sharding.mesh, axes, shape)
      found[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    return found

  def matrix(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a map that it contracts, and those that it makes."""
    first, count = self.stacked, len(self.factors[name])
    return tuple(range(first + count, first + 2 * count)), tuple(range(first, first + count))

  def _shape(self, name: str) -> tuple[int, ...]:
    dims = self.factors[name]
    sizes = (shape[dim] for shape in (self.weight.shape, self.source.shape) for dim in dims)
    return (*self.weight.shape[: self.stacked], *sizes)

  def _selection(self, dim: int) -> jax.Array:
    count, there = self.weight.shape[dim], self.source.shape[dim]
    index = _evenly_spaced(count, there)
    copies = np.bincount(index)[index] if dim in self.inputs else np.ones(count)
    return (index[:, None] == jnp.arange(there)) / jnp.float32(copies)[:, None]


@dataclass(frozen=True, eq=False)
class MappedModel(Model):
  """A student as its state has it: `params` are the maps, and its weights are among the `buffers`.

  Attributes:
    student: the ordinary model, whose `params` are the weights that follow from maps.
    maps: the maps of each weight that follows from them.
    fixed: the same for weights that do not train, and stay as their first maps make them.
    shared: weights that have the values of others.
  """

  student: Model
  maps: Mapping[str, LinearMap]
  fixed: Mapping[str, LinearMap]
  shared: Mapping[str, WeightSource]

  @property
  def matrices(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{path: (contracted dimensions, output dimensions)} of the maps."""
    return {
      _path(weight, name): one.matrix(name)
      for weight, one in self.maps.items()
      for name, dims in one.factors.items()
      if dims
    }

  def init(self, seed: jax.typing.ArrayLike) -> tuple[Params, Params]:
    """The first maps, and initial weights, which `first_weights` replaces."""
    params, buffers = self.student.init(seed)
    maps = {_path(weight, name): value for weight, one in self.maps.items() for name, value in one.first().items()}
    return maps, params | buffers

  def weights(self, maps: Params, teacher: Params) -> Params:
    """The weights that follow from the maps, among them those that are shared with such."""
    return self._placed(self._weights, self.student.params, maps, teacher)

  def first_weights(self, state: Params, teacher: Params) -> Params:
    """All weights before the first update but those that are copied, which `state` has beside the maps."""
    return self._placed(self._first_weights, {*self.maps, *self.fixed, *self.shared}, state, teacher)

  def _weights(self, maps: Params, teacher: Params) -> Params:
    found = {
      weight: one({name: maps[_path(weight, name)] for name in one.factors}, teacher[weight])
      for weight, one in self.maps.items()
    }
    return found | {path: source.of(found) for path, source in self.shared.items() if source.path in found}

  def _first_weights(self, state: Params, teacher: Params) -> Params:
    found = self._weights(state, teacher)
    found |= {weight: one(one.first(), teacher[weight]) for weight, one in self.fixed.items()}
    constant = {path: source for path, source in self.shared.items() if source.path not in self.maps}
    return found | {path: source.of(state | found) for path, source in constant.items()}

  def _placed(
    self, run: Callable[[Params, Params], Params], paths: Iterable[str], state: Params, teacher: Params
  ) -> Params:
    shardings = {path: self.student.struct(path).sharding for path in paths}
    found = auto_axes(run, shardings, state, teacher)
    explicit = is_explicit(self.student.execution.sharding.mesh)
    return found if explicit else jax.lax.with_sharding_constraint(found, shardings)


def mapped_model(config: MaxTextConfig, student: Model, teacher: Model) -> MappedModel:
  """The student of `learn_to_init_mode`, for a teacher on the same mesh.

  Raises:
    ConfigError: a weight of the student has no counterpart in the teacher, or the keys contradict each other.
  """
  ours, theirs = student.params | student.buffers, teacher.params | teacher.buffers
  copied, shared = copied_weights(config, ours, theirs), _shared_weights(config, ours)
  if both := copied.keys() & shared.keys():
    raise ConfigError(
      f"distill_student_weights_share_map: '{min(both)}' is also copied, by distill_weights_copy_map: leave one out."
    )
  found = {}
  for path in student.weight_names:
    if path not in copied and (path not in shared or shared[path].path == path):
      _check_counterpart(path, student, teacher)
      found[path] = LinearMap.of(path, student, teacher, config.lti_use_general_linear_map)
  maps = {path: one for path, one in found.items() if path in student.params}
  if not maps:
    raise ConfigError("learn_to_init_mode=true leaves nothing to train: distill_weights_copy_map names all weights.")
  moving = {*maps, *(path for path, source in shared.items() if source.path in maps)}
  student = replace(
    student,
    params={path: ours[path] for path in moving},
    buffers={path: struct for path, struct in ours.items() if path not in moving},
  )
  params = {_path(path, name): s for path, one in maps.items() for name, s in one.structs(student).items()}
  inherited = {field.name: getattr(student, field.name) for field in fields(Model)}
  inherited |= {"params": params, "buffers": ours}
  fixed = {path: one for path, one in found.items() if path not in maps}
  return MappedModel(**inherited, student=student, maps=maps, fixed=fixed, shared=shared)


def _shared_weights(config: MaxTextConfig, student: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, WeightSource]:
  key = "distill_student_weights_share_map"
  shared = weight_sources(key, config.distill_student_weights_share_map, student, student, "student")
  for path, source in shared.items():
    if source == WeightSource(path, None):
      raise ConfigError(f"{key}: '{path}' shares with itself. Name another weight, or its layers: [{path}, [0, 0]].")
    if source.path in shared and source.path != path:
      raise ConfigError(f"{key}: '{path}' shares with '{source.path}', which itself shares: name what that names.")
  return shared


def _check_counterpart(path: str, student: Model, teacher: Model) -> None:
  instead = "Name what it has in its place, in distill_weights_copy_map or distill_student_weights_share_map"
  if path not in teacher.weight_names:
    raise ConfigError(f"learn_to_init_mode=true: the teacher has no weight '{path}'. {instead}.")
  ours, theirs = ((model.logical_axes[path], model.contracted[path]) for model in (student, teacher))
  if ours != theirs:
    raise ConfigError(
      f"learn_to_init_mode=true: '{path}' has dimensions {list(ours[0])} in the student, and {list(theirs[0])} in the "
      f"teacher. {instead}, or take a teacher of the same family."
    )


def _evenly_spaced(count: int, there: int) -> np.ndarray:
  """So many of the indices that are there, from the first to the last."""
  return np.rint(np.linspace(0, there - 1, count)).astype(np.int32)


def _path(weight: str, name: str) -> str:
  """The path of a map in the state."""
  return join("maps", weight, name)
