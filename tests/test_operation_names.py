"""Names of operations: each row of the table is of a function that exists, and a compiled step is named by them."""

import ast
from collections import Counter
from pathlib import Path

import jax
import pytest

import maxtext
from maxtext import load_config
from maxtext.planner.hlo import Caller
from maxtext.planner.operation_names import NAMES, PARTS, operation_name, source_lines
from maxtext.planner.plan import plan
from maxtext.planner.text import as_text
from tests.support import TINY

PACKAGE = Path(maxtext.__file__).parent


def functions_of(file: Path) -> set[str]:
  """Functions, and methods with their classes."""
  body = ast.parse(file.read_text()).body
  methods = {f"{c.name}.{f.name}" for c in body if isinstance(c, ast.ClassDef) for f in c.body
             if isinstance(f, ast.FunctionDef)}  # fmt: skip
  return methods | {f.name for f in body if isinstance(f, ast.FunctionDef)}


@pytest.mark.parametrize("row", [*NAMES, *sorted(PARTS)])
def test_what_a_row_names_exists(row):
  file, _, function = row.partition(":")
  assert (PACKAGE / file).exists()
  assert not function or function in functions_of(PACKAGE / file)


MLP_STACK = [
  Caller("layers/matmul.py", "matmul", 9),
  Caller("layers/linear.py", "Linear._run", 93),
  Caller("layers/mlp.py", "MLPLayer._hidden", 65),
  Caller("layers/mlp.py", "MLPLayer.__call__", 62),
  Caller("layers/block.py", "DecoderBlock.__call__", 150),
  Caller("training/step.py", "gradients", 129),
]


@pytest.mark.parametrize(
  ("op_name", "stack", "name"),
  [
    ("jit(train_step)/jvp()/dot_general", MLP_STACK, "MLP gate and up"),
    ("jit(train_step)/transpose(jvp())/dot_general", MLP_STACK[3:], "MLP down, backward"),
    ("jit(train_step)/transpose(jvp())/checkpoint/rematted_computation/mul", MLP_STACK, "MLP gate and up, again"),
    ("jit(train_step)/jvp()/add", [Caller("layers/delta_net.py", "GatedDeltaNet.__call__", 1), *MLP_STACK[4:]],
     "delta net"),
    ("jit(train_step)/jvp()/add", MLP_STACK[4:], "residual"),
    ("jit(train_step)/add", [Caller("training/step.py", "make_train_step", 88)], "optimizer update"),
    ("", [], "added by the compiler"),
  ],
)  # fmt: skip
def test_an_operation_is_named_by_where_it_was_traced(op_name, stack, name):
  assert operation_name(op_name, stack) == name


def test_the_source_lines_are_of_two_files():
  assert source_lines(MLP_STACK) == "layers/linear.py:93 < layers/mlp.py:65"


@pytest.fixture
def little_effort():
  before = jax.config.values["jax_exec_time_optimization_effort"]
  jax.config.update("jax_exec_time_optimization_effort", -1.0)
  yield
  jax.config.update("jax_exec_time_optimization_effort", before)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize(
  ("keys", "labels"),
  [
    (
      {"compile_topology": "v6e-4"},
      {"embedding", "attention query, key and value", "attention kernel", "attention output", "MLP gate and up",
       "MLP down", "MLP gate and up, backward", "MLP down, backward", "attention kernel, backward", "logits and loss",
       "logits and loss, backward", "optimizer update", "norm", "rotary embedding"},
    ),
    pytest.param(
      {"compile_topology": "v5e-4", "decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2,
       "ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2},
      {"router", "expert dispatch", "expert gate and up", "expert down", "expert dispatch, backward",
       "expert down, backward"},
      marks=pytest.mark.nightly,
    ),
  ],
)  # fmt: skip
def test_a_compiled_step_has_names(keys, labels):
  pytest.importorskip("libtpu")
  found = plan(load_config(**TINY | {"attention": "dot_product"} | keys))
  seconds: Counter[str] = Counter()
  for o in found.estimate.operations:
    seconds[o.label] += o.seconds
  assert labels <= seconds.keys()
  assert seconds["added by the compiler"] < 0.1 * found.estimate.seconds
  first = found.most_expensive()[0]
  (line,) = (line for line in as_text(found).splitlines() if f"  {first.label}  " in line and first.source in line)
  assert f"{first.seconds / found.estimate.seconds:5.1%}" in line
