"""Supervised fine-tuning, DPO, KTO and GRPO beside TRL: the same tiny Llama, the same files, ten steps of each.

  python -m benchmarks.trl --python TRL/bin/python [--json]

TRL lives in an environment of its own. Both read one Hugging Face folder of random float32 weights, take all examples
in one batch, so that their order does not matter, and update with plain AdamW at a constant rate. Prints the losses of
both and the largest difference.

KTO's KL is estimated from prompts with answers of other rows: here of the next row of the file, in TRL of the row
before in the batch, around the end in both. So TRL reads the rows in reverse, and
both compare the same prompts and answers.

GRPO and its relatives are in `benchmarks.trl_policy`. The loss of a policy that wrote its answers itself is near 0
whatever its gradient is, so the norms of gradients are compared too, as a share.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import maxtext
from benchmarks.trl_policy import COMPARED, compare_policies
from maxtext.cli.main import main as command
from maxtext.training.callbacks.base import Callback

STEPS, RATE, EXAMPLES, LENGTH = 10, 1e-3, 8, 128
TEMPLATE = (
  "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
SIZES = {
  "override_model_config": True, "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_query_heads": 4,
  "base_num_kv_heads": 2, "head_dim": 16, "base_num_decoder_layers": 2, "vocab_size": 512, "dtype": "float32",
  "matmul_precision": "highest", "max_target_length": LENGTH,
}  # fmt: skip
OPTIMIZER = {
  "learning_rate": RATE, "warmup_steps_fraction": 0.0, "learning_rate_final_fraction": 1.0, "adam_b1": 0.9,
  "adam_b2": 0.999, "adam_eps": 1e-8, "adam_weight_decay": 0.0, "gradient_clipping_threshold": 0.0,
}  # fmt: skip
KTO_WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
METHODS: dict[str, dict[str, Any]] = {
  "sft": {"use_sft": True, "train_data_columns": ["prompt", "completion"]},
  "dpo": {"use_dpo": True, "train_data_columns": ["prompt", "chosen", "rejected"]},
  "kto": {"use_dpo": True, "train_data_columns": ["prompt", "completion", "label"], "dpo_loss_type": ["kto"]}
  | {f"kto_{name}": weight for name, weight in KTO_WEIGHTS.items()},
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--python", required=True, help="the interpreter of an environment with TRL")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  arguments = parser.parse_args()
  with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as work:
    found = compare(arguments.python, Path(work))
  if arguments.json:
    print(json.dumps(found))
    return
  print(f"TRL {found['trl']}, transformers {found['transformers']}, torch {found['torch']}")
  for method in METHODS:
    both = found[method]
    print(f"{method}: largest difference {both['difference']:.1e}")
    for name in ("ours", "theirs"):
      print(f"  {name:>6}  " + " ".join(f"{loss:.6f}" for loss in both[name]))
    if "kl" in both:
      print("      kl  " + " ".join(f"{kl:.6f}" for kl in both["kl"]))
  for method, both in found["policy"].items():
    print(
      f"{method}: largest difference {both['difference']:.1e}, of gradient norms {both['gradient']:.1e}; up to "
      f"{both['clipped']:.1%} clipped, answers of {both['lengths'][0]} to {both['lengths'][1]} tokens"
    )
    for metric in COMPARED:
      for name, values in both[metric].items():
        print(f"  {metric:>9} {name:>6}  " + " ".join(f"{value:.6f}" for value in values))


def compare(python: str, work: Path) -> dict[str, Any]:
  """Losses of both by method, and the versions of the other side."""
  make_model(work)
  for method in METHODS:
    rows = [example(method, number) for number in range(EXAMPLES)]
    (work / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  asked = {"folder": str(work / "hf"), "data": str(work), "steps": STEPS, "rate": RATE, "batch": EXAMPLES,
           "length": LENGTH, "methods": list(METHODS), "kto": KTO_WEIGHTS}  # fmt: skip
  done = subprocess.run(
    [python, "-c", _THEIRS], input=json.dumps(asked), capture_output=True, text=True, check=False, cwd=work
  )
  if done.returncode:
    raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
  theirs = json.loads(done.stdout.splitlines()[-1])
  found: dict[str, Any] = {name: theirs[name] for name in ("trl", "transformers", "torch")}
  for method in METHODS:
    steps = train(method, work)
    ours = [step["loss"] for step in steps]
    difference = max(abs(a - b) for a, b in zip(ours, theirs[method], strict=True))
    found[method] = {"ours": ours, "theirs": theirs[method], "difference": difference}
    if "kl" in steps[0]:
      found[method]["kl"] = [step["kl"] for step in steps]
  return found | {"policy": compare_policies(python, work, OPTIMIZER)}


def make_model(work: Path) -> None:
  """A tokenizer with a chat template, and random weights as a Hugging Face folder `hf`."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
  from transformers import PreTrainedTokenizerFast

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  texts = [json.dumps(example(method, number)) for method in METHODS for number in range(EXAMPLES)]
  tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    ),
  )
  fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", bos_token=None
  )
  fast.chat_template = TEMPLATE
  maxtext.train(
    maxtext.load_config(
      "llama3.1-8b",
      **SIZES,
      steps=1,
      learning_rate=0.0,
      dataset_type="synthetic",
      per_device_batch_size=1,
      base_output_directory=str(work),
      run_name="start",
    )
  )
  assert command(["convert", "to-hf", str(work / "start"), str(work / "hf")]) == 0
  fast.save_pretrained(work / "hf")


