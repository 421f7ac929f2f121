"""What was trained here and went out by `convert to-hf`, answered by vLLM beside our engine.

  python -m benchmarks.vllm_export --python VLLM/bin/python [--json] [MODEL ...]
  python -m benchmarks.vllm_export --python VLLM/bin/python --quantization int8 --prompts 64 llama3.1-8b

Each named model is made small, trained a few float32 steps, and converted; with `--quantization`, its weights at rest
in that format are. Both then answer prompts greedily. vLLM lives in an environment of its own, since it pins versions
of much that is used here too. Prints, for each model, how many of the tokens are the same before the first that is not,
and how far their log-probabilities are apart.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

import maxtext
from maxtext.cli.main import main as command
from maxtext.inference.engine import dropless
from maxtext.inference.inference_model import load_params, make_engine
from maxtext.inference.sampling import SamplingParams
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model

TOKENS, PROMPT, LENGTH = 16, 20, 64
# Sizes that vLLM's kernels for CPUs take.
SMALL = {
  "override_model_config": True, "base_emb_dim": 256, "base_mlp_dim": 512, "base_num_query_heads": 4,
  "base_num_kv_heads": 2, "head_dim": 64, "base_num_decoder_layers": 4, "vocab_size": 512, "dtype": "float32",
  "max_target_length": LENGTH, "max_prefill_predict_length": 32, "dataset_type": "synthetic",
  "per_device_batch_size": 4, "steps": 3, "learning_rate": 1e-3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 128}
MODELS: dict[str, dict] = {
  "llama3.1-8b": {},
  "mistral-7b": {},
  "qwen2.5-7b": {},
  "qwen3-8b": {},
  "gemma2-2b": {},
  "gemma3-4b": {},
  "olmo3-7b": {},
  "mixtral-8x7b": EXPERTS | {"base_moe_mlp_dim": 512},
  "qwen3-30b-a3b": EXPERTS,
  "gpt-oss-20b": EXPERTS,
  "qwen3-next-80b-a3b": EXPERTS | {"dtype": "bfloat16"},  # the only format of its kernels there
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("models", nargs="*", choices=list(MODELS), metavar="MODEL")
  parser.add_argument("--python", required=True, help="the interpreter of an environment with vLLM")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  parser.add_argument(
    "--quantization", default="", choices=["", "int8", "fp8"], help="of weights at rest, and of inputs"
  )
  parser.add_argument("--prompts", type=int, default=1, help="how many are answered")
  arguments = parser.parse_args()
  with redirect_stdout(sys.stderr):  # what runs and conversions say
    found = {
      name: compare(name, arguments.python, arguments.quantization, arguments.prompts)
      for name in arguments.models or MODELS
    }
  if arguments.json:
    print(json.dumps(found))
    return
  for name, (equal, same, apart) in found.items():
    print(
      f"{name:>18}  {equal:2} of {arguments.prompts} answers the same, at least {same:2} of {TOKENS} tokens, "
      f"log-probabilities within {apart:.1e}"
    )


Answer = list[tuple[int, float]]


def compare(name: str, python: str, quantization: str, count: int) -> tuple[int, int, float]:
  """How many answers are the same, how many tokens both write before they part, and how far their log-probabilities
  are apart until there, at the worst."""
  with tempfile.TemporaryDirectory() as work:
    ours, prompts = answered(name, Path(work), quantization, count)
    theirs = by_vllm(python, Path(work) / "hf", (SMALL | MODELS[name])["dtype"], prompts)
  pairs = [list(zip(a, b, strict=True)) for a, b in zip(ours, theirs, strict=True)]
  same = [next((i for i, (a, b) in enumerate(pair) if a[0] != b[0]), TOKENS) for pair in pairs]
  apart = [abs(a[1] - b[1]) for pair, until in zip(pairs, same, strict=True) for a, b in pair[:until]]
  return same.count(TOKENS), min(same), max(apart, default=0.0)


def answered(name: str, work: Path, quantization: str, count: int) -> tuple[list[Answer], list[list[int]]]:
  """Trains and converts to `work`/hf, and reads that: tokens with their log-probabilities, and the prompts."""
  keys = SMALL | MODELS[name]
  maxtext.train(maxtext.load_config(name, **keys, base_output_directory=str(work), run_name="run"))
  source, rest = work / "run", {"quantization": quantization, "weight_format": quantization} if quantization else {}
  if rest:
    source = maxtext.quantize(work / "run", work / "rest", **rest)  # type: ignore[arg-type]
  assert command(["convert", "to-hf", str(source), str(work / "hf")]) == 0
  config = maxtext.load_config(
    name, **keys, **rest, load_parameters_path=str(work / "hf"), source_checkpoint_layout="safetensors"
  )
  model = dropless(build_model(config, make_mesh(config), serving=True))
  engine = make_engine(config, model, load_params(config, model))
  prompts = np.random.default_rng(0).integers(3, config.vocab_size, (count, PROMPT)).tolist()
  answers = []
  for prompt in prompts:
    engine.insert(engine.prefill(prompt), 0, prompt, SamplingParams(temperature=0.0))
    active = [slot == 0 for slot in range(engine.slots)]
    steps = [engine.decode_step(active) for _ in range(TOKENS)]
    answers.append([(int(step.token_ids[0]), float(step.logprobs[0])) for step in steps])
  return answers, prompts


def by_vllm(python: str, folder: Path, dtype: str, prompts: list[list[int]]) -> list[Answer]:
  """The same from vLLM."""
  asked = json.dumps({"folder": str(folder), "dtype": dtype, "prompts": prompts, "tokens": TOKENS, "length": LENGTH})
  done = subprocess.run([python, "-c", _VLLM, asked], stdout=subprocess.PIPE, text=True, check=True)
  return [[(token, log_prob) for token, log_prob in answer] for answer in json.loads(done.stdout.splitlines()[-1])]


_VLLM = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
model = LLM(model=asked["folder"], dtype=asked["dtype"], skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=asked["length"], max_num_seqs=2)
wanted = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=1, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
answers = [output.outputs[0] for output in model.generate(prompts, wanted, use_tqdm=False)]
print(json.dumps([[(t, found[t].logprob) for t, found in zip(a.token_ids, a.logprobs)] for a in answers]))
"""


if __name__ == "__main__":
  main()
