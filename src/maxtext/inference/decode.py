"""What `maxtext decode` does: one prompt, a file of prompts, or a conversation in the terminal."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.tokenizers import Message
from maxtext.inference.answer import Answer
from maxtext.inference.loading import Loaded
from maxtext.inference.sampling import Settings

Show = Callable[[str], None]


def decode(loaded: Loaded, settings: Settings, show: Show) -> None:
  """Answers the prompt of the configuration, and shows prompt and answer as they come."""
  c = loaded.config
  show(c.prompt)
  answer = answers(loaded, [encoded(loaded, c.prompt)], settings, show)[0]
  show("\n")
  if c.return_log_prob:
    for event in answer.events:
      show(f"{event.log_prob:9.4f}  {event.token}\n")
  text = c.prompt + answer.text
  if c.autoregressive_decode_assert and text != c.autoregressive_decode_assert:
    raise RunError(f"decoding gave {text!r}, and autoregressive_decode_assert={c.autoregressive_decode_assert!r}.")


def decode_file(loaded: Loaded, file: str, settings: Settings, show: Show) -> None:
  """Answers every line of a file, and shows a line of JSON for each, in their order."""
  try:
    prompts = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"--prompts {file} cannot be read: {error}.") from None
  for prompt, answer in zip(prompts, answers(loaded, [encoded(loaded, p) for p in prompts], settings), strict=True):
    line = Line(prompt, answer.text, answer.finish or "", len(answer.tokens))
    log_probs = {"log_probs": [event.log_prob for event in answer.events]} if loaded.config.return_log_prob else {}
    show(json.dumps(asdict(line) | log_probs, ensure_ascii=False) + "\n")


def chat(loaded: Loaded, lines: Iterable[str], settings: Settings, show: Show) -> None:
  """Answers line by line in the model's own format; it remembers what was said, until that has no room."""
  said: list[Message] = []
  for line in lines:
    said.append({"role": "user", "content": line.rstrip("\n")})
    try:
      answer = answers(loaded, [loaded.tokenizer.chat(said, answer=True).tolist()], settings, show)[0]
    except ConfigError as refused:
      if len(said) == 1:
        raise
      show(f"({refused} The conversation starts anew.)\n")
      said.clear()
      continue
    said.append({"role": "assistant", "content": answer.text})
    show("\n")


@dataclass(frozen=True)
class Line:
  """What is said of one prompt of a file."""

  prompt: str
  text: str
  finish: str
  tokens: int


def encoded(loaded: Loaded, prompt: str) -> list[int]:
  """A prompt's tokens: of the text itself, or of a conversation that begins with it (`use_chat_template`)."""
  if loaded.config.use_chat_template:
    return loaded.tokenizer.chat([{"role": "user", "content": prompt}], answer=True).tolist()
  return loaded.tokenizer.encode(prompt).tolist()


def answers(
  loaded: Loaded, prompts: Sequence[Sequence[int]], settings: Settings, show: Show | None = None
) -> list[Answer]:
  """The answers to prompts, in their order, as many at once as there are slots; `show` gets all text as it comes."""
  scheduler = loaded.scheduler()
  requests = [loaded.request(prompt, settings) for prompt in prompts]
  found = {request: Answer(request, loaded.tokenizer) for request in requests}
  for request in requests:
    scheduler.submit(request)
  for event in scheduler.run():
    answer = found[event.request]
    text = answer.add(event)
    if answer.finish and not event.finish:  # by a stop text
      scheduler.cancel(event.request)
    if show and text:
      show(text)
  return list(found.values())


if __name__ == "__main__":
  from maxtext.cli.forwarding import forward

  forward("maxtext.inference.decode")
