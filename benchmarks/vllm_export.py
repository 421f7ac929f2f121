"""What was trained here and went out by `convert to-hf`, answered by vLLM beside our engine.

  python -m benchmarks.vllm_export --python VLLM/bin/python [--json] [MODEL ...]

Each named model is made small, trained a few float32 steps, and converted. Both then answer one prompt greedily. vLLM
lives in an environment of its own, since it pins versions of much that is used here too. Prints, for each model, how
many of the tokens are the same before the first that is not, and how far their log-probabilities are apart.
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
  arguments = parser.parse_args()
  with redirect_stdout(sys.stderr):  # what runs and conversions say
    found = {name: compare(name, arguments.python) for name in arguments.models or MODELS}
  if arguments.json:
    print(json.dumps(found))
    return
  for name, (same, apart) in found.items():
    print(f"{name:>18}  {same:2} of {TOKENS} tokens the same, log-probabilities within {apart:.1e}")


def compare(name: str, python: str) -> tuple[int, float]:
  """How many tokens both write before they part, and how far their log-probabilities are apart until there."""
  with tempfile.TemporaryDirectory() as work:
    ours, prompt = answered(name, Path(work))
    theirs = by_vllm(python, Path(work) / "hf", (SMALL | MODELS[name])["dtype"], prompt)
  same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), TOKENS)
  return same, max((abs(a[1] - b[1]) for a, b in zip(ours[:same], theirs[:same], strict=True)), default=0.0)


def answered(name: str, work: Path) -> tuple[list[tuple[int, float]], list[int]]:
  """Trains and converts to `work`/hf, and reads that: tokens with their log-probabilities, and the prompt."""
  keys = SMALL | MODELS[name]
  maxtext.train(maxtext.load_config(name, **keys, base_output_directory=str(work), run_name="run"))
  assert command(["convert", "to-hf", str(work / "run"), str(work / "hf")]) == 0
  config = maxtext.load_config(
    name, **keys, load_parameters_path=str(work / "hf"), source_checkpoint_layout="safetensors"
  )
  model = dropless(build_model(config, make_mesh(config)))
  engine = make_engine(config, model, load_params(config, model))
  prompt = np.random.default_rng(0).integers(3, config.vocab_size, PROMPT).tolist()
  engine.insert(engine.prefill(prompt), 0, prompt, SamplingParams(temperature=0.0))
  active = [slot == 0 for slot in range(engine.slots)]
  steps = [engine.decode_step(active) for _ in range(TOKENS)]
  return [(int(step.token_ids[0]), float(step.logprobs[0])) for step in steps], prompt


def by_vllm(python: str, folder: Path, dtype: str, prompt: list[int]) -> list[tuple[int, float]]:
  """The same from vLLM."""
  asked = json.dumps({"folder": str(folder), "dtype": dtype, "prompt": prompt, "tokens": TOKENS, "length": LENGTH})
  done = subprocess.run([python, "-c", _VLLM, asked], stdout=subprocess.PIPE, text=True, check=True)
  return [(token, log_prob) for token, log_prob in json.loads(done.stdout.splitlines()[-1])]


_VLLM = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
model = LLM(model=asked["folder"], dtype=asked["dtype"], skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=asked["length"], max_num_seqs=2)
wanted = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=1, ignore_eos=True, detokenize=False)
answer = model.generate([{"prompt_token_ids": asked["prompt"]}], wanted, use_tqdm=False)[0].outputs[0]
print(json.dumps([(t, found[t].logprob) for t, found in zip(answer.token_ids, answer.logprobs)]))
"""


if __name__ == "__main__":
  main()
