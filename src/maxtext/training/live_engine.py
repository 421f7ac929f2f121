"""Engines that use the arrays of the train state: for samples, for rollouts and for evaluation tasks.

Weights that are stored in a wider dtype than a step of rollouts reads are cast once for a call, and freed at its end.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from maxtext.configs import MaxTextConfig
from maxtext.data.tokenizers import TextTokenizer
from maxtext.models.model import Model, Params
from maxtext.training.program import Program

if TYPE_CHECKING:  # inference takes half a second to import, which runs without samples do not wait for
  from maxtext.inference.llm import LLM, RequestOutput
  from maxtext.inference.multimodal import PromptMedia
  from maxtext.inference.sampling import SamplingParams

_AXES = {"data", "fsdp", "tensor"}  # of a mesh on which the engine runs the model of training as it is
_OFF = {"enable_prefix_caching": False, "prefill_cache_dir": ""}


class LiveEngine:
  """Made, and compiled, with the first call. Its own memory is the KV cache of its slots, and, while it generates, of
  the weights that it casts.

  Args:
    config: of the run.
    model: the one that it runs; experts drop no token.
    tokenizer: of the run.
    sampling_params: those of requests that name none.
    slots: sequences at once, rounded up to a multiple of the number of devices.
    max_model_len: longest prompt with its output.
    max_prompt_len: longest prompt.
    multi_sampling: consecutive equal prompts are prefilled once.
    keep_routed_experts: outputs have the experts of their tokens.
  """

  def __init__(
    self,
    config: MaxTextConfig,
    model: Model,
    tokenizer: TextTokenizer,
    sampling_params: "SamplingParams",
    slots: int,
    max_model_len: int,
    max_prompt_len: int,
    multi_sampling: bool = False,
    keep_routed_experts: bool = False,
  ) -> None:
    from maxtext.inference.engine import dropless

    self._config = config.model_copy(update=_OFF | {"multi_sampling": multi_sampling})
    model = dropless(model)
    if keep_routed_experts:
      model = Model.of(model.spec, model.execution.replace(keep_routed_experts=True))
    self._model, self._tokenizer, self._sampling_params = model, tokenizer, sampling_params
    devices = self._model.execution.sharding.mesh.size
    self._slots, self._lengths = slots_on(devices, slots), (max_model_len, max_prompt_len)
    self._llm: LLM | None = None
    self._read: dict[str, jax.ShapeDtypeStruct] = {}
    self._lock = threading.Lock()

  def generate(
    self,
    params: Params,
    version: int,
    prompts: Sequence[Sequence[int]],
    sampling_params: "SamplingParams | Sequence[SamplingParams]",
    media: "Sequence[PromptMedia | None]" = (),
  ) -> "list[RequestOutput]":
    """Outputs with these parameters and buffers, which no step may take over meanwhile. Other threads wait. `media` are
    those of each prompt; empty where none has any."""
    from maxtext.inference.as_read import as_read, cast

    with self._lock:
      self._read = self._read or as_read(self._model)
      params = cast(params, self._read)
      if self._llm is None:
        self._llm = self._make(params)
      self._llm.engine.update_params(params, version)  # the train step has donated those that the engine had
      given = zip(map(list, prompts), media or [None] * len(prompts), strict=True)
      try:
        return self._llm.answer(list(given), sampling_params)
      finally:
        self._llm.engine.release()

  def _make(self, params: Params) -> "LLM":
    from maxtext.inference.engine import Engine
    from maxtext.inference.inference_model import InferenceModel
    from maxtext.inference.llm import LLM

    longest, prompt = self._lengths
    engine = Engine(self._model, params, slots=self._slots, max_model_len=longest, max_prompt_len=prompt)
    return LLM.of(InferenceModel(self._config, engine, self._tokenizer, self._sampling_params))


class LiveLLM:
  """The `LLM` that `maxtext eval` loads of a checkpoint, of the train state instead: with the same engine, so that its
  numbers are the same.

  Compiled with the first use. Between uses it has no memory.

  Args:
    config: of the run.
    model: the one that it runs; experts drop no token.
    tokenizer: of the run.
    folder: of the run, which may say what ends an output.
  """

  def __init__(self, config: MaxTextConfig, model: Model, tokenizer: TextTokenizer, folder: str) -> None:
    # One slot for each sequence of a micro-batch: the KV cache takes the place of the step's activations.
    room = {"max_prefill_predict_length": longest_prompt(config), "gradient_accumulation_steps": 1}
    self._config, self._model, self._tokenizer = config.model_copy(update=_OFF | room), model, tokenizer
    self._folder = folder
    self._llm: LLM | None = None

  @contextmanager
  def loaded(self, params: Params, version: int) -> Iterator["LLM"]:
    """The model with these parameters and buffers, which no step may take over meanwhile."""
    # `maxtext eval` takes matrices of one CPU apart, and their programs round otherwise.
    params = self._model.unstack_layers(dict(params)) if self._model.turned else params
    if self._llm is None:
      self._llm = self._make(params)
    self._llm.engine.update_params(params, version)
    try:
      yield self._llm
    finally:
      self._llm.engine.release(slots=True)

  def _make(self, params: Params) -> "LLM":
    from maxtext.inference.engine import dropless
    from maxtext.inference.inference_model import InferenceModel, default_stop_token_ids, make_engine
    from maxtext.inference.llm import LLM
    from maxtext.inference.sampling import SamplingParams
    from maxtext.weights.generation_config import end_token_ids

    ends = default_stop_token_ids(self._tokenizer, end_token_ids(self._folder))
    sampling_params = replace(SamplingParams.of(self._config), stop_token_ids=ends)
    engine = make_engine(self._config, dropless(self._model), params)
    return LLM.of(InferenceModel(self._config, engine, self._tokenizer, sampling_params))


def longest_prompt(config: MaxTextConfig) -> int:
  """Most tokens of a prompt where all of a sequence may be scored."""
  return config.max_target_length - 1


def slots_on(devices: int, slots: int) -> int:
  """So many slots, rounded up to a multiple of the number of devices."""
  return -(-slots // devices) * devices


def engine_problem(program: Program) -> str:
  """Why the engine cannot run the model of training with the trainer's arrays; empty where it can."""
  if jax.process_count() > 1:
    return f"they are for runs of one process, and this one has {jax.process_count()}."
  return model_problem(program)


def model_problem(program: Program) -> str:
  """Why the engine cannot run the model of training, wherever its arrays are; empty where it can."""
  c, sharding = program.config, program.model.execution.sharding
  axes = {name: size for name, size in sharding.mesh.shape.items() if size > 1 and name not in _AXES}
  if axes:
    return f"they are for meshes of {', '.join(sorted(_AXES))}, and this one has {axes}."
  for key, set_to in {
    "shard_mode=explicit": sharding.explicit,
    "parameter_memory_host_offload=true": c.parameter_memory_host_offload,
    "enable_diloco=true": c.enable_diloco,
  }.items():
    if set_to:
      return f"they are not for {key}."
  return ""
