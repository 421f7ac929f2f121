"""Names of operations for readers, from the functions that the compiled program says they were traced in."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePosixPath

from maxtext.planner.hlo import Caller

RECOMPUTED = "rematted_computation"
"""In the names of operations that the forward pass had computed already."""
_LOSS, _ATTENTION, _OPTIMIZER = "logits and loss", "attention kernel", "optimizer update"

# By function, file or folder. A file of `layers/` that is not here is named as it is: "expert dispatch", "router".
NAMES: Mapping[str, str] = {
  "kernels/attention.py": _ATTENTION,
  "kernels/cross_entropy.py": _LOSS,
  "kernels/splash_attention.py": _ATTENTION,
  "layers/attention.py:GroupedQueryAttention._out": "attention output",
  "layers/attention.py:GroupedQueryAttention._project": "attention query, key and value",
  "layers/block.py": "residual",
  "layers/context.py": "rotary embedding",
  "layers/expert_parallel.py": "expert dispatch",
  "layers/experts.py:ExpertMLP._hidden": "expert gate and up",
  "layers/experts.py:ExpertMLP.__call__": "expert down",
  "layers/mla.py": "latent attention",
  "layers/mla.py:LatentAttention._up_project": "latent attention key and value",
  "layers/mlp.py:MLPLayer._hidden": "MLP gate and up",
  "layers/mlp.py:MLPLayer.__call__": "MLP down",
  "layers/mtp.py": "multi-token prediction",
  "layers/rope.py": "rotary embedding",
  "layers/stack.py": "layer loop",
  "models/decoder.py": "decoder",
  "models/decoder.py:Decoder.logits": _LOSS,
  "optim": _OPTIMIZER,
  "training/objectives": _LOSS,
  "training/step.py": _OPTIMIZER,
  "training/step.py:gradients": "gradients",
}

# By a part of the name in the traced program; recomputation is a part of the backward pass.
_PASSES = {RECOMPUTED: ", again", "transpose(": ", backward"}
# Every layer passes through these files, so they say nothing about where an operation comes from.
_PASSED_THROUGH = frozenset(
  {
    "layers/execution.py",
    "layers/matmul.py",
    "layers/matmul_call.py",
    "kernels/attention_matmuls.py",
    "mesh/explicit.py",
    "mesh/reduce_scatter.py",
  }
)
PARTS = frozenset(
  f"layers/{name}.py"
  for name in ("dora", "linear", "lora", "quantized_matmul", "quantized_weight", "sparse_matmul", "weight_format")
)
"""Files of layers that other layers are made of, whose names are those of the others."""


def operation_name(op_name: str, stack: Sequence[Caller]) -> str:
  """The name of an operation, with its pass if it is not the forward pass.

  Args:
    op_name: its name in the traced program.
    stack: the functions it was traced in, innermost first.
  """
  files = ((file, [caller.function for caller in callers]) for file, callers in groupby(stack, lambda c: c.file))
  name = next((name for file, functions in files if (name := _name_in(file, functions))), "added by the compiler")
  return name + next((suffix for part, suffix in _PASSES.items() if part in op_name), "")


def source_lines(stack: Sequence[Caller]) -> str:
  """The innermost source line, and its caller's in another file."""
  lines: dict[str, int] = {}
  for caller in [c for c in stack if c.file not in _PASSED_THROUGH] or stack:
    lines.setdefault(caller.file, caller.line)
  return " < ".join(f"{file}:{line}" for file, line in [*lines.items()][:2])


def _name_in(file: str, functions: Sequence[str]) -> str | None:
  """The name that a file gives by functions of it that call each other, innermost first."""
  path = PurePosixPath(file)
  if file in _PASSED_THROUGH or file in PARTS:
    return None
  own = path.stem.replace("_", " ") if path.parent.name == "layers" else None
  keys = (*(f"{file}:{function}" for function in functions), file, str(path.parent))
  return next((NAMES[key] for key in keys if key in NAMES), own)
