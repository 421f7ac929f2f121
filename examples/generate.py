"""Generate from Python.

  python examples/train_on_text.py
  python examples/generate.py [RUN]

RUN is the folder of a run or a checkpoint, or a Hugging Face folder of safetensors.
"""

import sys

import maxtext

llm = maxtext.LLM(sys.argv[1] if len(sys.argv) > 1 else "runs/text")

# Greedy and sampled, many prompts at once; a prompt is a text or a list of token ids.
greedy = maxtext.SamplingParams(max_tokens=12)
sampled = maxtext.SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=1, logprobs=1)
outputs = llm.generate(["def ", "import "], [greedy, sampled])
for output in outputs:
  print(repr(llm.tokenizer.decode(output.prompt_token_ids) + output.text), output.finish_reason)
assert outputs[1].logprobs is not None
print("mean log-probability of the second:", round(sum(outputs[1].logprobs) / len(outputs[1].logprobs), 3))

# Text as it is generated.
llm.generate("class ", greedy, on_text=lambda text: print(text, end="", flush=True))
print()
