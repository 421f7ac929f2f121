"""GRPO and its relatives beside TRL, for `benchmarks.trl`: runs of ours, and the same answers and rewards in TRL.

A run of ours is whole: the engine writes answers, and what it wrote and was rewarded with is written down. TRL gets
them through its `rollout_func`, and makes advantages, old and reference log-probabilities, losses and updates itself.
Its KL divergence is that of the GRPO paper here; by default TRL multiplies it by the ratio (`use_bias_correction_kl`).
"""

import json
import subprocess
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

from maxtext.rl.answers import Answerer, AnswerGroup
from maxtext.rl.run import train
from maxtext.training.callbacks.base import Callback
from maxtext.weights.resolve import resolve_source

UPDATES, RATE, PROMPTS, ANSWERS, LENGTH, TEMPERATURE = 10, 1e-3, 4, 8, 64, 0.8
COMPARED = ("loss", "grad_norm")

_CLIPPED = {"num_iterations": 2, "grpo_epsilon": 0.1, "epsilon_high": 0.15, "grpo_beta": 0.0}
_THEIRS_CLIPPED = {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.15, "beta": 0.0}
_NEAR, _THEIRS_NEAR = {"grpo_epsilon": 0.04, "epsilon_high": 0.06}, {"epsilon": 0.04, "epsilon_high": 0.06}
METHODS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
  "grpo": ({"grpo_beta": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
  "dr_grpo": (
    {"rl_advantage": "dr_grpo", "rl_aggregation": "fixed", "grpo_beta": 0.0},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
  ),
  "grpo, two updates": (_CLIPPED | {"grpo_beta": 0.1}, _THEIRS_CLIPPED | {"loss_type": "grpo", "beta": 0.1}),
  "dapo": (_CLIPPED | {"rl_aggregation": "token"}, _THEIRS_CLIPPED | {"loss_type": "dapo"}),
  "gspo": (
    _CLIPPED | _NEAR | {"loss_algo": "gspo-token"},
    _THEIRS_CLIPPED | _THEIRS_NEAR | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
  ),
  "cispo": (  # TRL's bound is that of the ratio, ours is that of how far it is above 1
    _CLIPPED | {"rl_aggregation": "token", "rl_clipping": "cispo"},
    _THEIRS_CLIPPED | {"loss_type": "cispo", "epsilon_high": 1.15},
  ),
}
"""Keys of ours and arguments of TRL's `GRPOConfig` for the same method."""


def compare_policies(python: str, work: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
  """What both report at each update, by method, from the Hugging Face folder `hf` in `work`.

  `keys` are those of the optimizer, which TRL is told in its own words in `benchmarks.trl`.
  """
  rows = [{"prompt": f"What is {i} times {i + 1}?" * (1 + i % 3), "answer": str(i * (i + 1))} for i in range(PROMPTS)]
  (work / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = {}
  for method, (ours, theirs) in METHODS.items():
    steps, batches = _train(method, work, {**keys, **ours})
    asked = {"folder": str(work / "hf"), "data": str(work), "batches": batches, "method": dict(theirs),
             "rate": RATE, "updates": UPDATES, "answers": ANSWERS, "length": LENGTH,
             "temperature": TEMPERATURE}  # fmt: skip
    done = subprocess.run(
      [python, "-c", _THEIRS], input=json.dumps(asked), capture_output=True, text=True, check=False, cwd=work
    )
    if done.returncode:
      raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    other = json.loads(done.stdout.splitlines()[-1])
    figures = {name: {"ours": [step[name] for step in steps], "theirs": other[name]} for name in COMPARED}
    lengths = [len(answer) for batch in batches for answer in batch["completion_ids"]]
    apart = {name: max(abs(a - b) for a, b in zip(*both.values(), strict=True)) for name, both in figures.items()}
    found[method] = figures | {
      "difference": apart["loss"],
      "gradient": apart["grad_norm"] / max(other["grad_norm"]),
      "clipped": max(step["ratio_clipped"] for step in steps),
      "lengths": [min(lengths), max(lengths)],
    }
  return found


class _Steps(Callback):
  def __init__(self) -> None:
    self.steps: list[dict[str, float]] = []

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self.steps.append(dict(metrics))


def _train(method: str, work: Path, keys: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
  """Our metrics of each update, and what was written for each batch. Answers end at common letters, so that they differ
  in length, and are rewarded for what they happen to be. Groups with equal rewards count, as they do in TRL."""
  own = {
    "use_grpo": True, "grain_train_files": str(work / "tasks.jsonl"), "use_chat_template": False, "add_bos": False,
    "tokenizer_type": "huggingface", "tokenizer_path": str(work / "hf"), "batch_size": PROMPTS,
    "num_generations": ANSWERS, "num_batches": UPDATES // keys.get("num_iterations", 1),
    "max_target_length": LENGTH, "max_prefill_predict_length": LENGTH // 2, "dtype": "float32",
    "weight_dtype": "float32", "matmul_precision": "highest", "reward_functions": ["some_reward:reward"],
    "stop_strings": ["t", "e", "s"], "degenerate_group_masking": False,
    "decode_sampling_temperature": TEMPERATURE, "enable_checkpointing": False, "base_output_directory": str(work),
    "run_name": method.replace(", ", "-").replace(" ", "-"),
  }  # fmt: skip
  groups: list[list[AnswerGroup]] = []
  seen, ask = _Steps(), Answerer.ask

  def recorded(*arguments: Any) -> list[AnswerGroup]:
    groups.append(ask(*arguments))
    return groups[-1]

  (work / "some_reward.py").write_text(_REWARD)
  with mock.patch.object(Answerer, "ask", recorded), chdir(work):
    train(resolve_source(str(work / "hf"), {**own, **keys}).config, callbacks=[seen])
  return seen.steps, [_written(batch) for batch in groups]


def _written(groups: list[AnswerGroup]) -> dict[str, Any]:
  """A batch as TRL takes it: an entry for each answer."""
  answers = [(group.task, answer) for group in groups for answer in group.answers]
  return {
    "prompt_ids": [list(task.tokens) for task, _ in answers],
    "completion_ids": [list(answer.token_ids) for _, answer in answers],
    "known_rewards": [float(reward) for group in groups for reward in group.rewards],
  }


_REWARD = """
def reward(prompts, completions, answers):
  return [sum(text.encode()) % 7 / 7 for text in completions]
"""

_THEIRS = """
import json, sys
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

asked = json.load(sys.stdin)
batches = iter(asked["batches"])
rows = len(asked["batches"][0]["completion_ids"])

def answers(prompts, trainer):
  return next(batches) | {"logprobs": None}

def reward(known_rewards, **_):
  return known_rewards

arguments = GRPOConfig(
  output_dir=f"{asked['data']}/theirs", max_steps=asked["updates"], per_device_train_batch_size=rows,
  num_generations=asked["answers"], max_completion_length=asked["length"], temperature=asked["temperature"],
  learning_rate=asked["rate"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1e9,
  adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, logging_steps=1, save_strategy="no", report_to=[],
  use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0, use_bias_correction_kl=False, **asked["method"],
)
made = GRPOTrainer(
  model=AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32), args=arguments, reward_funcs=reward,
  train_dataset=load_dataset("json", data_files=f"{asked['data']}/tasks.jsonl", split="train", cache_dir=asked["data"]),
  processing_class=AutoTokenizer.from_pretrained(asked["folder"], padding_side="left"), rollout_func=answers,
)
made.train()
logs = [line for line in made.state.log_history if "loss" in line]
print(json.dumps({name: [float(line[name]) for line in logs] for name in ("loss", "grad_norm")}))
"""
