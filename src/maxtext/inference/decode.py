"""What `maxtext decode` does: one prompt, a file of prompts, or a conversation in the terminal."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.tokenizers import Message
from maxtext.inference.llm import LLM
from maxtext.inference.sampling import SamplingParams

Show = Callable[[str], None]


def decode(llm: LLM, sampling_params: SamplingParams, show: Show) -> None:
  """Answers the prompt of the configuration, and shows prompt and answer as they come."""
  c = llm.config
  show(c.prompt)
  (output,) = llm.generate([c.prompt], _reported(llm, sampling_params), show)
  show("\n")
  for log_prob, token in zip(output.logprobs or (), output.token_ids, strict=c.return_log_prob):
    show(f"{log_prob:9.4f}  {token}\n")
  text = c.prompt + output.text
  if c.autoregressive_decode_assert and text != c.autoregressive_decode_assert:
    raise RunError(f"decoding gave {text!r}, and autoregressive_decode_assert={c.autoregressive_decode_assert!r}.")


def decode_file(llm: LLM, file: str, sampling_params: SamplingParams, show: Show) -> None:
  """Answers every line of a file, and shows a line of JSON for each, in their order."""
  try:
    prompts = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"--prompts {file} cannot be read: {error}.") from None
  for prompt, output in zip(prompts, llm.generate(prompts, _reported(llm, sampling_params)), strict=True):
    tokens = sum(token not in sampling_params.stop_token_ids for token in output.token_ids)
    line = Line(prompt, output.text, output.finish_reason, tokens)
    log_probs = {} if output.logprobs is None else {"log_probs": output.logprobs}
    show(json.dumps(asdict(line) | log_probs, ensure_ascii=False) + "\n")


def chat(llm: LLM, lines: Iterable[str], sampling_params: SamplingParams, show: Show) -> None:
  """Answers line by line in the model's own format; it remembers what was said, until that has no room."""
  said: list[Message] = []
  for line in lines:
    said.append({"role": "user", "content": line.rstrip("\n")})
    try:
      (output,) = llm.chat(said, sampling_params, show)
    except ConfigError as refused:
      if len(said) == 1:
        raise
      show(f"({refused} The conversation starts anew.)\n")
      said.clear()
      continue
    said.append({"role": "assistant", "content": output.text})
    show("\n")


def _reported(llm: LLM, sampling_params: SamplingParams) -> SamplingParams:
  """With log-probabilities, where the keys ask for them."""
  return replace(sampling_params, logprobs=0) if llm.config.return_log_prob else sampling_params


@dataclass(frozen=True)
class Line:
  """What is said of one prompt of a file."""

  prompt: str
  text: str
  finish: str
  tokens: int


if __name__ == "__main__":
  from maxtext.cli.forwarding import forward

  forward("maxtext.inference.decode")
