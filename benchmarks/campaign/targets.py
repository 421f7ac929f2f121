"""The operations that faults strike: what is there before, the operation, and what must hold after a fault.

An operation is started again after a fault, as a user would, and then all must be as if nothing had happened.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from benchmarks.campaign.child import WrongError
from maxtext import load_config
from maxtext.checkpoint.stream import StreamReader
from maxtext.cli.main import main
from maxtext.weights.tensor_files import make_header, write_file

MODEL: dict[str, Any] = {
  "vocab_size": 64, "base_emb_dim": 16, "base_mlp_dim": 16, "base_num_decoder_layers": 2, "base_num_query_heads": 2,
  "base_num_kv_heads": 2, "head_dim": 8, "max_target_length": 16, "per_device_batch_size": 2, "dtype": "float32",
  "dataset_type": "synthetic", "steps": 3, "enable_checkpointing": True, "checkpoint_period": 1, "log_period": 1,
}  # fmt: skip
STEPS = 4  # that the saving targets save; the first is there before


@dataclass(frozen=True)
class Target:
  """An operation. All functions take the folder in which it works; `inputs` is beside that and never written.

  Attributes:
    before: makes what is there when the operation begins.
    run: the operation; returns its exit code. Started again, it goes on.
    check: after a fault, raises where something is taken for whole that is not.
    done: raises where the result, after a start that nothing disturbed, is not what it is without faults.
  """

  before: Callable[[Path], None]
  run: Callable[[Path], int]
  check: Callable[[Path], None]
  done: Callable[[Path], None]

  def recover(self, folder: Path) -> None:
    """The next start after a fault, and all that is expected of it; raises where it is not so."""
    self.check(folder)
    if code := self.run(folder):
      raise WrongError(f"the next start ended with {code}")
    self.done(folder)


def make_inputs(folder: Path) -> None:
  """What the operations read: a Hugging Face folder, the same as a checkpoint of parameters, and a text."""
  _write_hugging_face(folder / "hf")
  _succeed(["convert", "from-hf", str(folder / "hf"), str(folder / "params")])
  lines = (json.dumps({"text": f"Document {n}. " + "All work and no play. " * (n % 7)}) for n in range(60))
  (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def _write_hugging_face(folder: Path) -> None:
  config = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "float32",
  }  # fmt: skip
  norms = ("input_layernorm", "post_attention_layernorm")
  products = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
  shapes = {"model.embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16), "model.norm.weight": (16,)}
  for n in range(2):
    shapes |= {f"model.layers.{n}.{name}.weight": (16,) for name in norms}
    shapes |= {f"model.layers.{n}.{name}.weight": (16, 16) for name in products}
  rng = np.random.default_rng(0)
  tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  folder.mkdir(parents=True)
  header = make_header({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
  write_file(folder / "model.safetensors", [header, *(tensor.tobytes() for tensor in tensors.values())])
  (folder / "config.json").write_text(json.dumps(config))


def _succeed(words: list[str]) -> None:
  if main(words):
    raise WrongError(f"maxtext {' '.join(words)} failed")


# Commands that make a folder.

_COMMANDS: Mapping[str, list[str]] = {
  "prepare": [
    "data", "prepare", "--from", "INPUTS/text.jsonl", "--to", "OUT", "--workers", "1", "--shard-megabytes", "0.001",
    "--held-out", "0.05", "--train-tokenizer", "vocab_size=300",
  ],
  "convert from-hf": ["convert", "from-hf", "INPUTS/hf", "OUT"],
  "convert to-hf": ["convert", "to-hf", "INPUTS/params", "OUT", "--shard-gigabytes", "2e-6"],
  "quantize int8": ["quantize", "INPUTS/params", "OUT", "--format", "int8"],
  "quantize nf4": ["quantize", "INPUTS/hf", "OUT", "--format", "nf4", "--block", "8"],
  "export-params": ["checkpoint", "export-params", "INPUTS/params", "OUT"],
}  # fmt: skip


def _command(words: list[str], folder: Path) -> list[str]:
  places = {"OUT": str(folder / "out"), "INPUTS": str(_inputs(folder))}
  return [word.replace("INPUTS", places["INPUTS"]).replace("OUT", places["OUT"]) for word in words]


def _inputs(folder: Path) -> Path:
  return next(parent / "inputs" for parent in folder.parents if (parent / "inputs").is_dir())


def _made(name: str) -> Target:
  words = _COMMANDS[name]

  def run(folder: Path) -> int:
    from maxtext.checkpoint import stream

    stream._IN_FLIGHT = 1000  # bytes, for so small a model: a block is noted at a time
    return 0 if _whole(folder / "out") else main(_command(words, folder))

  def check(folder: Path) -> None:
    if _whole(folder / "out") and (problem := _difference(folder / "out", _inputs(folder) / "whole" / name / "out")):
      raise WrongError(f"{name}: there is an output, and {problem}")

  def done(folder: Path) -> None:
    if not _whole(folder / "out"):
      raise WrongError(f"{name}: there is no output")
    check(folder)
    left = {path.name for path in folder.rglob("*") if "unfinished" in path.name}
    if left:
      raise WrongError(f"{name}: it leaves {left}")

  def before(folder: Path) -> None:
    folder.mkdir()
    whole = _inputs(folder) / "whole" / name
    whole.mkdir(parents=True)
    _succeed(_command(words, whole))

  return Target(before, run, check, done)


def _whole(out: Path) -> bool:
  """Whether a reader would take the output: the name is the promise, for prepared text that of the manifest."""
  return out.exists() and (
    (out / "manifest.json").exists() or (not (out / ".unfinished").exists() and any(out.iterdir()))
  )


def _difference(out: Path, expected: Path) -> str:
  """What differs, arrays by their bits and other files by their bytes; empty where nothing does."""
  if (expected / "record").exists():
    ours, theirs = _arrays(out), _arrays(expected)
  else:
    ours, theirs = ({f.name: f.read_bytes() for f in sorted(d.iterdir()) if f.is_file()} for d in (out, expected))
    ours.pop("journal", None)  # beside a whole output it only takes room
  if ours.keys() != theirs.keys():
    return f"it has {sorted(ours)} instead of {sorted(theirs)}"
  return next((f"{name} differs" for name in ours if ours[name] != theirs[name]), "")


def _arrays(folder: Path) -> dict[str, bytes]:
  reader = StreamReader(epath.Path(folder))
  found = {name: reader.read(name, (), len(reader.stored_shape(name))).tobytes() for name in sorted(reader.parameters)}
  reader.check(reader.take_sums())
  return found


# Saves of a run, whose state and data-iterator state tell the step.


def _state(step: int) -> dict[str, Any]:
  import jax

  return jax.device_put(_values(step))  # nothing to compile


def _values(step: int) -> dict[str, Any]:
  return {"params": {"a": np.full((8, 4), step, np.float32)}, "step": np.int32(step)}


def _position(step: int) -> dict[str, Any]:
  return {"batches": np.int32(step)}


def _abstract() -> Any:
  import jax

  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), _values(0))


def _expect_state(found: Any, least: int) -> int:
  """The step that was restored: state and data must be those of one step."""
  import jax

  if found is None:
    raise WrongError("there is no step to resume from")
  step = int(found.folder.name)
  same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), found.state, _values(step))
  if not all(jax.tree.leaves(same)):
    raise WrongError(f"the state of step {step} is not what was saved")
  if any((np.asarray(value) != found.position[name]).any() for name, value in _position(step).items()):
    raise WrongError(f"step {step} comes with the data of another step: documents are lost or repeated")
  if step < least:
    raise WrongError(f"step {step} is taken where step {least} was saved")
  return step


def _saves(**keys: Any) -> Target:
  def config() -> Any:
    return load_config(**MODEL | {"max_num_checkpoints_to_keep": 2} | keys)

  def resumed(folder: Path) -> Any:
    from maxtext.checkpoint.options import restore_options
    from maxtext.checkpoint.restore import resume

    return resume(restore_options(config()), epath.Path(folder / "checkpoints"), _abstract())

  def save(folder: Path, steps: range) -> int:
    from maxtext.checkpoint.options import checkpoint_options
    from maxtext.checkpoint.writer import Writer

    writer = Writer(checkpoint_options(config()), epath.Path(folder / "checkpoints"), {})
    for step in steps:
      writer.save(step, _state(step), _position(step))
    writer.wait()
    failed = writer.last != steps[-1] if steps else False
    writer.close()
    return int(failed)

  def run(folder: Path) -> int:
    return save(folder, range(_expect_state(resumed(folder), 1) + 1, STEPS + 1))

  def check(folder: Path) -> None:
    _expect_state(resumed(folder), 1)
    _expect_no(folder, "damaged", "nonfinite", "unproven", "orbax-checkpoint-tmp")

  def done(folder: Path) -> None:
    _expect_state(resumed(folder), STEPS)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    if names != [str(step) for step in range(STEPS - 1, STEPS + 1)]:
      raise WrongError(f"it keeps {names}")

  def before(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    save(folder, range(1, 2))

  return Target(before, run, check, done)


def _local_saves() -> Target:
  def resumed(folder: Path) -> Any:
    from maxtext.checkpoint.local import resume_locally

    return resume_locally(epath.Path(folder / "process-0"), _abstract(), 0)

  def save(folder: Path, steps: range) -> int:
    from maxtext.checkpoint.local import LocalWriter
    from maxtext.checkpoint.options import local_checkpoint_options

    keys = {
      "enable_emergency_checkpoint": True,
      "local_checkpoint_directory": str(folder),
      "local_checkpoint_period": 1,
    }
    writer = LocalWriter(local_checkpoint_options(load_config(**MODEL | keys)), epath.Path(folder / "process-0"))
    for step in steps:
      writer.save(step, _state(step), _position(step))
    writer.close()
    return 0 if not steps or (folder / "process-0" / str(steps[-1])).exists() else 1

  def run(folder: Path) -> int:
    return save(folder, range(_expect_state(resumed(folder), 1) + 1, STEPS + 1))

  def check(folder: Path) -> None:
    _expect_state(resumed(folder), 1)
    _expect_no(folder, "unused", "unfinished")

  def done(folder: Path) -> None:
    _expect_state(resumed(folder), STEPS)

  def before(folder: Path) -> None:
    (folder / "process-0").mkdir(parents=True)
    save(folder, range(1, 2))

  return Target(before, run, check, done)


def _expect_no(folder: Path, *words: str) -> None:
  if found := [str(path) for path in folder.rglob("*") if any(word in path.name for word in words)]:
    raise WrongError(f"it was said to be bad, or is left: {found}")


SAVES: Mapping[str, Target] = {
  "save": _saves(),
  "save without OCDBT": _saves(checkpoint_storage_use_ocdbt=False),
  "save, synchronous": _saves(async_checkpointing=False),
  "local save": _local_saves(),
}
MADE: Mapping[str, Target] = {name: _made(name) for name in _COMMANDS}
WRITERS: Mapping[str, Target] = SAVES | MADE
COMMANDS: Mapping[str, Target] = MADE