def example(method: str, number: int) -> dict[str, Any]:
  """A row for the method, with answers of several lengths."""
  prompt = [{"role": "user", "content": f"What is {number} times {number + 1}?" * (1 + number % 3)}]
  right, wrong = f"It is {number * (number + 1)}. " * (1 + number % 2), f"Perhaps {number}, who knows."
  is_right = method == "sft" or number % 3 > 0
  answers = {"chosen": right, "rejected": wrong} if method == "dpo" else {"completion": right if is_right else wrong}
  label = {"label": is_right} if method == "kto" else {}
  turns = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
  return {"prompt": prompt} | turns | label


class _Steps(Callback):
  def __init__(self) -> None:
    self.steps: list[dict[str, float]] = []

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self.steps.append(dict(metrics))


def train(method: str, work: Path) -> list[dict[str, float]]:
  """Our metrics of each step."""
  from maxtext.weights.resolve import resolve_source

  keys = METHODS[method] | {
    "grain_train_files": str(work / f"{method}.jsonl"), "packing": False,
    "per_device_batch_size": EXAMPLES, "num_epoch": STEPS, "enable_data_shuffling": False, "steps": STEPS,
    "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "max_target_length": LENGTH,
    "base_output_directory": str(work), "run_name": method, "enable_checkpointing": False, "grain_worker_count": 0,
    "dpo_beta": 0.1, "add_bos": False, "tokenizer_type": "huggingface", "tokenizer_path": str(work / "hf"),
  }  # fmt: skip
  seen = _Steps()
  maxtext.train(resolve_source(str(work / "hf"), keys | OPTIMIZER).config, callbacks=[seen])
  return seen.steps


_THEIRS = """
import json, sys
import torch, transformers, trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

asked = json.load(sys.stdin)
found = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
for method in asked["methods"]:
  tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
  model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32)
  data = load_dataset("json", data_files=f"{asked['data']}/{method}.jsonl", split="train", cache_dir=asked["data"])
  if method == "kto":
    data = data.select(range(len(data) - 1, -1, -1))
  config, trainer, own = {
    "sft": (SFTConfig, SFTTrainer, {}),
    "dpo": (DPOConfig, DPOTrainer, {"beta": 0.1}),
    "kto": (KTOConfig, KTOTrainer, {"beta": 0.1} | asked["kto"]),
  }[method]
  arguments = config(
    output_dir=f"{asked['data']}/{method}", max_steps=asked["steps"], per_device_train_batch_size=asked["batch"],
    learning_rate=asked["rate"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0,
    adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, logging_steps=1, save_strategy="no", report_to=[],
    use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=asked["length"], seed=0, **own,
  )
  made = trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
  made.train()
  found[method] = [float(line["loss"]) for line in made.state.log_history if "loss" in line]
print(json.dumps(found))
"""


if __name__ == "__main__":
  main()
