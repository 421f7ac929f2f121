"""Tasks from files: multiple choice, and generation that is compared with an answer.

A file has a JSON object on each line, all of one kind. `{"prompt": ..., "choices": [...], "answer": 0}` is scored by
the log-likelihood of each choice after the prompt. `{"prompt": ..., "answer": ...}`, with a text or a list of texts, is
scored by what greedy sampling generates until "stop" or "max_tokens".
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError, model_validator

from maxtext.configs import ConfigError
from maxtext.evaluation.scoring import Scorer, TokenPair
from maxtext.inference.sampling import SamplingParams
from maxtext.observe.evaluation_records import EvaluationRecord

_Text = Annotated[StrictStr, Field(min_length=1)]


class ChoiceSample(BaseModel):
  """A prompt, choices, and the number of the right one, from 0. Other fields are not read."""

  prompt: StrictStr
  choices: list[_Text] = Field(min_length=2)
  answer: StrictInt = Field(ge=0)

  @model_validator(mode="after")
  def _has_answer(self) -> "ChoiceSample":
    if self.answer >= len(self.choices):
      raise ValueError(f"answer {self.answer} is none of {len(self.choices)} choices, which are counted from 0")
    return self


class GenerationSample(BaseModel):
  """A prompt, and the answers that are right. Other fields are not read."""

  prompt: StrictStr
  answer: _Text | Annotated[list[_Text], Field(min_length=1)]
  stop: list[_Text] = ["\n\n"]
  max_tokens: StrictInt | None = Field(None, ge=1)

  @property
  def answers(self) -> list[str]:
    """The right answers, without spaces around them."""
    return [one.strip() for one in ([self.answer] if isinstance(self.answer, str) else self.answer)]


@dataclass(frozen=True)
class MultipleChoiceTask:
  """Whether the right choice is the likeliest: `acc` by the log-likelihood, `acc_norm` by that of a character."""

  name: str
  samples: Sequence[ChoiceSample]

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics of all samples."""
    pairs = (_pair(scorer, sample.prompt, choice) for sample in self.samples for choice in sample.choices)
    scores = scorer.loglikelihoods(pairs, self.name)
    acc, acc_norm = list[float](), list[float]()
    for sample in self.samples:
      found = [next(scores).value for _ in sample.choices]
      by_character = [value / len(choice) for value, choice in zip(found, sample.choices, strict=True)]
      acc.append(found.index(max(found)) == sample.answer)
      acc_norm.append(by_character.index(max(by_character)) == sample.answer)
    return [_record(self.name, {"acc": acc, "acc_norm": acc_norm})]


@dataclass(frozen=True)
class GenerationTask:
  """Whether the generated text is one of the right answers, without spaces around it: `exact_match`."""

  name: str
  samples: Sequence[GenerationSample]

  def evaluate(self, scorer: Scorer) -> list[EvaluationRecord]:
    """The metrics of all samples."""
    prompts = [scorer.encode_prompt(sample.prompt) for sample in self.samples]
    params = [SamplingParams(temperature=0, stop=one.stop, max_tokens=one.max_tokens) for one in self.samples]
    texts = scorer.generate(prompts, params, self.name)
    return [
      _record(
        self.name,
        {"exact_match": [text.strip() in one.answers for text, one in zip(texts, self.samples, strict=True)]},
      )
    ]


_Sample = TypeVar("_Sample", ChoiceSample, GenerationSample)


def read_samples(path: Path, limit: int | None, has_choices: bool) -> MultipleChoiceTask | GenerationTask:
  """The task of a file; raises `ConfigError` with the line that is wrong."""
  content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
  lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()][:limit]
  if has_choices:
    return MultipleChoiceTask(path.stem, _parsed(path, lines, ChoiceSample))
  return GenerationTask(path.stem, _parsed(path, lines, GenerationSample))


def _parsed(path: Path, lines: Sequence[tuple[int, bytes]], kind: type[_Sample]) -> list[_Sample]:
  samples = []
  for number, line in lines:
    try:
      samples.append(kind.model_validate_json(line))
    except ValidationError as error:
      first = error.errors(include_url=False, include_context=False, include_input=False)[0]
      where = ".".join(str(part) for part in first["loc"])
      raise ConfigError(f"--tasks {path}, line {number}: {where and f'{where}: '}{first['msg']}.") from None
  return samples


def _pair(scorer: Scorer, prompt: str, choice: str) -> TokenPair:
  """The tokens of a prompt and a choice, with a space between them unless there is one or a new line."""
  if scorer.chat:
    return scorer.encode_prompt(prompt), scorer.tokenizer.encode_continuation(choice, special=False)
  joined = not prompt or prompt[-1].isspace() or choice[0].isspace()
  return scorer.encode_pair(prompt, choice if joined else f" {choice}")


def _record(name: str, values: dict[str, list[float]]) -> EvaluationRecord:
  """The means, with their standard errors."""
  count = len(next(iter(values.values())))
  means = {metric: sum(found) / count for metric, found in values.items()}
  stderr = {
    metric: math.sqrt(sum((value - means[metric]) ** 2 for value in found) / (count - 1) / count)
    for metric, found in values.items()
    if count > 1
  }
  return EvaluationRecord(name, means, stderr, count)
